"""Loops that combine and pack: the C library, NumPy where there is none, kernels on a GPU."""
