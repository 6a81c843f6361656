"""torchft's process group over mpicoll: a quorum continues after the loss of a rank.

torchft (pip install torchft) keeps the replicas of a training job together. Each replica has a
Manager, and a lighthouse reports which replicas are alive. When this changes, the Manager calls
``configure`` of the process group of the replicas. Here, all replicas are ranks of one job whose
MPI survives a lost rank (see docs/reliability.md). A replica that is started later cannot join.
"""

from __future__ import annotations

import secrets
from datetime import timedelta

import torch.distributed as c10d
from torchft.process_group import ProcessGroupWrapper

from mpicoll.api import lifecycle
from mpicoll.api.reconfigure import Reconfigurable
from mpicoll.core.groups import state
from mpicoll.torch.backend import build_group


class ProcessGroupMpicoll(ProcessGroupWrapper):  # type: ignore[misc]
    """torchft's process group of replicas that are ranks of one MPI job.

    timeout: timeout of calls and of ``configure``.

    Every rank of the job creates it at the same point. It starts MPI unless
    ``mpicoll.init_process_group`` has.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        if state.default is None:
            lifecycle.init_process_group(timeout=timeout)
        assert state.default is not None
        self._groups = Reconfigurable(state.default)
        self._aborted: Exception | None = None

    def _create_pg(self, store: c10d.Store, rank: int, world_size: int) -> c10d.ProcessGroup:
        """Create the group of the ranks with this store, which no other group has used."""
        if rank == 0:
            store.set("mpicoll/uuid", str(secrets.randbits(62)))
        store.set(f"mpicoll/{rank}", self._groups.handle())
        handles = [store.get(f"mpicoll/{other}").decode() for other in range(world_size)]
        core = self._groups.reconfigure(int(store.get("mpicoll/uuid")), handles, self._timeout)
        core.timeout = self._timeout.total_seconds()
        self._aborted = None
        return build_group(core, store)

    def errored(self) -> Exception | None:
        """Return the reason why the group must be configured again, or None."""
        core = self._groups.group
        if self._aborted is None and core is not None and core.error is not None:
            return core.failure()
        return self._aborted

    def abort(self, errored: bool = True) -> None:
        """End the group without waiting: pending calls raise."""
        core = self._groups.group
        if errored:
            self._aborted = self.errored() or RuntimeError("the process group was aborted")
        if core is not None and core.closed is None:
            lifecycle.abort(core)
        self._pg = None

    def shutdown(self) -> None:
        """End the group as ``abort`` does, but not MPI: see ``mpicoll.destroy_process_group``."""
        self.abort(errored=False)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of all later calls, and of ``configure``."""
        super().set_timeout(timeout)
        if self._groups.group is not None:
            self._groups.group.timeout = timeout.total_seconds()

    def getBackendName(self) -> str:
        """Return the name that torchft and torch show."""
        return "torchft-mpicoll"
