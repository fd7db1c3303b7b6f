"""Components of the flash controller's nonlinear units."""
