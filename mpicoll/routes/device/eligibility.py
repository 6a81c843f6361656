"""The device routes that a group can use, by the capabilities of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpicoll import settings
from mpicoll.cuda.capabilities import Capabilities, find_nodes
from mpicoll.errors import ArgumentError, MismatchError, UnsupportedError
from mpicoll.machine import ranks_by_value
from mpicoll.routes import registry

#: The variable that forces a device route.
FORCED = settings.DEVICE_ROUTE.name


def eligible_routes(
    all_ranks: Sequence[Capabilities], forced: str | None = None
) -> tuple[str, ...]:
    """Return the device routes that a group can use, best first; the same on all its ranks.

    all_ranks: capabilities of each rank of the group.
    forced:    the only requested route (`forced_route`).

    Raises ArgumentError if ``forced`` is unknown, UnsupportedError if a rank cannot use it.
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
    """Return the capabilities of ranks whose arrays are on the GPUs with the numbers ``used``."""
    return tuple(
        own._replace(used=own.gpus[index]) if own.gpus and index is not None else own
        for own, index in zip(all_ranks, used, strict=True)
    )


def describe_missing(name: str, all_ranks: Sequence[Capabilities]) -> str:
    """Describe the missing requirements of a route, with the ranks; "" if all are met."""
    route = registry.DEVICE[name]
    lacking = ranks_by_value(map(route.needs.missing_reason, all_ranks))
    lacking.pop("", None)
    missing = [f"{_describe_ranks(ranks)} lacks {lack}" for lack, ranks in lacking.items()]
    place, first = route.needs.placement, all_ranks[0]
    away = [rank for rank, own in enumerate(all_ranks) if own.node != first.node]
    if place in ("node", "gpus") and away:
        missing.append(f"{_describe_ranks(away)} is on another node than rank 0")
    elif place == "nodes" and not away:
        missing.append("all ranks are on one node")
    elif place == "nodes" and len(find_nodes(all_ranks)) == len(all_ranks):
        missing.append("each rank has a node to itself")
    elif place == "gpus" and not lacking:
        used = [own.used for own in all_ranks]
        sharing = [rank for rank, gpu in enumerate(used) if used.count(gpu) > 1]
        if not all(used):
            missing.append("the ranks have no arrays on GPUs yet")
        elif sharing:
            alike = [str(rank) for rank in sharing if used[rank] == used[sharing[0]]]
            missing.append(f"ranks {', '.join(alike)} share a GPU")
    return "; ".join(missing)


def describe_routes(
    taken: Sequence[str], all_ranks: Sequence[Capabilities], forced: str | None,
    lost: Mapping[str, str] = {},
) -> dict[str, str]:  # fmt: skip
    """Describe, by route, why a group does not use it; "" for the routes that it uses.

    taken:  the group's routes, best first.
    forced: the only requested route (`forced_route`).
    lost:   reasons of routes whose negotiation failed.
    """
    found = {}
    for name, route in registry.DEVICE.items():
        reasons = (
            lost.get(name, ""),
            describe_missing(name, all_ranks),
            "it is used only on request" if route.policy.on_request else "",
            f"{FORCED}={forced}" if forced else "",
            f"not tried, because {', '.join(taken)} serve its calls",
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
