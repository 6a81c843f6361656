"""torch's ``enable_reconfigure``: a default group whose members change, from torch 2.15 on."""

from __future__ import annotations

from typing import Any

import torch.distributed as c10d

from mpicoll.api import lifecycle
from mpicoll.api.reconfigure import Reconfigurable
from mpicoll.core.groups import ProcessGroup
from mpicoll.errors import DistBackendError
from mpicoll.torch.backend import SUCCESS, BackedGroup, TorchBackend
from mpicoll.torch.compilation import uncompiled
from mpicoll.torch.works import Done

__all__ = ["ReconfigurableBackend", "ReconfigurableGroup"]


@uncompiled
class ReconfigurableBackend(TorchBackend):
    """A backend on one group of the core after the other; on none before the first reconfigure.

    base: the core's group of all processes of the job, which only this serves.
    """

    supports_reconfigure = True

    def __init__(self, base: ProcessGroup) -> None:
        self._groups = Reconfigurable(base)
        super().__init__(base)

    @property
    def core(self) -> ProcessGroup:
        """The group that stands; raises DistBackendError (a RuntimeError) where there is none."""
        group = self._groups.group
        if group is None or group.closed is not None:
            raise DistBackendError(
                "the group has no members: with enable_reconfigure they meet in "
                "torch.distributed._reconfigure(), at first and after an abort"
            )
        return group

    @core.setter
    def core(self, base: ProcessGroup) -> None:
        """Nothing: the group that stands is that of the last reconfigure."""

    def rank(self) -> int:
        """This process's rank in the group that stands, before the first in the job."""
        return (self._groups.group or self._groups.base).rank()

    def size(self) -> int:
        """The number of ranks of the group that stands, before the first of the job."""
        return (self._groups.group or self._groups.base).size()

    def get_reconfigure_handle(self) -> str:
        """What names this process in ``reconfigure``."""
        return self._groups.handle()

    def reconfigure(self, opts: Any) -> Done:
        """Makes the group of the processes that ``opts.handles`` name; they alone call.

        Raises as ``mpicoll.api.reconfigure.Reconfigurable.reconfigure`` says.
        """
        self._batch = None
        self._groups.reconfigure(opts.uuid, opts.handles, opts.timeout)
        return Done()

    def get_error(self) -> Any:
        """torch's ErrorType; SUCCESS between an abort and the next reconfigure, as with Gloo."""
        group = self._groups.group
        return SUCCESS if group is None or group.closed is not None else super().get_error()

    def set_timeout(self, timeout: Any) -> None:
        """Sets the timeout of all calls to come, in the groups to come as well."""
        limit = timeout.total_seconds()
        self._groups.base.timeout = limit
        if self._groups.group is not None:
            self._groups.group.timeout = limit

    def abort(self) -> None:
        """Gives up what is pending and the group that stands; ``reconfigure`` makes another."""
        self._call_abort_hooks()
        group = self._groups.group
        if group is not None and group.closed is None:
            lifecycle.abandon(group)

    def shutdown(self) -> None:
        """Ends the group that stands, and MPI's part in the job."""
        if self._groups.base.closed is None:
            lifecycle.destroy_process_group(self._groups.base)


@uncompiled
class ReconfigurableGroup(BackedGroup):
    """The process group in front of a ``ReconfigurableBackend``, whose rank and size change."""

    backend: ReconfigurableBackend

    def rank(self) -> int:
        """This process's rank in the group that stands."""
        return self.backend.rank()

    def size(self) -> int:
        """The number of ranks of the group that stands."""
        return self.backend.size()

    # The names by which C++ looks for these.
    getRank, getSize = rank, size

    def get_reconfigure_handle(self) -> str:
        """What names this process in ``reconfigure``."""
        return self.backend.get_reconfigure_handle()

    def reconfigure(self, opts: Any) -> c10d.Work:
        """Makes the group of the processes that ``opts.handles`` name; they alone call."""
        return self.backend.reconfigure(opts)
