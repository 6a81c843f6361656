"""The public API: names, signatures, docstrings, errors, and lazy imports."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import re

import numpy as np
import pytest
from whole_jobs import run_python

import mpicoll as dist
from mpicoll import errors
from mpicoll.primitives import PRIMITIVES

pytestmark = pytest.mark.any_mpi

#: Names of torch.distributed that mpicoll implements, by section.
NAMES = {
    "bootstrap": """init_process_group destroy_process_group is_initialized is_available
        is_backend_available is_mpi_available is_gloo_available is_nccl_available is_ucc_available
        is_xccl_available is_torchelastic_launched get_default_backend_for_device
        get_node_local_rank""",
    "groups and ranks": """new_group new_subgroups new_subgroups_by_enumeration split_group
        shrink_group get_rank get_world_size get_group_rank get_global_rank
        get_process_group_ranks get_backend get_backend_config get_pg_count""",
    "point-to-point": "send recv isend irecv batch_isend_irecv",
    "collectives": """broadcast all_reduce all_reduce_coalesced reduce all_gather
        all_gather_single all_gather_into_tensor all_gather_coalesced reduce_scatter
        reduce_scatter_single reduce_scatter_tensor all_to_all all_to_all_single gather scatter
        barrier monitored_barrier supports_complex""",
    "objects": """send_object_list recv_object_list all_gather_object gather_object
        broadcast_object_list scatter_object_list""",
    "debug level": "get_debug_level set_debug_level set_debug_level_from_env",
    "classes": "ReduceOp Work P2POp GroupMember group Backend ProcessGroup DebugLevel",
}
FUNCTIONS = [
    name for section, names in NAMES.items() if section != "classes" for name in names.split()
]
CLASSES = NAMES["classes"].split()
#: Names that torch.distributed does not have.
OWN = {
    "recv_async", "restricted_pickle", "Future", "dump_flight_record", "SHRINK_ABORT",
    "SHRINK_DEFAULT", "grow_group", *({row.name for row in PRIMITIVES} - {*FUNCTIONS}),
}  # fmt: skip

#: Functions without a Python signature in torch.
NO_SIGNATURE = {"get_debug_level", "set_debug_level", "set_debug_level_from_env"}


# --- names --------------------------------------------------------------------------------------


def test_public_names() -> None:
    assert sorted(dist.__all__) == sorted([*FUNCTIONS, *CLASSES, *OWN, *errors.__all__])
    assert all(inspect.isfunction(getattr(dist, name)) for name in FUNCTIONS)
    assert all(inspect.isclass(getattr(dist, name)) for name in [*CLASSES, *errors.__all__])
    assert all(getattr(dist, name) is not None for name in OWN)
    assert set(dist.__all__) <= set(dir(dist))
    assert dist.recv_async is dist.irecv


def test_unknown_name_raises_with_a_hint() -> None:
    with pytest.raises(AttributeError, match=r"^module 'mpicoll' has no attribute 'zzz'$"):
        dist.zzz  # noqa: B018
    done = run_python("import mpicoll; mpicoll.all_reduse")
    assert "has no attribute 'all_reduse'. Did you mean: 'all_reduce'?" in done.stderr


@pytest.mark.parametrize("name", [*FUNCTIONS, "P2POp"])
def test_docstring_describes_every_parameter(name: str) -> None:
    """The description may be in the docstring of the module."""
    function = getattr(dist, name)
    text = f"{inspect.getdoc(function)}\n{inspect.getdoc(inspect.getmodule(function))}"
    found = re.findall(r"^(\w+(?:, \w+)*): \S", text, re.MULTILINE)
    described = {entry for names in found for entry in names.split(", ")}
    assert {*inspect.signature(function).parameters} <= described


# --- signatures ---------------------------------------------------------------------------------


def torch_distributed():
    torch = pytest.importorskip("torch", reason="compares with torch, which is not installed")
    import torch.distributed as found

    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"compares with torch 2.13, found {torch.__version__}")
    return found


def shape_of(function) -> list[tuple[str, str, object]]:
    """Return the names, kinds and defaults of parameters. Reduction operations are names."""

    return [
        (one.name, one.kind.name, getattr(one.default, "name", one.default))
        for one in inspect.signature(function).parameters.values()
    ]


#: Additional keyword parameters, after the parameters of torch.
EXTRA = {
    "init_process_group": [
        (name, "KEYWORD_ONLY", None) for name in ("comm", "reproducible", "wire")
    ],
    "new_group": [(name, "KEYWORD_ONLY", None) for name in ("reproducible", "wire")],
}


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in NO_SIGNATURE])
def test_signature_matches_torch(name: str) -> None:
    theirs = torch_distributed()
    expected = shape_of(getattr(theirs, name)) + EXTRA.get(name, [])
    assert shape_of(getattr(dist, name)) == expected


def test_classes_and_constants_match_torch() -> None:
    theirs = torch_distributed()
    assert shape_of(dist.P2POp.__init__) == shape_of(theirs.P2POp.__init__)
    assert shape_of(dist.Backend.register_backend) == shape_of(theirs.Backend.register_backend)
    for name in ("UNDEFINED", "GLOO", "NCCL", "UCC", "MPI", "XCCL", "FAKE"):
        assert getattr(dist.Backend, name) == getattr(theirs.Backend, name)
    codes = theirs.ReduceOp.RedOpType.__members__
    expected = {name: int(code) for name, code in codes.items() if name != "UNUSED"}
    assert {op.name: op.code for op in reduce_ops()} == expected
    for level in dist.DebugLevel:
        assert int(level) == int(getattr(theirs.DebugLevel, level.name))
    assert dist.GroupMember.NON_GROUP_MEMBER == theirs.GroupMember.NON_GROUP_MEMBER == -100
    assert (dist.SHRINK_DEFAULT, dist.SHRINK_ABORT) == (0, 1)


# --- ReduceOp, Backend --------------------------------------------------------------------------


def reduce_ops() -> list[dist.ReduceOp]:
    names = "SUM AVG PRODUCT MIN MAX BAND BOR BXOR PREMUL_SUM"
    return [getattr(dist.ReduceOp, name) for name in names.split()]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_reduce_ops_are_singletons_after_pickling(protocol: int) -> None:
    for op in reduce_ops():
        assert pickle.loads(pickle.dumps(op, protocol)) is copy.deepcopy(op) is copy.copy(op) is op
        assert (repr(op), op.op, op.factor) == (f"ReduceOp.{op.name}", op, None)
    assert len(set(reduce_ops())) == 9
    assert dist.ReduceOp.RedOpType.SUM is dist.ReduceOp.SUM


def test_premul_sum_has_a_factor() -> None:
    op = dist.ReduceOp.PREMUL_SUM(0.25)
    for one in (op, pickle.loads(pickle.dumps(op))):
        assert (one.op, one.factor, one.code) == (dist.ReduceOp.PREMUL_SUM, 0.25, 8)
        assert repr(one) == "ReduceOp.PREMUL_SUM(0.25)" and one is not dist.ReduceOp.PREMUL_SUM
    assert dist.ReduceOp.PREMUL_SUM(np.float32([3])).factor == 3
    with pytest.raises(TypeError, match="only PREMUL_SUM"):
        dist.ReduceOp.SUM(2)


def test_supports_complex() -> None:
    # mpicoll supports PRODUCT of complex numbers, torch does not.
    known = {"MAX", "MIN", "BAND", "BOR", "BXOR"}
    assert {op.name for op in reduce_ops() if not dist.supports_complex(op)} == known


def test_backend_names() -> None:
    assert dist.Backend("MPI") == dist.Backend.MPI == "mpi"
    assert isinstance(dist.Backend("NCCL"), str) and isinstance(dist.Backend("x"), dist.Backend)
    for wrong in (None, 3, b"mpi"):
        with pytest.raises(ValueError, match="Backend"):
            dist.Backend(wrong)
    with pytest.raises(ValueError, match=r"register_backend: 'mine'"):
        dist.Backend.register_backend("mine", print, devices=["cpu"])


def test_debug_level(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dist.get_debug_level()
    try:
        for variable in ("MPICOLL_DEBUG", "TORCH_DISTRIBUTED_DEBUG"):
            monkeypatch.delenv("MPICOLL_DEBUG", raising=False)
            monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
            dist.set_debug_level_from_env()
            assert dist.get_debug_level() is dist.DebugLevel.OFF
            monkeypatch.setenv(variable, "detail")
            dist.set_debug_level_from_env()
            assert dist.get_debug_level() is dist.DebugLevel.DETAIL
            monkeypatch.setenv(variable, "LOUD")
            with pytest.raises(ValueError, match=f"{variable}.*'LOUD'"):
                dist.set_debug_level_from_env()
        dist.set_debug_level(dist.DebugLevel.INFO)
        assert dist.get_debug_level() is dist.DebugLevel.INFO
    finally:
        dist.set_debug_level(before)


# --- errors -------------------------------------------------------------------------------------


BASES = {
    "ArgumentError": ValueError, "ArgumentTypeError": TypeError, "UnsupportedError": ValueError,
    "NotInitializedError": ValueError, "EmptyListError": (IndexError, ValueError),
    "LaunchError": ValueError, "CollectiveTimeoutError": TimeoutError,
    "RefusedPickleError": pickle.UnpicklingError, "MismatchError": dist.DistBackendError,
    "MPIError": dist.DistBackendError, "LostRankError": dist.DistBackendError,
    "DeviceMemoryError": MemoryError,
}  # fmt: skip


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_have_the_base_classes_of_torch_and_are_pickled(name: str) -> None:
    error = getattr(dist, name)("a message")
    bases = BASES.get(name, ())
    for base in (dist.DistError, RuntimeError, *(bases if isinstance(bases, tuple) else [bases])):
        assert isinstance(error, base)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == "a message"


def test_pickled_errors_keep_their_attributes() -> None:
    again = pickle.loads(pickle.dumps(dist.MPIError("truncated", 15)))
    assert (str(again), again.error_class) == ("truncated", 15)
    assert pickle.loads(pickle.dumps(dist.LostRankError("lost", [1, 2]))).ranks == (1, 2)


# --- lazy imports -------------------------------------------------------------------------------

LOADED = """
import json, sys
{}
names = "mpi4py.MPI cupy torch numpy mpi4py".split()
print(json.dumps([name for name in names if name in sys.modules]))
"""


def loaded_by(code: str) -> set[str]:
    done = run_python(LOADED.format(code))
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


QUERIES = """
import mpicoll as dist
assert dist.is_available() and dist.is_mpi_available() and not dist.is_initialized()
assert dist.get_pg_count() == 0
assert dist.group.WORLD is None and dist.GroupMember.WORLD is None
dist.get_node_local_rank(0), dist.is_backend_available("gloo"), dist.is_torchelastic_launched()
try:
    dist.get_rank()
