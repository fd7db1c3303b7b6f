"""Components of AXELRAM: rotate, quantize, look up."""
