"""Testbenches of the flash controller's nonlinear units."""