except dist.NotInitializedError:
    pass
"""


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import mpicoll; mpicoll.MismatchError", set()),
        ("from mpicoll import *; all_reduce; import mpicoll; dir(mpicoll)", {"numpy", "mpi4py"}),
        (QUERIES, {"numpy", "mpi4py"}),
    ],
    ids=["import", "names", "queries"],
)
def test_import_and_queries_do_not_load_mpi(code: str, allowed: set[str]) -> None:
    assert loaded_by(code) <= allowed
    assert loaded_by("from mpi4py import MPI; import numpy") >= {"mpi4py.MPI", "mpi4py", "numpy"}


def test_start_loads_mpi_and_not_numpy() -> None:
    """Loading NumPy takes longer than the rest of the start if many ranks share the processors."""
    code = "import mpicoll; mpicoll.init_process_group(); mpicoll.destroy_process_group()"
    assert loaded_by(code) == {"mpi4py.MPI", "mpi4py"}


# --- available backends and local ranks ---------------------------------------------------------


def test_available_backends(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dist.is_available() is dist.is_mpi_available() is dist.is_gloo_available() is True
    assert dist.is_nccl_available() is dist.is_ucc_available() is dist.is_xccl_available() is False
    assert dist.is_initialized() is False
    for name in ("mpi", "MPI", "mpicoll", "gloo", "nccl"):
        assert dist.is_backend_available(name) is True
    for name in ("ucc", "xccl", "fake", "undefined", "", "mpich"):
        assert dist.is_backend_available(name) is False
    assert dist.is_torchelastic_launched() is False
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert dist.is_torchelastic_launched() is True


def test_default_backend_for_device() -> None:
    assert dist.get_default_backend_for_device("cpu") == "mpi"
    assert dist.get_default_backend_for_device("cuda:1") == "mpi"
    with pytest.raises(ValueError, match="'tpu'"):
        dist.get_default_backend_for_device("tpu")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(ValueError, match="meta"):
        dist.get_default_backend_for_device(torch.device("meta"))


def test_node_local_rank(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="LOCAL_RANK"):
        dist.get_node_local_rank()
    assert dist.get_node_local_rank(5) == 5
    assert dist.get_node_local_rank(fallback_rank=0) == 0
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert dist.get_node_local_rank() == dist.get_node_local_rank(5) == 3


# --- init_process_group -------------------------------------------------------------------------

TRY_INIT = """
import json, os, sys
import mpicoll as dist
def init(environment={}, **arguments):
    os.environ.update(environment)
    try:
        dist.init_process_group(**arguments)
    except Exception as error:
        return [c.__name__ for c in type(error).__mro__], str(error)
    else:
        dist.destroy_process_group()
        return [], ""
    finally:
        for name in environment:
            del os.environ[name]
