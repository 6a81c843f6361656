"""The surface: names, signatures, errors, what importing loads, what is available, launchers."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
from datetime import timedelta

import numpy as np
import pytest

import mpicoll as dist
from mpicoll import errors
from mpicoll.kernels.calls import PythonCalls
from mpicoll.launch.environment import SINGLETON, check_world
from mpicoll.launch.launchers import LAUNCHERS, find_local_rank

pytestmark = pytest.mark.any_mpi

#: The names of torch.distributed that mpicoll carries, by section.
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
#: What mpicoll has and torch.distributed does not.
OWN = {
    "scan",
    "exscan",
    "recv_async",
    "restricted_pickle",
    "Future",
    "dump_flight_record",
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "grow_group",
}

#: Functions that torch has in C, without a signature.
NO_SIGNATURE = {"get_debug_level", "set_debug_level", "set_debug_level_from_env"}


def child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=without_launchers() | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def without_launchers() -> dict[str, str]:
    known = {*marks(), "LOCAL_RANK", "RANK", "WORLD_SIZE", SINGLETON}
    return {name: value for name, value in os.environ.items() if name not in known}


def marks() -> set[str]:
    return {name for one in LAUNCHERS for name in (*one.detected_by, *one.local_rank)}


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that no launcher has left anything in."""
    for name in (*marks(), "LOCAL_RANK", "TORCHELASTIC_RUN_ID", SINGLETON):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_is_there(name: str) -> None:
    assert inspect.isfunction(getattr(dist, name))
    assert name in dist.__all__


@pytest.mark.parametrize("name", CLASSES)
def test_class_is_there(name: str) -> None:
    assert inspect.isclass(getattr(dist, name))
    assert name in dist.__all__


def test_all_names_resolve_and_are_accounted_for() -> None:
    assert len(set(dist.__all__)) == len(dist.__all__)
    assert set(dist.__all__) == {*FUNCTIONS, *CLASSES, *OWN, *errors.__all__}
    for name in dist.__all__:
        assert getattr(dist, name) is not None
    assert set(dist.__all__) <= set(dir(dist))


def test_every_public_module_lists_what_mpicoll_exports() -> None:
    import importlib

    for home, names in dist._HOMES.items():
        module = importlib.import_module(f"mpicoll.{home}")
        assert set(names) <= set(module.__all__), home
    # What type checkers, editors and the reference read.
    for home in dist._HOMES:
        assert f"    from mpicoll.{home} import " in inspect.getsource(dist), home


def test_an_unknown_name_is_an_attribute_error() -> None:
    for wrong, meant in (("all_reduse", "all_reduce"), ("ReduceOP", "ReduceOp")):
        with pytest.raises(AttributeError) as caught:
            getattr(dist, wrong)
        hint = f"module 'mpicoll' has no attribute {wrong!r}; did you mean {meant!r}?"
        assert (str(caught.value), caught.value.name) == (hint, wrong)
    with pytest.raises(AttributeError, match=r"no attribute 'zzz'$"):
        dist.zzz  # noqa: B018
    assert not hasattr(dist, "scatter_everything")
    done = child("import mpicoll; mpicoll.all_reduse")
    assert done.stderr.lower().count("did you mean") == 1


def test_recv_async_is_irecv() -> None:
    assert dist.recv_async is dist.irecv


#: Functions that raise nothing of their own.
NO_ERRORS = {
    "is_available", "is_mpi_available", "is_gloo_available", "is_nccl_available",
    "is_ucc_available", "is_xccl_available", "is_backend_available", "is_torchelastic_launched",
    "is_initialized", "get_pg_count",
}  # fmt: skip


def documented() -> dict[str, object]:
    """Every public function, and the public methods of the classes that programs call."""
    found: dict[str, object] = {}
    for name in dist.__all__:
        value = getattr(dist, name)
        if inspect.isfunction(value):
            found[name] = value
        elif inspect.isclass(value) and not issubclass(value, (Exception, int)):
            for method, routine in inspect.getmembers(value, inspect.isroutine):
                inherited = any(method in vars(base) for base in (object, str))
                if not method.startswith("_") and not inherited:
                    found[f"{name}.{method}"] = routine
    return found


