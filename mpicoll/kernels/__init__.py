"""Loops that combine and pack: the C library, its replacement in NumPy, and kernels for GPUs."""
