"""``hvd.elastic``: training that continues after ranks are lost.

If the MPI library survives lost ranks (docs/reliability.md), operations of the surviving ranks
raise HorovodInternalError; the ranks restore their states and continue. Otherwise the job ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mpicoll.horovod.common.elastic import HostUpdateResult, ObjectState, State, run_fn
from mpicoll.horovod.torch.elastic.sampler import ElasticSampler
from mpicoll.horovod.torch.elastic.state import TorchState
from mpicoll.horovod.torch.operations import barrier
from mpicoll.horovod.torch.process_sets import is_initialized, restart

__all__ = ["ElasticSampler", "HostUpdateResult", "ObjectState", "State", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a function that restarts from the last commit after ranks are lost.

    func: its first argument is a State, such as TorchState. Rank 0's state is sent to all ranks
          before each call.

    Returns a function that returns the result of ``func`` once it has returned on all ranks:
    finished ranks restart together with a rank that finds a loss at the end.

    Added process sets are removed when ``func`` restarts; their ``process_set_id`` is None.
    """

    @functools.wraps(func)
    def with_all(*arguments: Any, **options: Any) -> Any:
        result = func(*arguments, **options)
        if is_initialized():
            barrier()
        return result

    return run_fn(with_all, restart)
