"""The public functions: what ``import mpicoll as dist`` offers."""
