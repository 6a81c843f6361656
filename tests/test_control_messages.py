"""Control messages between ranks: no pickles, limits, and messages of malicious ranks."""

from __future__ import annotations

import enum
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rank_scripts import job

import mpicoll
from mpicoll import control_messages
from mpicoll.errors import DistBackendError

HOME = Path(mpicoll.__file__).parent

# ---- the source: only users' objects are pickled -------------------------------------------------

PICKLE_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}

#: The files that may pickle, and the objects that they pickle.
PICKLES = {
    "core/pickles.py": "users' objects, which object collectives send",
    "core/array_pickles.py": "arrays inside these objects",
    "errors.py": "the base class of RefusedPickleError",
    "failures/flight_record.py": "writes torch's format of flight records, into a file",
    "launch/workers.py": "users' functions and results, between a worker and its child process",
    "launch/worker_rank.py": "the same, in the worker",
    "launch/spark.py": "users' functions, by Spark",
    "launch/ray.py": "users' functions, by Ray",
    "launch/dask.py": "users' functions, by Dask",
}

#: Calls of mpi4py's methods that pickle. The methods that send buffers begin with a capital letter.
PICKLING_CALL = re.compile(
    r"(?<!nccl\.)\b\w*(?i:comm|inner|world|tested|parent|inter)\.(?:all(?:gather|reduce|toall)|"
    r"bcast|exscan|i?(?:[bs]s?|rs)?send|i?m?recv|i?m?probe|gather|reduce|scan|scatter|sendrecv)\("
)


@pytest.mark.any_mpi
def test_mpicoll_pickles_only_users_objects():
    files = {path.relative_to(HOME).as_posix(): path.read_text() for path in HOME.rglob("*.py")}
    assert {*PICKLES} <= set(files)
    found = []
    for file, text in files.items():
        imported = re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE)
        found += [f"{file}: {each}" for each in {*imported} & PICKLE_MODULES if file not in PICKLES]
        found += [f"{file}: {each}" for each in PICKLING_CALL.findall(text)]
    assert not found, "use mpicoll.control_messages, or add a line with the reason to this test"


# ---- encoding ------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = "red"


class Pair(NamedTuple):
    ranks: tuple[int, int]
    latencies: list[float]


class Place(NamedTuple):
    host: str
    color: Color
    handle: bytes
    pairs: tuple[Pair, ...] = ()
    free: int | None = None


PLACE = Place("a", Color.RED, b"\x00\xff", (Pair((0, 1), [1.5, 2.0]),))


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (bool, True), (int, 2**62), (float, math.pi), (float, math.inf), (str, "é\udcff\0"),
        (bytes, bytes(range(256))), (Any, {"a": [1, None]}), (list[int], []), (set[int], {1, 2}),
        (dict[str, Any], {"a": 1}), (dict[int, float], {3: 1.5}), (tuple[()], ()),
        (tuple[str, ...], ("a", "b")), (tuple[str, int, bool], ("a", 1, False)),
        (int | None, None), (str | list[Pair], [Pair((0, 1), [2.0])]), (Pair, Pair((1, 2), [])),
        (Place, PLACE), (list[Place], [PLACE]),
    ],
)  # fmt: skip
def test_decode_returns_the_encoded_value_with_its_types(kind, value):
    received = control_messages.decode(control_messages.encode(value), kind, 0)
    assert received == value and type(received) is type(value)
    assert repr(received) == repr(value)  # also compares the types of the elements


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, b"true"), (int, b"1.0"), (int, b'"1"'), (int, b""), (int, b"1 2"), (int, b"\xff"),
        (int, b"9" * 5000), (float, b"1" * 400), (float, b"true"), (bool, b"1"), (str, b"null"),
        (bytes, b'"0"'), (bytes, b"[1]"), (Any, b"[" * 200_000), (Any, b'{"a":' * 200_000),
        (list[int], b"{}"), (list[int], b"[[]]"), (set[Any], b"[[]]"), (dict[str, int], b"[]"),
        (dict[int, int], b'{"x": 1}'), (tuple[str, int], b'["a"]'), (tuple[str, int], b'["a",1,1]'),
        (int | None, b'"a"'), (Pair, b"[[0, 1]]"), (Pair, b'{"ranks": [0, 1]}'), (Color, b'"blue"'),
        (Color, b"[]"), (Place, b"{}"), (Place, b'["a"]'),
    ],
)  # fmt: skip
def test_decode_of_another_type_raises_and_names_the_sender(kind, text):
    with pytest.raises(DistBackendError, match="control message: rank 3 sent") as caught:
        control_messages.decode(text, kind, 3)
    assert len(str(caught.value)) < 500


@pytest.mark.any_mpi
@pytest.mark.parametrize("size", [-2, -(2**63), control_messages.MAX_MESSAGE_BYTES + 1, 2**62])
def test_check_sizes_rejects_invalid_sizes(size):
    with pytest.raises(DistBackendError, match=f"rank 1 announced {size} bytes"):
        control_messages.check_sizes([5, size, 5])


# ---- ranks ---------------------------------------------------------------------------------------


@job("""
from mpi4py import MPI
from mpicoll import control_messages
from mpicoll.errors import DistBackendError
from mpicoll.failures import consistency
from mpicoll.serialized_mpi import serialize, with_wait

world = MPI.COMM_WORLD
me, n = world.Get_rank(), world.Get_size()

def wait(request, status):
    while not request.Test(status):
        pass

def error(function, *arguments):
    error = error_of(DistBackendError, function, *arguments)
    assert (error.__cause__ is not None) == (me == 2 and "encode" in str(error)), error
    return str(error).partition(" (")[0]

for comm in (world, serialize(world), with_wait(world, wait), with_wait(serialize(world), wait)):
    got = control_messages.allgather(comm, ("x" * me, b"y" * me), tuple[str, bytes])
    assert got == [("x" * rank, b"y" * rank) for rank in range(n)], got
    for root in range(n):
        assert control_messages.bcast(comm, me, root, int) == root
    for value in (object(), "x" * (control_messages.MAX_MESSAGE_BYTES - 1), 5):
        mine = value if me == 2 else "short"
        say(error(control_messages.allgather, comm, mine, str))
        say(error(control_messages.bcast, comm, mine, 2, str))
""", ranks=3)  # fmt: skip
def test_all_ranks_raise_the_same_error(ended):
    ended.in_good_order()
    errors = [
        "control message: rank 2 cannot encode its value as JSON",
        "control message: rank 2 announced 16777217 bytes; expected at most 16777216. Run the same "
        "version of mpicoll on all ranks, and only programs that you trust",
        "control message: rank 2 sent 1 bytes that are not JSON of the expected type",
    ]
    assert ended.lines == sorted(errors * (3 * 2 * 4))


#: A rank that sends a pickle instead of JSON. Loading it prints "attacked".
ATTACKER = """
import pickle
from mpicoll import control_messages

class Attack:
    def __reduce__(self):
        return os.write, (1, b"attacked\\n")

def attack():
    control_messages.encode = lambda value: pickle.dumps(Attack())
"""


@job(ATTACKER + """
from mpi4py import MPI

if MPI.COMM_WORLD.Get_rank() == $attacker:
    attack()
dist.init_process_group()
say("initialized")
dist.barrier()
""", options=("-m", "mpi4py"))  # fmt: skip
@pytest.mark.parametrize("attacker", [0, 1])
def test_pickle_during_init_is_not_loaded(ended, attacker):
    ended.badly(f"control message: rank {attacker} sent", "not JSON of the expected type")
    assert not ended.out