"""


ACCEPTED = [
    "", 'init_method="mpi://"', 'init_method="env://"', "rank=0, world_size=1",
    'dict(RANK="0", WORLD_SIZE="1"), init_method="env://"', 'backend="gloo"', 'backend="nccl"',
    'backend="MPI"', 'backend="cpu:gloo,cuda:nccl"', "timeout=5", 'group_name="mine"',
    "pg_options=object()",
]  # fmt: skip
REJECTED = [
    ("rank=2", "LaunchError", ["rank=2", "MPI's own rank, 0", "rank 0 of 1"]),
    ("world_size=4", "LaunchError", ["world_size=4", "MPI's own world_size, 1"]),
    ('dict(RANK="3", WORLD_SIZE="4")', "LaunchError", ["rank 3 of 4"]),
    ('dict(WORLD_SIZE="four"), init_method="env://"', "ArgumentError", ["WORLD_SIZE", "'four'"]),
    ('backend="ucc"', "ArgumentError", ["backend 'ucc'", "mpi or mpicoll, or gloo or nccl"]),
    ("backend=3", "ArgumentError", ["Backend", "int"]),
    ('timeout="5"', "ArgumentTypeError", ["timeout", "str"]),
    ('rank="0"', "ArgumentTypeError", ["rank", "str"]),
    ("timeout=-1", "ArgumentError", ["timeout", "-1"]),
    ("store=object()", "UnsupportedError", ["store"]),
]  # fmt: skip


def test_init_process_group_checks_its_arguments() -> None:
    calls = [f"init({arguments})" for arguments in [*ACCEPTED, *(each[0] for each in REJECTED)]]
    done = run_python(f"{TRY_INIT}print(json.dumps([{', '.join(calls)}]))")
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert answers[: len(ACCEPTED)] == [[[], ""]] * len(ACCEPTED)
    for (_, error, words), (names, message) in zip(REJECTED, answers[len(ACCEPTED) :], strict=True):
        assert names[0] == error and {"ValueError", "TypeError"} & set(names), message
        assert all(word in message for word in words), message


# --- calls before init --------------------------------------------------------------------------


#: Functions that need no group.
NO_GROUP = {
    *NAMES["bootstrap"].split(), *NAMES["debug level"].split(), "supports_complex", "get_pg_count",
    "batch_isend_irecv",
} - {"destroy_process_group"}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - NO_GROUP))
def test_call_before_init_raises(name: str) -> None:
    given = {"tensors": [np.zeros(2)]}  # which is checked before
    parameters = inspect.signature(getattr(dist, name)).parameters.values()
    needed = [given.get(one.name) for one in parameters if one.default is one.empty]
    with pytest.raises(dist.NotInitializedError, match="call init_process_group") as caught:
        getattr(dist, name)(*needed)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(dist.NotInitializedError):
        dist.P2POp(dist.isend, np.zeros(2), 0)
