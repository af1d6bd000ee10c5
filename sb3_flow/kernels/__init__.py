"""Compiled loops over NumPy arrays (numba)."""
