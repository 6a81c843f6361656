"""Horovod's API for PyTorch over mpicoll: ``import mpicoll.horovod.torch as hvd``.

Scripts for Horovod run with a changed import, started by mpirun, srun or torchrun; see
docs/horovod.md. Operations are matched by name, as in Horovod, so ranks may call them in any order.
"""

from __future__ import annotations

from mpicoll.errors import UnsupportedError

__all__ = ["run"]


def run(*arguments: object, **options: object) -> None:
    """Not supported: ranks are started by an MPI launcher, not from Python.

    Raises UnsupportedError (a ValueError), always.
    """
    raise UnsupportedError(
        "horovod.run is not supported: start the script with "
        "`mpirun -n N python script.py`, srun or torchrun"
    )
