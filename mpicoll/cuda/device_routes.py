"""The routes of device memory that a group can take, given what its ranks can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpicoll import settings
from mpicoll.cuda.capabilities import Capabilities, CudaSupport
from mpicoll.errors import ArgumentError, MismatchError, UnsupportedError

__all__ = ["FORCED", "ROUTES", "eligible_routes", "forced_route"]

#: The variable that forces a device route.
FORCED = settings.DEVICE_ROUTE.name


class _Route(NamedTuple):
    """What a device route needs of every rank.

    lacks:    returns what a rank lacks for it, "" for nothing.
    together: all ranks have to be on one node.
    """

    lacks: Callable[[Capabilities], str]
    together: bool = False


def _mpi_does(least: CudaSupport) -> Callable[[Capabilities], str]:
    needed = {
        CudaSupport.TRANSFER: "sends and receives",
        CudaSupport.FULL: "sends, receives and reduces",
    }[least]

    def lacks(own: Capabilities) -> str:
        return "" if own.cuda >= least else f"an MPI that {needed} device memory ({own.why})"

    return lacks


def _gpu(own: Capabilities) -> str:
    return "" if own.gpus else f"a GPU ({own.no_gpu})"


#: What the routes need, the best route first.
ROUTES: dict[str, _Route] = {
    "peer": _Route(_gpu, together=True),
    "direct": _Route(_mpi_does(CudaSupport.TRANSFER)),
    "native": _Route(_mpi_does(CudaSupport.FULL)),
    "staged": _Route(lambda own: ""),
    # Only if it is asked for.
    "nccl": _Route(lambda own: "" if own.nccl else "NCCL"),
}


def eligible_routes(
    all_ranks: Sequence[Capabilities], forced: str | None = None
) -> tuple[str, ...]:
    """Return the device routes that a group can take, the best first, alike on all its ranks.

    all_ranks: what each rank of the group can do.
    forced:    the one route that is asked for (`forced_route`).

    Raises ArgumentError if that is no route, UnsupportedError if a rank lacks something for it.
    """
    if forced is None:
        return tuple(name for name in ROUTES if name != "nccl" and not _missing(name, all_ranks))
    if forced not in ROUTES:
        raise ArgumentError(f"{FORCED}: expected one of {', '.join(ROUTES)}, got {forced!r}")
    missing = _missing(forced, all_ranks)
    if missing:
        raise UnsupportedError(f"{FORCED}={forced}: {missing}; unset it, or choose another route")
    return (forced,)


def _missing(name: str, all_ranks: Sequence[Capabilities]) -> str:
    """Describe what is missing for a route, and on which ranks; "" for nothing."""
    route = ROUTES[name]
    lacking: dict[str, list[int]] = {}
    for rank, own in enumerate(all_ranks):
        lack = route.lacks(own)
        if lack:
            lacking.setdefault(lack, []).append(rank)
    missing = [f"{_describe_ranks(ranks)} lacks {lack}" for lack, ranks in lacking.items()]
    away = [rank for rank, own in enumerate(all_ranks) if own.node != all_ranks[0].node]
    if route.together and away:
        missing.append(f"{_describe_ranks(away)} is on another node than rank 0")
    return "; ".join(missing)


def _describe_ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'each of ranks'} {', '.join(map(str, ranks))}"


def forced_route(all_ranks: Sequence[Capabilities]) -> str | None:
    """Return the route that MPICOLL_DEVICE_ROUTE asks for, if it is set.

    Raises MismatchError if it differs between ranks.
    """
    asked = {own.forced for own in all_ranks}
    if len(asked) > 1:
        values = ", ".join(f"rank {rank}: {own.forced!r}" for rank, own in enumerate(all_ranks))
        raise MismatchError(f"{FORCED} has to be the same on all ranks: {values}")
    return asked.pop() or None
