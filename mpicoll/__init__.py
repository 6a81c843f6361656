"""mpicoll: the API of torch.distributed over MPI, on NumPy and CuPy arrays and torch tensors.

::

    import numpy as np
    import mpicoll as dist

    dist.init_process_group()
    x = np.full(4, dist.get_rank(), np.float32)
    dist.all_reduce(x)
    dist.destroy_process_group()

Run it with ``mpirun -n 4 python script.py``. Names are resolved on first use: importing mpicoll
does not load MPI, NumPy, CuPy or torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

#: The version of the package; pyproject.toml reads it from here.
__version__ = "0.3.0.dev0"

#: Modules of the public names.
_HOMES = {
    "api.backends": (
        "Backend", "get_default_backend_for_device", "is_available", "is_backend_available",
        "is_gloo_available", "is_mpi_available", "is_nccl_available", "is_torchelastic_launched",
        "is_ucc_available", "is_xccl_available",
    ),
    "api.collectives": (
        "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single",
        "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier",
        "broadcast", "exscan", "gather", "monitored_barrier", "reduce", "reduce_scatter",
        "reduce_scatter_single", "reduce_scatter_tensor", "scan", "scatter", "supports_complex",
    ),
    "dtypes": ("ReduceOp",),
    "errors": (
        "ArgumentError", "ArgumentTypeError", "CollectiveTimeoutError", "DeviceMemoryError",
        "DistBackendError", "DistError", "EmptyListError", "ForkedError", "LaunchError",
        "LostRankError", "MPIError", "MismatchError", "MpicollError", "NotInitializedError",
        "RefusedPickleError", "UnsupportedError", "UsageError",
    ),
    "core.groups": (
        "GroupMember", "ProcessGroup", "get_global_rank", "get_group_rank",
        "get_process_group_ranks", "get_rank", "get_world_size", "group",
    ),
    "api.objects": (
        "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list",
        "scatter_object_list", "send_object_list",
    ),
    "core.unpickling": ("restricted_pickle",),
    "api.point_to_point": (
        "P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "recv_async", "send",
    ),
    "api.growing": ("grow_group",),
    "api.lifecycle": (
        "destroy_process_group", "get_backend", "get_backend_config", "get_node_local_rank",
        "get_pg_count", "init_process_group", "is_initialized",
    ),
    "api.subgroups": (
        "SHRINK_ABORT", "SHRINK_DEFAULT", "new_group", "new_subgroups",
        "new_subgroups_by_enumeration", "shrink_group", "split_group",
    ),
    "failures.debug_level": (
        "DebugLevel", "get_debug_level", "set_debug_level", "set_debug_level_from_env",
    ),
    "failures.flight_record": ("dump_flight_record",),
    "core.work": ("Future", "Work"),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        import difflib

        close = difflib.get_close_matches(name, __all__, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        # Without ``obj``, tracebacks do not repeat the suggestion.
        raise AttributeError(f"module 'mpicoll' has no attribute {name!r}{hint}", name=name)
    found = getattr(importlib.import_module(f"mpicoll.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


#: Suffixes of variables that launchers set in each rank. (The table of launchers is slow to load.)
_RANK_VARIABLES = ("RANK", "RANKID", "PROCID")

# From now on, an error that ends this rank ends the job. (The node monitor, a process without
# site-packages, also has the variables of a rank, but must start fast.)
if not sys.flags.no_site and any(name.endswith(_RANK_VARIABLES) for name in os.environ):
    importlib.import_module("mpicoll.launch.exit_hooks").install_in_rank()

if TYPE_CHECKING:
    from mpicoll.api.backends import *  # noqa: F403
    from mpicoll.api.collectives import *  # noqa: F403
    from mpicoll.api.growing import *  # noqa: F403
    from mpicoll.api.lifecycle import *  # noqa: F403
    from mpicoll.api.objects import *  # noqa: F403
    from mpicoll.api.point_to_point import *  # noqa: F403
    from mpicoll.api.subgroups import *  # noqa: F403
    from mpicoll.core.groups import *  # noqa: F403
    from mpicoll.core.unpickling import restricted_pickle as restricted_pickle
    from mpicoll.core.work import Future as Future
    from mpicoll.core.work import Work as Work
    from mpicoll.dtypes import ReduceOp as ReduceOp
    from mpicoll.errors import *  # noqa: F403
    from mpicoll.failures.debug_level import *  # noqa: F403
    from mpicoll.failures.flight_record import dump_flight_record as dump_flight_record