#: Methods of ProcessGroup for the library itself.
INSIDE = {"busy", "check_open", "close", "finish", "free", "give", *vars(PythonCalls)}


def entries(text: str) -> set[str]:
    """The parameters that a docstring describes."""
    found = re.findall(r"^(\w+(?:, \w+)*): \S", text, re.MULTILINE)
    return {entry for names in found for entry in names.split(", ")}


def missing(function, name: str) -> list[str]:
    """What a docstring and that of its module do not say about a function."""
    text = inspect.getdoc(function) or ""
    shared = inspect.getdoc(inspect.getmodule(function)) or "" if "." not in name else ""
    lacks = []
    if not re.match(r"[A-Z][a-z-]*[^s\W]\b.*[.?]$", text.partition("\n")[0]):
        lacks.append("a first line that tells what to do, as a sentence")
    signature = inspect.signature(function)
    parameters = {one for one in signature.parameters if one not in ("self", "cls")}
    lacks += [f"parameter {one}" for one in sorted(parameters - entries(text) - entries(shared))]
    lacks += [f"{one} is not a parameter" for one in sorted(entries(text) - parameters)]
    gives_nothing = signature.return_annotation in ("None", None)
    if not gives_nothing and not re.search(r"\b[Rr]eturns?\b", text + shared):
        lacks.append("what is returned")
    raised = re.findall(r"\b[A-Z]\w*Error\b", text[text.find("Raises") :])
    known = {*errors.__all__, "ValueError", "TypeError", "RuntimeError", "IndexError"}
    lacks += [f"{one} is not an error" for one in raised if one not in known]
    raises = ("Raises" in text and bool(raised)) or "\nRaises" in shared
    if "." not in name and raises is (name in NO_ERRORS):
        lacks.append("the errors raised, if there are any")
    return lacks


@pytest.mark.parametrize("name", [n for n in documented() if n.split(".")[-1] not in INSIDE])
def test_docstrings_say_what_the_page_promises(name: str) -> None:
    assert missing(documented()[name], name) == []


def test_the_constructor_of_messages_is_documented() -> None:
    text = inspect.getdoc(dist.P2POp)
    assert entries(text) == set(inspect.signature(dist.P2POp).parameters)
    assert "Raises ArgumentError" in text


def test_a_docstring_that_says_less_is_found() -> None:
    """Else the tests above would pass whatever is written."""

    def some(tensor: int, op: int) -> int:
        """Adds something

        tensor: an array.
        other: not there.
        """

    lacks = missing(some, "some")
    assert len(lacks) == 5, lacks
    assert {"parameter op", "other is not a parameter", "what is returned"} <= set(lacks)


@pytest.mark.parametrize("name", sorted({*CLASSES, *OWN, *errors.__all__}))
def test_classes_have_docstrings(name: str) -> None:
    found = getattr(dist, name)
    assert isinstance(found, int) or inspect.getdoc(found)  # or a constant


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", dist.__version__)


# --- signatures ---------------------------------------------------------------------------------


def torch_distributed():
    torch = pytest.importorskip("torch", reason="compares with torch, which is not installed")
    import torch.distributed as found

    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"signatures are those of torch 2.13, this is {torch.__version__}")
    return found


def shape_of(function) -> list[tuple[str, str, object]]:
    """Names, kinds and defaults; a reduce operation by its name."""

    def default(value: object) -> object:
        if value is inspect.Parameter.empty:
            return "no default"
        return getattr(value, "name", value)

    return [
        (one.name, one.kind.name, default(one.default))
        for one in inspect.signature(function).parameters.values()
    ]


#: Parameters that torch has not, behind those that it has, and by their names alone.
MORE = {
    "init_process_group": [("comm", "KEYWORD_ONLY", None), ("reproducible", "KEYWORD_ONLY", None)],
    "new_group": [("reproducible", "KEYWORD_ONLY", None)],
}


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in NO_SIGNATURE])
def test_signature_is_that_of_torch(name: str) -> None:
    theirs = torch_distributed()
    ours = shape_of(getattr(dist, name))
    assert ours[len(ours) - len(MORE.get(name, [])) :] == MORE.get(name, [])
    assert ours[: len(ours) - len(MORE.get(name, []))] == shape_of(getattr(theirs, name))


