"""The same calls on the same memory by mpi4py, gloo, a copy, or a single route of mpicoll."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import mpicoll
from mpicoll import control_messages
from mpicoll.cli.bench_calls import (
    Buffers,
    Case,
    Memory,
    MemoryArray,
    Side,
    allocate_zeros,
    named_call,
    own_call,
    variants,
)
from mpicoll.cli.timing import Call
from mpicoll.core.groups import default_group
from mpicoll.core.plan import CallKind
from mpicoll.cuda import binding, capabilities
from mpicoll.dtypes import Kind, ReduceOp
from mpicoll.errors import MpicollError
from mpicoll.failures.consistency import FIRST
from mpicoll.primitives import Layout
from mpicoll.routes import registry, tuning
from mpicoll.routes.device import eligibility
from mpicoll.routes.host import select

if TYPE_CHECKING:
    from mpi4py import MPI


class Other:
    """A library or route to compare with mpicoll's calls."""

    def call(self, case: Case, buffers: Buffers) -> Call | None:
        """Return the counterpart of mpicoll's first variant, or None."""
        raise NotImplementedError

    def close(self) -> None:
        """Free resources."""


def works_on_all(call: Call | None, comm: MPI.Intracomm) -> bool:
    """Make a call, and return whether it succeeded on all ranks."""
    works = call is not None
    try:
        if call is not None:
            call()
    except Exception:
        works = False
    return all(control_messages.allgather(comm, works, bool))


class Mpi4py(Other):
    """mpi4py with a prebuilt ``[buffer, count of a block, datatype]``.

    MPI has no lists of arrays: one array of the same memory replaces a list of mpicoll.
    """

    def __init__(self, comm: MPI.Intracomm, memory: Memory) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm

    def call(self, case: Case, buffers: Buffers) -> Call | None:
        """Return the call; None for what MPI cannot reduce, and without an MPI collective."""
        row, op, dtype = case.row, case.op, case.dtype
        if not row.mpi:
            return None
        arguments: list[Any] = [self._ready(case, side) for side in (buffers.input, buffers.output)]
        if row.layout is Layout.EMPTY:
            arguments = []
        elif row.layout is Layout.IN_PLACE:
            ready = arguments[1]
            arguments = [self._mpi.IN_PLACE, ready] if case.at_root else [ready, None]
            if not row.reduces:
                arguments = [ready]
        if op is not None:
            if op is ReduceOp.AVG or dtype.kind is Kind.NARROW_FLOAT:
                return None
            name = op.mpi_logical if dtype.kind is Kind.BOOL else op.mpi
            arguments.append(getattr(self._mpi, str(name)))
        if row.root:
            arguments.append(case.root)
        return partial(getattr(self._comm, row.mpi), *arguments)

    def _ready(self, case: Case, side: Side | None) -> Any:
        if side is None or case.dtype is None:
            return None
        return [side.whole.view(np.uint8), case.count, getattr(self._mpi, case.dtype.mpi)]


class TorchApi(Other):
    """Functions of torch.distributed in one of its groups, on tensors of the same memory."""

    def __init__(self, group: object = None) -> None:
        import torch
        import torch.distributed as api

        self.torch, self.api, self.group = torch, api, group

    def close(self) -> None:
        """Destroy torch's groups."""
        self.api.destroy_process_group()

    def call(self, case: Case, buffers: Buffers) -> Call | None:
        """Return the call, or None if torch lacks the call or the dtype."""
        if not hasattr(self.api, case.row.name):
            return None
        if case.dtype is not None and not hasattr(self.torch, case.dtype.name):
            return None
        sides = buffers.of(case, variants(case.row)[0])
        input, output = (self._tensors(case, side and side.given) for side in sides)
        return named_call(self.api, case, input, output, self.group)

    def _tensors(self, case: Case, given: MemoryArray | list[MemoryArray] | None) -> Any:
        if isinstance(given, list):
            return [self._tensors(case, array) for array in given]
        if given is None or case.dtype is None:
            return None
        dtype = getattr(self.torch, case.dtype.name)
        return self.torch.frombuffer(given.view(np.uint8), dtype=dtype)


