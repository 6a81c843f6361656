"""Groups that are made of a group: ``split_group`` and ``merge_remote_group``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as c10d

from mpicoll.core.work import parse_timeout
from mpicoll.torch import core_groups
from mpicoll.torch.compilation import disable_compile

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Backend

    from mpicoll.core.groups import ProcessGroup

__all__ = ["DerivedGroups"]


class _Group(Protocol):
    """The members of a process group that ``DerivedGroups`` uses."""

    group_name: str
    group_desc: str
    split_count: int

    @property
    def core(self) -> ProcessGroup:
        """The group of the core."""
        ...

    def get_group_store(self) -> c10d.Store:
        """Return torch's store of the group."""
        ...

    def _build_group(self, core: ProcessGroup, store: c10d.Store) -> Any:
        """Return a process group of the same class on another group of the core."""
        ...


@disable_compile
class DerivedGroups:
    """The methods of a process group that make another one of it."""

    #: The number of groups that were split from this one.
    split_count = 0

    def split_group(
        self: _Group,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Backend.Options | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> Any:
        """Create the group of some ranks of this one; only they call. Returns None on others.

        new_ranks: ranks in this group, in the order of the new one.
        """
        if self.core.rank() not in new_ranks:
            return None
        limit = parse_timeout(timeout, self.core.timeout, "split_group")
        name = group_name or f"{self.group_name}:split:{sorted(new_ranks)}"
        description = group_desc or f"{self.group_desc}:split:{self.split_count}"
        store = c10d.PrefixStore(f"{name}/", self.get_group_store())
        core = core_groups.split(self.core, new_ranks, limit, name)
        self.split_count += 1
        return _name(self._build_group(core, store), name, description)

    def merge_remote_group(
        self: _Group,
        store: c10d.Store,
        size: int,
        timeout: timedelta = c10d.default_pg_timeout,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> Any:
        """Create one group of all members of several groups, in the order in which they call.

        store: the same for all of them, not used for a merge before.
        size: the number of all members.
        timeout: for them to come, and of the new group's operations.

        All of them are ranks of one MPI job. Raises CollectiveTimeoutError (a RuntimeError) if
        fewer than ``size`` come in time, and ArgumentError (a ValueError) if more come.
        """
        limit = parse_timeout(timeout, None, "merge_remote_group")
        rank = store.add("mergeGroupRank", 1) - 1  # as torch does it for backends in C++
        group = self._build_group(core_groups.merge(self.core, store, rank, size, limit), store)
        name, description = f"{self.group_name}:merge", f"{self.group_desc}:merge"
        return _name(group, group_name or name, group_desc or description)


def _name(group: Any, name: str, description: str) -> Any:
    group._set_group_name(name)
    group._set_group_desc(description)
    return group
