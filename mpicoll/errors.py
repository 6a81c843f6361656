"""The exceptions of mpicoll.

::

    MpicollError (RuntimeError)          everything below; also called DistError
    ├── UsageError                       found on this rank, before anything was sent
    │   ├── ArgumentError (ValueError)       an impossible value: size, rank, root, state
    │   │   └── EmptyListError (IndexError)      a list that must not be empty
    │   ├── ArgumentTypeError (TypeError)    an object of the wrong type
    │   ├── UnsupportedError (ValueError)    a dtype, operation, device or layout that is refused
    │   ├── NotInitializedError (ValueError) no process group exists (yet, or any more)
    │   └── ForkedError                      called in a forked child, which has no MPI
    ├── LaunchError (ValueError)         the job was started in a way that MPI does not see
    ├── DeviceMemoryError (MemoryError)  a device has too little memory left
    ├── DistBackendError                 something failed between the ranks
    │   ├── MPIError                         the MPI library returned an error
    │   ├── LostRankError                    a rank is lost, and the job goes on without it (ULFM)
    │   ├── MismatchError                    collective mismatch: ranks called different operations
    │   └── CollectiveTimeoutError (TimeoutError)  a rank did not come in time
    └── RefusedPickleError (pickle.UnpicklingError)  a received object not allowed, or invalid

Every one is a ``RuntimeError``, as errors of ``torch.distributed`` backends are, and carries the
standard type that ``torch.distributed`` raises in the same place, so that ``except`` clauses
written for PyTorch keep working.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CollectiveTimeoutError",
    "DeviceMemoryError",
    "DistBackendError",
    "DistError",
    "EmptyListError",
    "ForkedError",
    "LaunchError",
    "LostRankError",
    "MPIError",
    "MismatchError",
    "MpicollError",
    "NotInitializedError",
    "RefusedPickleError",
    "UnsupportedError",
    "UsageError",
]


class MpicollError(RuntimeError):
    """The root of the tree."""


DistError = MpicollError


class UsageError(MpicollError):
    """A mistake that this rank found by itself, before anything was sent."""


class ArgumentError(UsageError, ValueError):
    """An argument has the right type and an impossible value."""


class EmptyListError(ArgumentError, IndexError):
    """A list that must have entries has none."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument has the wrong type."""


class UnsupportedError(UsageError, ValueError):
    """A feature that exists elsewhere and is not offered here."""


class NotInitializedError(UsageError, ValueError):
    """There is no default process group: init_process_group was not called, or it is gone."""


class ForkedError(UsageError):
    """A forked child made a call; MPI belongs to the parent."""


class LaunchError(MpicollError, ValueError):
    """Launcher, MPI library and arguments disagree about who is in the job."""


class DeviceMemoryError(MpicollError, MemoryError):
    """A device has too little memory, when what torch and CuPy keep unused is freed, too."""


class DistBackendError(MpicollError):
    """An error that arose between the ranks."""


class MPIError(DistBackendError):
    """The MPI library reported an error. ``error_class`` is the MPI error class (an int)."""

    def __init__(self, message: str, error_class: int = 0) -> None:
        super().__init__(message)
        self.error_class = error_class

    def __reduce__(self) -> tuple[type[MPIError], tuple[str, int]]:
        return type(self), (str(self), self.error_class)


class LostRankError(DistBackendError):
    """A rank of the group is lost, and MPI lives on; see ``mpirun --with-ft ulfm`` of Open MPI.
    ``ranks`` are the global ranks that are known to be lost (a tuple of int).
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[type[LostRankError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class MismatchError(DistBackendError):
    """Collective mismatch: the ranks made different calls. The message lists them by rank."""


class CollectiveTimeoutError(DistBackendError, TimeoutError):
    """An operation did not complete in time."""


class RefusedPickleError(MpicollError, pickle.UnpicklingError):
    """A received object needs what restricted_pickle does not allow, or its bytes are invalid."""
