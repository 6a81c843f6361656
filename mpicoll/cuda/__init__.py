"""CUDA: the runtime's face with CuPy behind it, what GPUs and MPI can do, rank to GPU."""
