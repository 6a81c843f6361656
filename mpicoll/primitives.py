"""The table of primitives: one row each, a constant of this module.

A row describes the arrays of a call: which of them are lists, which side the root is on, whether
elements are reduced. Checks, routes, tests, benchmarks and the documentation read the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import count


class Layout(Enum):
    """Relation of input and output in a group of n ranks."""

    #: One array, read and written in place.
    IN_PLACE = "in place"
    #: The output holds the inputs of all n ranks, in rank order.
    GATHERED = "gathered"
    #: The input holds one block for each of the n ranks, in rank order.
    SCATTERED = "scattered"
    #: Both sides hold one block for each rank.
    EXCHANGED = "exchanged"
    #: One input and one output of the same size.
    ALIKE = "alike"
    #: No array.
    EMPTY = "empty"


@dataclass(frozen=True, eq=False, slots=True)
class Primitive:
    """One primitive."""

    name: str  # name in torch.distributed
    layout: Layout  # relation of input and output
    output: str  # name of the output argument, or ""
    input: str  # name of the input argument; "" if it is the output
    listed: bool  # the argument with one array per rank is a list (for "exchanged", both are)
    root: str  # name of the root argument, or ""
    reduces: bool  # elements are combined by a ReduceOp
    #: Bus-bandwidth factor of nccl-tests: bytes that the link of each rank must transfer, as a
    #: multiple of the bytes of the larger array, for n ranks.
    moved: Callable[[int], float]
    mpi: str  # the MPI collective that does the same, by its name in mpi4py; "" if there is none
    aliases: tuple[str, ...] = ()  # other names of the function
    #: For reductions and the layout ALIKE, the ranks whose inputs make the output of a rank: a
    #: function of this rank and the number of ranks. An empty range means no output.
    combined: Callable[[int, int], range] = lambda rank, n: range(n)
    #: Name in flight records, if PyTorch's torchfrtrace does not support ``name``: a name that it
    #: supports and that no other call has.
    recorded_as: str = ""

    #: Index in the table, the same on all ranks.
    code: int = field(init=False, default_factory=count().__next__)
    #: Operation and argument, as messages begin ("broadcast: tensor").
    at_output: str = field(init=False)
    at_input: str = field(init=False)
    #: The input or the output has one block per rank.
    many_in: bool = field(init=False)
    many_out: bool = field(init=False)
    even: bool = field(init=False)  # all ranks know the size of every block

    def __post_init__(self) -> None:
        object.__setattr__(self, "at_output", f"{self.name}: {self.output}")
        object.__setattr__(self, "at_input", f"{self.name}: {self.input}")
        object.__setattr__(self, "many_in", self.layout in (Layout.SCATTERED, Layout.EXCHANGED))
        object.__setattr__(self, "many_out", self.layout in (Layout.GATHERED, Layout.EXCHANGED))
        object.__setattr__(self, "even", self.layout is not Layout.EXCHANGED)

    def __repr__(self) -> str:
        return self.name


def _shares(times: int) -> Callable[[int], float]:
    return lambda n: times * (n - 1) / n


def _once(n: int) -> float:
    return 1.0


_nothing, _others, _twice = _shares(0), _shares(1), _shares(2)

_IN_PLACE, _GATHERED, _SCATTERED, _EXCHANGED, _ALIKE, _EMPTY = Layout

# name, layout, output, input, listed, root, reduces, bus factor, MPI call, aliases
# fmt: off
BROADCAST = Primitive("broadcast", _IN_PLACE, "tensor", "", False, "src", False, _once, "Bcast")
ALL_REDUCE = Primitive("all_reduce", _IN_PLACE, "tensor", "", False, "", True, _twice, "Allreduce")
REDUCE = Primitive("reduce", _IN_PLACE, "tensor", "", False, "dst", True, _once, "Reduce")
ALL_GATHER = Primitive(
    "all_gather", _GATHERED, "tensor_list", "tensor", True, "", False, _others, "Allgather")
ALL_GATHER_SINGLE = Primitive(
    "all_gather_single", _GATHERED, "output_tensor", "input_tensor", False, "", False, _others,
    "Allgather", ("all_gather_into_tensor",))
GATHER = Primitive(
    "gather", _GATHERED, "gather_list", "tensor", True, "dst", False, _others, "Gather")
SCATTER = Primitive(
    "scatter", _SCATTERED, "tensor", "scatter_list", True, "src", False, _others, "Scatter")
REDUCE_SCATTER = Primitive(
    "reduce_scatter", _SCATTERED, "output", "input_list", True, "", True, _others,
    "Reduce_scatter_block")
REDUCE_SCATTER_SINGLE = Primitive(
    "reduce_scatter_single", _SCATTERED, "output", "input", False, "", True, _others,
    "Reduce_scatter_block", ("reduce_scatter_tensor",))
ALL_TO_ALL = Primitive(
    "all_to_all", _EXCHANGED, "output_tensor_list", "input_tensor_list", True, "", False, _others,
    "Alltoall")
ALL_TO_ALL_SINGLE = Primitive(
    "all_to_all_single", _EXCHANGED, "output", "input", False, "", False, _others, "Alltoall")
SCAN = Primitive(
    "scan", _ALIKE, "output", "input", False, "", True, _once, "Scan",
    combined=lambda rank, n: range(rank + 1), recorded_as="_reduce_oop")
EXSCAN = Primitive(
    "exscan", _ALIKE, "output", "input", False, "", True, _once, "Exscan",
    combined=lambda rank, n: range(rank), recorded_as="_broadcast_oop")
BARRIER = Primitive("barrier", _EMPTY, "", "", False, "", False, _nothing, "Barrier")
# fmt: on

PRIMITIVES = tuple(row for row in [*globals().values()] if isinstance(row, Primitive))
by_name: dict[str, Primitive] = {
    name: row for row in PRIMITIVES for name in (row.name, *row.aliases)
}
