"""Horovod's API for PyTorch over mpicoll: ``import mpicoll.horovod.torch as hvd``.

Scripts for Horovod run with their import changed, started by mpirun, srun or torchrun; see
docs/horovod.md. As there, operations are matched by their names, whatever the order in which ranks
call them.
"""

from __future__ import annotations

from mpicoll.errors import UnsupportedError

__all__ = ["run"]


def run(*arguments: object, **options: object) -> None:
    """Refuse: ranks are started by a launcher of MPI, not from Python.

    Raises UnsupportedError (a ValueError), always.
    """
    raise UnsupportedError(
        "horovod.run: functions are not started from Python here; start the script with "
        "`mpirun -n N python script.py`, srun or torchrun"
    )
