"""What every unit computes: integer NumPy functions and the configurations that hardware is built from."""
