"""CUDA: a runtime interface over CuPy, capabilities of GPUs and MPI, binding of ranks to GPUs."""