class Gloo(TorchApi):
    """A gloo group of torch.distributed with the same ranks."""

    def __init__(self, comm: MPI.Intracomm, memory: Memory) -> None:
        super().__init__()
        rank, n = comm.Get_rank(), comm.Get_size()
        host = os.environ["MASTER_ADDR"]  # set by init_process_group
        port = 0
        if rank == 0:
            store = self.api.TCPStore(host, 0, n, True, wait_for_workers=False)
            port = store.port
        port = control_messages.bcast(comm, port, 0, int)
        if rank:
            store = self.api.TCPStore(host, port, n, False, wait_for_workers=False)
        self.api.init_process_group("gloo", store=store, rank=rank, world_size=n)


class Copy(Other):
    """A copy of the larger array by all ranks at once, which measures the memory."""

    def __init__(self, comm: MPI.Intracomm, memory: Memory) -> None:
        self._memory = memory

    def call(self, case: Case, buffers: Buffers) -> Call | None:
        """Return the copy, or None without an array."""
        if case.dtype is None:
            return None
        count = case.size // case.dtype.itemsize
        source, target = (
            allocate_zeros(count, case.dtype, self._memory).view(np.uint8) for _ in range(2)
        )

        def copy() -> None:
            target[...] = source

        return copy


#: By value of --compare.
OTHERS: dict[str, Callable[[MPI.Intracomm, Memory], Other]] = {
    "mpi4py": Mpi4py, "gloo": Gloo, "copy": Copy,
}  # fmt: skip


# --- routes -------------------------------------------------------------------------------------


def find_routes(names: Sequence[str], device: str) -> dict[str, str]:
    """Return for each route the reason why these ranks cannot use it, or "".

    All ranks call it.
    """
    if device == "cpu":
        place = select.place(default_group())
        needs = {name: registry.HOST[name].needs for name in names}
        return {
            name: "" if own.placement in ("", place) else f"it needs {own.description}"
            for name, own in needs.items()
        }
    comm = default_group().inner
    found = capabilities.exchange(comm, probes=True)
    found = eligibility.with_used(
        found, control_messages.allgather(comm, binding.bind(), int | None)
    )
    reasons = {}
    for name in names:
        reasons[name] = ""
        try:
            eligibility.eligible_routes(found, name)
        except MpicollError as error:
            reasons[name] = str(error)
    return reasons


class _Table(tuning.Table):
    """A table with one route, where it is eligible."""

    def __init__(self, route: str) -> None:
        super().__init__()
        self._route = route

    def row(self, kind: str, ranks: int) -> dict[str, tuning.Steps]:
        return super().row(kind, ranks) | {
            place: ((0, self._route),)
            for place in tuning.PLACES
            if self._route in tuning.eligible_routes(kind, place)
        }


class Route(Other):
    """Calls of mpicoll in a separate group, forced to one route."""

    def __init__(self, name: str, device: str) -> None:
        self._name, self._device = name, device
        group = mpicoll.new_group()
        assert isinstance(group, mpicoll.ProcessGroup)
        self._group = group
        self._works: dict[CallKind, bool] = {}
        for _ in range(FIRST):  # the first calls of a group are compared between ranks
            mpicoll.barrier(group)

    def close(self) -> None:
        """Destroy the group."""
        mpicoll.destroy_process_group(self._group)

    def call(self, case: Case, buffers: Buffers) -> Call | None:
        """Return the call, or None if the route does not support it. All ranks call it."""
        if case.dtype is None:
            return None
        variant, kind = variants(case.row)[0], CallKind(case.row, self._group, case.op, case.dtype)
        if kind not in self._works:
            self._works[kind] = self._device != "cpu" or self._name in select.candidates(kind)
            if self._works[kind]:
                with self._forced():  # the first call builds the plan
                    first = own_call(case, buffers, variant, self._group)
                    self._works[kind] = works_on_all(first, default_group().inner)
        if not self._works[kind]:
            return None
        return own_call(case, buffers, variant, self._group)

    @contextlib.contextmanager
    def _forced(self) -> Iterator[None]:
        """Force the route for plans that are built in this context."""
        if self._device == "cpu":
            before = tuning.job.table
            tuning.job.table = _Table(self._name)
            try:
                yield
            finally:
                tuning.job.table = before
            return
        before_value = os.environ.get(eligibility.FORCED)
        os.environ[eligibility.FORCED] = self._name
        capabilities.forget()  # it has cached the variable
        try:
            yield
        finally:
            capabilities.forget()
            del os.environ[eligibility.FORCED]
            if before_value is not None:
                os.environ[eligibility.FORCED] = before_value
