"""The exception of Horovod's API."""

from __future__ import annotations

from mpicoll.errors import DistBackendError

__all__ = ["HorovodInternalError"]


class HorovodInternalError(DistBackendError):
    """An operation failed: a collective mismatch, a lost rank, or the shutdown of the engine."""
