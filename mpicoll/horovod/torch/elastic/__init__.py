"""Training that goes on when ranks are lost: ``hvd.elastic``.

Where MPI survives lost ranks (docs/reliability.md), the others get HorovodInternalError from their
operations, restore their states, and go on without the lost. Elsewhere the job ends.
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
    """Have a function begin anew, from the last commit, when ranks are lost. A decorator.

    func: its first argument is a State, such as TorchState. Rank 0's is sent to all ranks before it
        is called.

    Returns a function that returns what ``func`` does, once that has returned on all ranks: those
    that are done go on with a rank that has lost another one at the end.

    Sets of ranks that were added are gone when ``func`` begins anew; ``process_set_id`` is None.
    """

    @functools.wraps(func)
    def with_all(*arguments: Any, **options: Any) -> Any:
        result = func(*arguments, **options)
        if is_initialized():
            barrier()
        return result

    return run_fn(with_all, restart)
