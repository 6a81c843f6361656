"""The routes of device memory that a group can take, given what its ranks can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mpicoll import settings
from mpicoll.cuda.capabilities import Capabilities, find_clusters
from mpicoll.errors import ArgumentError, MismatchError, UnsupportedError
from mpicoll.routes import registry

__all__ = [
    "FORCED",
    "describe_missing",
    "describe_routes",
    "eligible_routes",
    "forced_route",
    "with_used",
]

#: The variable that forces a device route.
FORCED = settings.DEVICE_ROUTE.name


def eligible_routes(
    all_ranks: Sequence[Capabilities], forced: str | None = None
) -> tuple[str, ...]:
    """Return the device routes that a group can take, the best first, alike on all its ranks.

    all_ranks: what each rank of the group can do.
    forced:    the one requested route (`forced_route`).

    Raises ArgumentError if that is no route, UnsupportedError if a rank lacks something for it.
    """
    if forced is None:
        return tuple(
            name
            for name, route in registry.DEVICE.items()
            if not route.policy.on_request and not describe_missing(name, all_ranks)
        )
    if forced not in registry.DEVICE:
        expected = ", ".join(registry.DEVICE)
        raise ArgumentError(f"{FORCED}: expected one of {expected}, got {forced!r}")
    missing = describe_missing(forced, all_ranks)
    if missing:
        raise UnsupportedError(f"{FORCED}={forced}: {missing}; unset it, or choose another route")
    return (forced,)


def with_used(
    all_ranks: Sequence[Capabilities], used: Sequence[int | None]
) -> tuple[Capabilities, ...]:
    """Return what ranks can do, with the GPU that each one's arrays are on: its number there."""
    return tuple(
        replace(own, used=own.gpus[index]) if own.gpus and index is not None else own
        for own, index in zip(all_ranks, used, strict=True)
    )


def describe_missing(name: str, all_ranks: Sequence[Capabilities]) -> str:
    """Describe what is missing for a route, and on which ranks; "" for nothing."""
    route = registry.DEVICE[name]
    lacking: dict[str, list[int]] = {}
    for rank, own in enumerate(all_ranks):
        lack = route.needs.missing_reason(own)
        if lack:
            lacking.setdefault(lack, []).append(rank)
    missing = [f"{_describe_ranks(ranks)} lacks {lack}" for lack, ranks in lacking.items()]
    if route.needs.placement == "levels":
        return "; ".join(missing + ([] if lacking else _describe_levels(all_ranks)))
    away = [rank for rank, own in enumerate(all_ranks) if own.node != all_ranks[0].node]
    if route.needs.placement in ("node", "gpu", "gpus") and away:
        missing.append(f"{_describe_ranks(away)} is on another node than rank 0")
    elif route.needs.placement in ("gpu", "gpus") and not lacking:
        missing += _describe_gpus(route.needs.placement, all_ranks)
    return "; ".join(missing)


def _describe_levels(all_ranks: Sequence[Capabilities]) -> list[str]:
    """Describe how the ranks are not in several clusters, of which one has several."""
    clusters = find_clusters(all_ranks)
    one_node = all(own.node == all_ranks[0].node for own in all_ranks)
    if one_node and any(not own.used for own in all_ranks):
        return ["the ranks have no arrays on GPUs yet"]
    if len(clusters) == 1:
        return ["all ranks share a GPU" if len(all_ranks) > 1 else "there is one rank"]
    if len(clusters) == len(all_ranks):
        return [f"each rank has a {'GPU' if one_node else 'node'} to itself"]
    return []


def _describe_gpus(place: str, all_ranks: Sequence[Capabilities]) -> list[str]:
    """Describe how the GPUs that the ranks use are not at a place: "gpu", all ranks on one, or
    "gpus", each on one of its own.
    """
    by_gpu: dict[str, list[int]] = {}
    for rank, own in enumerate(all_ranks):
        by_gpu.setdefault(own.used, []).append(rank)
    if "" in by_gpu:
        return ["the ranks have no arrays on GPUs yet"]
    if place == "gpu":
        apart = [rank for rank, own in enumerate(all_ranks) if own.used != all_ranks[0].used]
        words = f"{_describe_ranks(apart)} has its arrays on another GPU than rank 0"
        return [words] if apart else []
    sharing = next((ranks for ranks in by_gpu.values() if len(ranks) > 1), None)
    return [f"ranks {', '.join(map(str, sharing))} share a GPU"] if sharing else []


def describe_routes(
    taken: Sequence[str], all_ranks: Sequence[Capabilities], forced: str | None,
    lost: Mapping[str, str] = {},
) -> dict[str, str]:  # fmt: skip
    """Describe of each route why a group does not take it, by name; "" for those it takes.

    taken:  those that it takes, the best first.
    forced: the one requested route (`forced_route`).
    lost:   why some that it could take have failed.
    """
    found = {}
    for name, route in registry.DEVICE.items():
        reasons = (
            lost.get(name, ""),
            describe_missing(name, all_ranks),
            "it is taken only on request" if route.policy.on_request else "",
            f"{FORCED}={forced}" if forced else "",
            f"not tried, as {', '.join(taken)} serve its calls",
        )
        found[name] = "" if name in taken else next(filter(None, reasons))
    return found


def _describe_ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'each of ranks'} {', '.join(map(str, ranks))}"


def forced_route(all_ranks: Sequence[Capabilities]) -> str | None:
    """Return the route that MPICOLL_DEVICE_ROUTE requests, if it is set.

    Raises MismatchError if it differs between ranks.
    """
    asked = {own.forced for own in all_ranks}
    if len(asked) > 1:
        values = ", ".join(f"rank {rank}: {own.forced!r}" for rank, own in enumerate(all_ranks))
        raise MismatchError(f"{FORCED} has to be the same on all ranks: {values}")
    return asked.pop() or None
