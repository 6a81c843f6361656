"""The exceptions of mpicoll.

::

    MpicollError (RuntimeError)          base class; also called DistError
    ├── UsageError                       found on this rank, before anything was sent
    │   ├── ArgumentError (ValueError)       an invalid value: size, rank, root, state
    │   │   └── EmptyListError (IndexError)      a list that must not be empty
    │   ├── ArgumentTypeError (TypeError)    an object of the wrong type
    │   ├── UnsupportedError (ValueError)    an unsupported dtype, operation, device or layout
    │   ├── NotInitializedError (ValueError) no process group exists (yet, or any longer)
    │   └── ForkedError                      called in a forked child, which has no MPI
    ├── LaunchError (ValueError)         launcher, MPI library and arguments disagree
    ├── DeviceMemoryError (MemoryError)  a device is out of memory
    ├── DistBackendError                 a failure between ranks
    │   ├── MPIError                         the MPI library returned an error
    │   ├── LostRankError                    a rank is lost, and the job continues without it (ULFM)
    │   ├── MismatchError                    collective mismatch: ranks called different operations
    │   └── CollectiveTimeoutError (TimeoutError)  a call timed out
    └── RefusedPickleError (pickle.UnpicklingError)  a received object is not allowed, or invalid

Every class is a ``RuntimeError``, as errors of ``torch.distributed`` backends are. Each also
derives from the standard type that ``torch.distributed`` raises in the same case, so ``except``
clauses written for PyTorch keep working.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

__all__ = [
    "ArgumentError", "ArgumentTypeError", "CollectiveTimeoutError", "DeviceMemoryError",
    "DistBackendError", "DistError", "EmptyListError", "ForkedError", "LaunchError",
    "LostRankError", "MPIError", "MismatchError", "MpicollError", "NotInitializedError",
    "RefusedPickleError", "UnsupportedError", "UsageError",
]  # fmt: skip


class MpicollError(RuntimeError):
    """Base class of all exceptions of mpicoll."""


DistError = MpicollError


class UsageError(MpicollError):
    """A mistake that this rank found before anything was sent."""


class ArgumentError(UsageError, ValueError):
    """An argument has the right type but an invalid value."""


class EmptyListError(ArgumentError, IndexError):
    """A list that must have entries is empty."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument has the wrong type."""


class UnsupportedError(UsageError, ValueError):
    """A dtype, operation, device, layout or feature is not supported."""


class NotInitializedError(UsageError, ValueError):
    """No default process group: init_process_group was not called, or the group was destroyed."""


class ForkedError(UsageError):
    """A forked child made a call. MPI belongs to the parent."""


class LaunchError(MpicollError, ValueError):
    """Launcher, MPI library and arguments disagree about the ranks of the job."""


class DeviceMemoryError(MpicollError, MemoryError):
    """A device is out of memory, even after the unused memory of torch and CuPy was freed."""


class DistBackendError(MpicollError):
    """A call failed in communication with other ranks; the group accepts no more calls."""


class MPIError(DistBackendError):
    """The MPI library reported an error. ``error_class`` is the MPI error class (an int)."""

    def __init__(self, message: str, error_class: int = 0) -> None:
        super().__init__(message)
        self.error_class = error_class


class LostRankError(DistBackendError):
    """A rank of the group is lost, and MPI continues. See ``mpirun --with-ft ulfm`` of Open MPI.

    ``ranks`` are the global ranks that are known to be lost (a tuple of int).
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class MismatchError(DistBackendError):
    """Collective mismatch: ranks called different operations. The message lists them by rank."""


class CollectiveTimeoutError(DistBackendError, TimeoutError):
    """An operation timed out."""


class RefusedPickleError(MpicollError, pickle.UnpicklingError):
    """A received object is not allowed by restricted_pickle, or its bytes are invalid."""