def test_p2pop_signature_is_that_of_torch() -> None:
    theirs = torch_distributed()
    assert shape_of(dist.P2POp.__init__) == shape_of(theirs.P2POp.__init__)


def test_backend_is_that_of_torch() -> None:
    theirs = torch_distributed().Backend
    for name in ("UNDEFINED", "GLOO", "NCCL", "UCC", "MPI", "XCCL", "FAKE"):
        assert getattr(dist.Backend, name) == getattr(theirs, name)
    assert shape_of(dist.Backend.register_backend) == shape_of(theirs.register_backend)


def test_reduce_ops_have_the_codes_of_torch() -> None:
    theirs = torch_distributed().ReduceOp
    for op in reduce_ops():
        assert op.code == int(getattr(theirs.RedOpType, op.name)), op
    named = {name for name in dir(theirs.RedOpType) if name.isupper() and name != "UNUSED"}
    assert named == {op.name for op in reduce_ops()}


def test_debug_levels_have_the_codes_of_torch() -> None:
    theirs = torch_distributed().DebugLevel
    for level in dist.DebugLevel:
        assert int(level) == int(getattr(theirs, level.name))


def test_constants_are_those_of_torch() -> None:
    theirs = torch_distributed()
    assert dist.GroupMember.NON_GROUP_MEMBER == theirs.GroupMember.NON_GROUP_MEMBER == -100
    assert (dist.SHRINK_DEFAULT, dist.SHRINK_ABORT) == (0, 1)


def test_work_has_the_methods_of_torch() -> None:
    for name in (
        "is_completed", "is_success", "exception", "wait", "block_current_stream", "get_future",
        "source_rank", "_source_rank", "result", "synchronize",
    ):  # fmt: skip
        assert callable(getattr(dist.Work, name)), name


def test_every_timeout_takes_seconds_or_a_timedelta() -> None:
    from mpicoll.core.work import parse_timeout

    assert parse_timeout(timedelta(minutes=1), None, "x") == 60
    assert parse_timeout(0.5, None, "x") == 0.5
    assert parse_timeout(3, None, "x") == 3
    assert parse_timeout(None, 7.0, "x") == 7
    for wrong in ("5", True, [1], object()):
        with pytest.raises(TypeError, match=f"op: timeout: .*{type(wrong).__name__}"):
            parse_timeout(wrong, None, "op")
    for wrong in (-1, timedelta(seconds=-1), float("nan")):
        with pytest.raises(ValueError, match="op: timeout"):
            parse_timeout(wrong, None, "op")


# --- ReduceOp, Backend --------------------------------------------------------------------------


def reduce_ops() -> list[dist.ReduceOp]:
    names = "SUM AVG PRODUCT MIN MAX BAND BOR BXOR PREMUL_SUM"
    return [getattr(dist.ReduceOp, name) for name in names.split()]


def test_reduce_ops() -> None:
    ops = reduce_ops()
    assert [op.code for op in ops] == list(range(len(ops)))
    for op in ops:
        assert isinstance(op, dist.ReduceOp)
        assert repr(op) == f"ReduceOp.{op.name}"
        assert op.op is op and op.factor is None
        assert op == op and op in {op}
    assert len(set(ops)) == len(ops)
    assert dist.ReduceOp.RedOpType.SUM is dist.ReduceOp.SUM


@pytest.mark.parametrize("op", reduce_ops(), ids=repr)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_reduce_ops_are_pickled_as_themselves(op: dist.ReduceOp, protocol: int) -> None:
    assert pickle.loads(pickle.dumps(op, protocol)) is op
    assert copy.deepcopy(op) is op and copy.copy(op) is op


def test_premul_sum_has_a_factor() -> None:
    op = dist.ReduceOp.PREMUL_SUM(0.25)
    assert (op.op, op.factor, op.code) == (dist.ReduceOp.PREMUL_SUM, 0.25, 8)
    assert repr(op) == "ReduceOp.PREMUL_SUM(0.25)"
    again = pickle.loads(pickle.dumps(op))
    assert (again.op, again.factor) == (dist.ReduceOp.PREMUL_SUM, 0.25)
    array = pickle.loads(pickle.dumps(dist.ReduceOp.PREMUL_SUM(np.float32([3]))))
    assert array.factor == np.float32(3)
    with pytest.raises(TypeError, match="only PREMUL_SUM"):
        dist.ReduceOp.SUM(2)


