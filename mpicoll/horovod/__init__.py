"""Horovod's API for PyTorch over mpicoll: ``import mpicoll.horovod.torch as hvd``.

Scripts for Horovod run with a changed import, started by mpirun, srun or torchrun; see
docs/horovod.md. Operations are matched by name, as in Horovod, so ranks may call them in any order.
"""
