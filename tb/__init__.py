"""Why golden and hardware agree: cocotb testbenches, stream drivers and scoreboards."""