def test_supports_complex() -> None:
    # Unlike in torch, PRODUCT: it has a meaning for complex numbers, and is offered.
    known = {"MAX", "MIN", "BAND", "BOR", "BXOR"}
    assert {op.name for op in reduce_ops() if not dist.supports_complex(op)} == known


def test_backend_names() -> None:
    assert dist.Backend("MPI") == dist.Backend.MPI == "mpi"
    assert dist.Backend("Gloo") == "gloo"
    assert isinstance(dist.Backend("NCCL"), str)
    assert isinstance(dist.Backend("nccl"), dist.Backend)
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


def drawn_tree() -> dict[str, tuple[str, ...]]:
    """Each exception and its parents, as the docstring of mpicoll.errors draws them."""
    found: dict[str, tuple[str, ...]] = {}
    above: list[tuple[int, str]] = []
    for line in inspect.getdoc(errors).splitlines():
        match = re.match(r"([ │├└─]+)(\w+Error)\b(?: \(([\w.]+Error)\))? ", line)
        if match is None:
            continue
        indent = len(match[1])
        above = [(column, name) for column, name in above if column < indent]
        parents = [name for _, name in above[-1:]] + [match[3]] * (match[3] is not None)
        found[match[2]] = tuple(parents)
        above.append((indent, match[2]))
    return found


def test_the_tree_of_errors_is_as_it_is_drawn() -> None:
    drawn = drawn_tree()
    assert set(drawn) == set(errors.__all__) - {"DistError"}
    standard = {"pickle.UnpicklingError": pickle.UnpicklingError}
    for name, parents in drawn.items():
        error = getattr(errors, name)
        assert issubclass(error, RuntimeError)
        for parent in parents:
            known = standard.get(parent) or getattr(errors, parent, None)
            assert issubclass(error, known or getattr(__import__("builtins"), parent)), name


@pytest.mark.parametrize(
    ("name", "standard"),
    [
        ("ArgumentError", ValueError),
        ("ArgumentTypeError", TypeError),
        ("UnsupportedError", ValueError),
        ("NotInitializedError", ValueError),
        ("EmptyListError", IndexError),
        ("EmptyListError", ValueError),
        ("LaunchError", ValueError),
        ("CollectiveTimeoutError", TimeoutError),
        ("RefusedPickleError", pickle.UnpicklingError),
        ("ForkedError", RuntimeError),
        ("MismatchError", dist.DistBackendError),
        ("MPIError", dist.DistBackendError),
        ("LostRankError", dist.DistBackendError),
        ("DeviceMemoryError", MemoryError),
    ],
)
def test_an_except_clause_written_for_torch_catches(name: str, standard: type) -> None:
    assert issubclass(getattr(dist, name), standard)
    assert issubclass(getattr(dist, name), dist.DistError)


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_are_pickled(name: str) -> None:
    error = getattr(errors, name)("what went wrong")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == "what went wrong"


def test_mpi_error_keeps_its_class() -> None:
    again = pickle.loads(pickle.dumps(dist.MPIError("truncated", 15)))
    assert (str(again), again.error_class) == ("truncated", 15)


# --- what importing loads -----------------------------------------------------------------------

LOADED = """
import json, sys
{}
names = "mpi4py.MPI cupy torch numpy mpi4py".split()
print(json.dumps([name for name in names if name in sys.modules]))
"""


def loaded_by(code: str) -> set[str]:
    done = child(LOADED.format(code))
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_importing_loads_neither_mpi_nor_numpy() -> None:
    assert loaded_by("import mpicoll") == set()
    assert loaded_by("import mpicoll; dir(mpicoll); mpicoll.__all__") == set()


def test_the_errors_load_nothing() -> None:
    assert loaded_by("import mpicoll; mpicoll.MismatchError") == set()


@pytest.mark.parametrize(
    "touched", ["all_reduce", "ReduceOp", "send", "all_gather_object", "Work", "new_group"]
)
def test_touching_a_name_loads_no_mpi(touched: str) -> None:
    assert loaded_by(f"import mpicoll; mpicoll.{touched}") <= {"numpy", "mpi4py"}


