"""Keys turned into a basis in which they quantize well (AXELRAM), and what the integer pipeline shares with it."""
