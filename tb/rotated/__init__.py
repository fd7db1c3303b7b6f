"""Benches of the AXELRAM units."""