def test_touching_all_names_loads_no_mpi() -> None:
    code = "import mpicoll; [getattr(mpicoll, name) for name in mpicoll.__all__]"
    assert loaded_by(code) <= {"numpy", "mpi4py"}
    assert loaded_by("from mpicoll import *") <= {"numpy", "mpi4py"}


def test_questions_load_no_mpi() -> None:
    code = """
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
    assert loaded_by(code) <= {"numpy", "mpi4py"}


def test_the_check_sees_what_is_loaded() -> None:
    """Else the tests above would pass whatever is imported."""
    assert loaded_by("from mpi4py import MPI") >= {"mpi4py.MPI", "mpi4py"}
    assert "numpy" in loaded_by("import numpy")


# --- what is available --------------------------------------------------------------------------


def test_available(bare: pytest.MonkeyPatch) -> None:
    assert dist.is_available() is True
    assert dist.is_mpi_available() is True
    assert dist.is_gloo_available() is True  # the name, over MPI
    assert dist.is_nccl_available() is dist.is_ucc_available() is dist.is_xccl_available() is False
    assert dist.is_initialized() is False
    for name in ("mpi", "MPI", "mpicoll", "gloo", "nccl"):
        assert dist.is_backend_available(name) is True
    for name in ("ucc", "xccl", "fake", "undefined", "", "mpich"):
        assert dist.is_backend_available(name) is False
    assert dist.is_torchelastic_launched() is False
    bare.setenv("TORCHELASTIC_RUN_ID", "x")
    assert dist.is_torchelastic_launched() is True


def test_default_backend_for_device() -> None:
    assert dist.get_default_backend_for_device("cpu") == "mpi"
    assert dist.get_default_backend_for_device("cuda:1") == "mpi"
    with pytest.raises(ValueError, match="'tpu'"):
        dist.get_default_backend_for_device("tpu")


def test_default_backend_for_a_torch_device() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    assert dist.get_default_backend_for_device(torch.device("cpu")) == "mpi"
    with pytest.raises(ValueError, match="meta"):
        dist.get_default_backend_for_device(torch.device("meta"))


def test_node_local_rank(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="LOCAL_RANK"):
        dist.get_node_local_rank()
    assert dist.get_node_local_rank(5) == 5
    assert dist.get_node_local_rank(fallback_rank=0) == 0
    bare.setenv("LOCAL_RANK", "3")
    assert dist.get_node_local_rank() == dist.get_node_local_rank(5) == 3


@pytest.mark.parametrize(
    "launcher", [one for one in LAUNCHERS if one.local_rank], ids=lambda one: one.name
)
def test_node_local_rank_from_the_launcher(launcher, bare: pytest.MonkeyPatch) -> None:
    for mark in launcher.detected_by:
        bare.setenv(mark, "4")
    bare.setenv(launcher.local_rank[0], "2")
    assert dist.get_node_local_rank(0) == find_local_rank() == 2
    bare.setenv("LOCAL_RANK", "1")  # the one that torch documents goes first
    assert dist.get_node_local_rank(0) == 1


# --- who started us -----------------------------------------------------------------------------

#: What launchers set, and a word of the advice when MPI sees one rank alone.
ANNOUNCED = {
    "mpirun of Open MPI": (
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"},
        ["Open MPI's mpirun announces 4 ranks", "OMPI_COMM_WORLD_SIZE=4", "mpi4py"],
    ),
    "torchrun": (
        {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        ["torchrun announces 2 ranks", "WORLD_SIZE=2", "before mpi4py.MPI is imported"],
    ),
    "mpiexec of MPICH": (
        {"PMI_RANK": "0", "PMI_SIZE": "8", "PMI_FD": "7"},
        ["PMI_SIZE=8", "mpirun", "MPICH family"],
    ),
    "srun without PMI": (
        {
            "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_PROCID": "1",
        },
        ["srun announces 4 ranks", "--mpi=pmi2", "--mpi=pmix"],
    ),
    "sbatch": (
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
        ["Slurm announces 4 ranks", "SLURM_NTASKS=4", "srun or mpirun"],
    ),
    "torchrun inside sbatch": (
        {
            "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "TORCHELASTIC_RUN_ID": "none",
            "WORLD_SIZE": "2",
        },
        ["torchrun announces 2 ranks"],
    ),
}  # fmt: skip

#: One rank, as it was meant to be.
PROPER = {
    "nobody": {},
    "mpirun -n 1": {"OMPI_COMM_WORLD_SIZE": "1"},
    "mpiexec -n 1": {"PMI_RANK": "0", "PMI_SIZE": "1"},
    "torchrun with one worker": {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1"},
    "srun -n 1": {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    "srun -n 1 inside sbatch -n 4": {
        "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4",
    },
    "mpirun -n 1 inside sbatch -n 4": {
        "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "OMPI_COMM_WORLD_SIZE": "1",
    },
    "mpiexec -n 1 inside sbatch -n 4": {
        "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "PMI_RANK": "0", "PMI_SIZE": "1",
    },
    "WORLD_SIZE of somebody else": {"WORLD_SIZE": "4", "RANK": "0"},
    "nonsense": {"OMPI_COMM_WORLD_SIZE": "many"},
}  # fmt: skip


@pytest.mark.parametrize("who", ANNOUNCED)
def test_alone_where_more_were_announced(who: str) -> None:
    environment, words = ANNOUNCED[who]
    with pytest.raises(dist.LaunchError) as caught:
        check_world(1, environment)
    for word in [*words, SINGLETON]:
        assert word in str(caught.value)
    check_world(4, environment)  # MPI sees others: all is well
    check_world(1, environment | {SINGLETON: "1"})


@pytest.mark.parametrize("who", PROPER)
def test_alone_as_announced(who: str) -> None:
    assert check_world(1, PROPER[who]) is None
    assert check_world(2, PROPER[who]) is None


# Not those of the MPIs' own launchers: the libraries themselves read them.
@pytest.mark.parametrize("who", ["torchrun", "srun without PMI", "sbatch"])
def test_started_alone_under_a_launcher_is_an_error(who: str) -> None:
    environment, words = ANNOUNCED[who]
    done = child("import mpicoll; mpicoll.init_process_group()", **environment)
    assert done.returncode != 0
    assert "LaunchError" in done.stderr
    for word in words:
        assert word in done.stderr
    done = child(
        "import mpicoll; mpicoll.init_process_group(); print(mpicoll.get_world_size())",
        **environment,
        **{SINGLETON: "1"},
    )
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


# --- init_process_group -------------------------------------------------------------------------

ASK = """
import json, os, sys
import mpicoll as dist
def told(environment={}, **arguments):
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


