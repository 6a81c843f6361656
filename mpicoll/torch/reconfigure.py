"""torch's ``enable_reconfigure``: a default group whose members change, from torch 2.15 on."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as c10d

from mpicoll.api import lifecycle
from mpicoll.api.reconfigure import Reconfigurable
from mpicoll.core.groups import ProcessGroup
from mpicoll.errors import DistBackendError
from mpicoll.torch.backend import SUCCESS, BackedGroup, TorchBackend
from mpicoll.torch.internals import disable_compile
from mpicoll.torch.works import CompletedWork

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ReconfigureOptions  # from torch 2.15 on


@disable_compile
class ReconfigurableBackend(TorchBackend):
    """A backend whose core group changes. It has no group before the first reconfigure.

    base: the core's group of all processes of the job, used only by this backend.
    """

    supports_reconfigure = True

    def __init__(self, base: ProcessGroup) -> None:
        self._groups = Reconfigurable(base)
        super().__init__(base)

    @property
    def core(self) -> ProcessGroup:
        """The current group. Raises DistBackendError (a RuntimeError) if there is none."""
        group = self._groups.group
        if group is None or group.closed is not None:
            raise DistBackendError(
                "the group has no members; with enable_reconfigure, call "
                "torch.distributed._reconfigure() first, and after an abort"
            )
        return group

    @core.setter
    def core(self, base: ProcessGroup) -> None:
        """Do nothing: ``reconfigure`` sets the current group."""

    def rank(self) -> int:
        """Return the rank in the current group. Before the first ``reconfigure``: in the job."""
        return (self._groups.group or self._groups.base).rank()

    def size(self) -> int:
        """Return the size of the current group. Before the first ``reconfigure``: of the job."""
        return (self._groups.group or self._groups.base).size()

    def get_reconfigure_handle(self) -> str:
        """Return the handle of this process for ``reconfigure``."""
        return self._groups.handle()

    def reconfigure(self, opts: ReconfigureOptions) -> CompletedWork:
        """Create the group of the processes with ``opts.handles``; only they call.

        Raises the errors of ``mpicoll.api.reconfigure.Reconfigurable.reconfigure``.
        """
        self._batch = None
        self._groups.reconfigure(opts.uuid, opts.handles, opts.timeout)
        return CompletedWork()

    def get_error(self) -> Any:
        """Return torch's ErrorType: SUCCESS between an abort and the next group, as Gloo does."""
        group = self._groups.group
        return SUCCESS if group is None or group.closed is not None else super().get_error()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of all later calls, also in later groups."""
        limit = timeout.total_seconds()
        self._groups.base.timeout = limit
        if self._groups.group is not None:
            self._groups.group.timeout = limit

    def abort(self) -> None:
        """Abort the current group and its pending calls. ``reconfigure`` creates the next group."""
        self._call_abort_hooks()
        group = self._groups.group
        if group is not None and group.closed is None:
            lifecycle.abort(group)

    def shutdown(self) -> None:
        """Destroy the base group; if it is the core's default group, this ends all groups."""
        if self._groups.base.closed is None:
            lifecycle.destroy_process_group(self._groups.base)


@disable_compile
class ReconfigurableGroup(BackedGroup):
    """The process group of a ``ReconfigurableBackend``, whose rank and size change."""

    backend: ReconfigurableBackend

    def rank(self) -> int:
        """Return this process's rank in the current group."""
        return self.backend.rank()

    def size(self) -> int:
        """Return the number of ranks of the current group."""
        return self.backend.size()

    # Their names in C++.
    getRank, getSize = rank, size

    def get_reconfigure_handle(self) -> str:
        """Return the handle of this process for ``reconfigure``."""
        return self.backend.get_reconfigure_handle()

    def reconfigure(self, opts: ReconfigureOptions) -> c10d.Work:
        """Create the group of the processes with ``opts.handles``; only they call."""
        return self.backend.reconfigure(opts)
