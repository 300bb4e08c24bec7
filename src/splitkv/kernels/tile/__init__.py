"""The vocabulary of device code: small functions that kernels read like the maths."""