def test_init_process_group_names_what_disagrees() -> None:
    code = """
answers = [
    told(),
    told(init_method="mpi://"),
    told(init_method="env://"),
    told(rank=0, world_size=1),
    told(dict(RANK="0", WORLD_SIZE="1"), init_method="env://"),
    told(backend="gloo"), told(backend="nccl"), told(backend="MPI"),
    told(backend="cpu:gloo,cuda:nccl"),
    told(timeout=5), told(group_name="mine"), told(pg_options=object()),
    told(rank=2),
    told(world_size=4),
    told(dict(RANK="3", WORLD_SIZE="4")),
    told(dict(RANK="3"), init_method="env://"),
    told(dict(WORLD_SIZE="4"), init_method="env://"),
    told(dict(WORLD_SIZE="four"), init_method="env://"),
    told(init_method="tcp://127.0.0.1:1234"),
    told(init_method="file:///tmp/x"),
    told(init_method="http://x"),
    told(backend="ucc"), told(backend="mpich"), told(backend=3),
    told(timeout="5"), told(rank="0"), told(timeout=-1),
    told(store=object()), told(device_id=0),
]
print(json.dumps(answers))
"""
    done = child(ASK + code)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    fine, wrong = answers[:12], answers[12:]
    assert fine == [[[], ""]] * 12
    expected = [
        ("LaunchError", ["rank=2", "MPI's own rank, 0", "rank 0 of 1"]),
        ("LaunchError", ["world_size=4", "MPI's own world_size, 1"]),
        ("LaunchError", ["rank 3 of 4", "a single rank"]),
        ("LaunchError", ["RANK=3", "MPI's own rank, 0"]),
        ("LaunchError", ["WORLD_SIZE=4", "MPI's own world_size, 1"]),
        ("ArgumentError", ["WORLD_SIZE", "'four'"]),
        ("ArgumentError", ["tcp://127.0.0.1:1234", "needs rank and world_size"]),
        ("ArgumentError", ["file:///tmp/x", "needs rank and world_size"]),
        ("UnsupportedError", ["init_method", "http://x", "tcp://HOST:PORT", "mpi://"]),
        ("ArgumentError", ["backend 'ucc'", "mpi or mpicoll, or gloo or nccl"]),
        ("ArgumentError", ["backend 'mpich'"]),
        ("ArgumentError", ["Backend", "int"]),
        ("ArgumentTypeError", ["timeout", "str"]),
        ("ArgumentTypeError", ["rank", "str"]),
        ("ArgumentError", ["timeout", "-1"]),
        ("UnsupportedError", ["store"]),
        ("UnsupportedError", ["device_id"]),
    ]
    for (error, words), (names, message) in zip(expected, wrong, strict=True):
        assert names[0] == error, message
        assert {"ValueError", "TypeError"} & set(names)
        for word in words:
            assert word in message


# --- calls before init --------------------------------------------------------------------------


def calls_without_a_group() -> dict[str, object]:
    x, y = np.zeros(2), np.zeros(2)
    return {
        "destroy_process_group": dist.destroy_process_group,
        "new_group": dist.new_group,
        "new_subgroups": lambda: dist.new_subgroups(1),
        "new_subgroups_by_enumeration": lambda: dist.new_subgroups_by_enumeration([[0]]),
        "split_group": lambda: dist.split_group(None, [[0]]),
        "shrink_group": lambda: dist.shrink_group([0]),
        "get_rank": dist.get_rank,
        "get_world_size": dist.get_world_size,
        "get_group_rank": lambda: dist.get_group_rank(None, 0),
        "get_global_rank": lambda: dist.get_global_rank(None, 0),
        "get_process_group_ranks": lambda: dist.get_process_group_ranks(None),
        "get_backend": dist.get_backend,
        "get_backend_config": dist.get_backend_config,
        "send": lambda: dist.send(x, 0),
        "recv": lambda: dist.recv(x, 0),
        "isend": lambda: dist.isend(x, 0),
        "irecv": lambda: dist.irecv(x),
        "P2POp": lambda: dist.P2POp(dist.isend, x, 0),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce async": lambda: dist.all_reduce(x, async_op=True),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([x]),
        "reduce": lambda: dist.reduce(x, 0),
        "all_gather": lambda: dist.all_gather([x], y),
        "all_gather_single": lambda: dist.all_gather_single(x, y),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(x, y),
        "all_gather_coalesced": lambda: dist.all_gather_coalesced([[x]], [y]),
        "reduce_scatter": lambda: dist.reduce_scatter(x, [y]),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(x, y),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, y),
        "all_to_all": lambda: dist.all_to_all([x], [y]),
        "all_to_all_single": lambda: dist.all_to_all_single(x, y),
        "gather": lambda: dist.gather(x, [y]),
        "scatter": lambda: dist.scatter(x, [y]),
        "barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
        "send_object_list": lambda: dist.send_object_list([1], 0),
        "recv_object_list": lambda: dist.recv_object_list([1]),
        "all_gather_object": lambda: dist.all_gather_object([None], 1),
        "gather_object": lambda: dist.gather_object(1, [None]),
        "broadcast_object_list": lambda: dist.broadcast_object_list([1]),
        "scatter_object_list": lambda: dist.scatter_object_list([None], [1]),
    }


@pytest.mark.parametrize("name", calls_without_a_group())
def test_a_call_before_init_says_so(name: str) -> None:
    with pytest.raises(dist.NotInitializedError, match="call init_process_group") as caught:
        calls_without_a_group()[name]()
    assert isinstance(caught.value, ValueError)


def test_every_function_that_needs_a_group_is_called_before_init() -> None:
    asked = {name.partition(" ")[0] for name in calls_without_a_group()}
    no_group_needed = {
        *NAMES["bootstrap"].split(), *NAMES["debug level"].split(), "supports_complex",
        "get_pg_count", "batch_isend_irecv",
    } - {"destroy_process_group"}  # fmt: skip
    assert {*FUNCTIONS, "P2POp"} - no_group_needed == asked
