"""CUDA capabilities of MPI: reports, outcomes of probes, and the routes that result."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import sys

import pytest
from whole_jobs import run_program

from mpicoll.cuda import mpi_support, probe_cache
from mpicoll.cuda.capabilities import Capabilities, judge
from mpicoll.cuda.probe import OK, ProbeOutcome
from mpicoll.errors import ArgumentError, MismatchError, UnsupportedError
from mpicoll.kernels import library
from mpicoll.routes.device.eligibility import eligible_routes, forced_route


def rank(cuda: bool = False, gpus: int = 1, node: str = "a", **more: str) -> Capabilities:
    """Return the capabilities of a rank."""
    names = tuple(f"gpu-{i}" for i in range(gpus))
    no_gpu = "" if gpus else "none here"
    return Capabilities(
        "M", "1", "", cuda, "as the test says", node, gpus=names, names=names, no_gpu=no_gpu, **more
    )


KINDS = list(itertools.product((False, True), (0, 2), "ab"))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_eligible_routes_are_supported_by_all_ranks(n):
    for kinds in itertools.product(KINDS, repeat=n):
        support, gpus, nodes = zip(*kinds, strict=True)
        expected = ["ipc"] if len(set(nodes)) == 1 and 0 not in gpus else []
        if 1 < len(set(nodes)) < n and 0 not in gpus:
            expected.append("hierarchical")
        if all(support):
            expected.append("direct")
        found = eligible_routes([rank(*kind) for kind in kinds])
        assert found == (*expected, "staged"), kinds
        for name in ("hierarchical", "ipc", "direct", "staged"):
            if name in found:
                assert eligible_routes([rank(*kind) for kind in kinds], name) == (name,)
            else:
                with pytest.raises(UnsupportedError):
                    eligible_routes([rank(*kind) for kind in kinds], name)


def test_error_of_a_forced_route_names_requirement_and_ranks():
    ranks = [rank(True), rank(), rank(True, 0, "b"), rank()]
    message = "direct: each of ranks 1, 3 lacks an MPI that sends and receives device memory (as"
    for forced, words in {
        "direct": [message],
        "ipc": ["rank 2 lacks a GPU (none here)", "rank 2 is on another node than rank 0"],
        "nccl": ["NCCL"],
    }.items():
        with pytest.raises(UnsupportedError) as caught:
            eligible_routes(ranks, forced)
        for word in words:
            assert word in str(caught.value)
    with pytest.raises(ArgumentError, match=r"expected one of .*staged.*got 'fast'"):
        eligible_routes(ranks, "fast")


def test_forced_route_must_be_equal_on_all_ranks():
    assert forced_route([rank(), rank()]) is None
    assert forced_route([rank(forced="ipc")] * 3) == "ipc"
    with pytest.raises(MismatchError, match="rank 0: 'ipc', rank 1: ''"):
        forced_route([rank(forced="ipc"), rank()])


CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)"
MPICH = "MPICH Version:      5.0.2"
OPENMPI = "Open MPI v5.0.11, package: Open MPI"


@pytest.mark.parametrize(
    ("version", "environment", "name"),
    [
        (CRAY, {}, "MPICH_GPU_SUPPORT_ENABLED"),
        (CRAY, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, None),
        (MPICH, {}, None),
        (MPICH, {"MPICH_GPU_SUPPORT_ENABLED": "0"}, None),
        (MPICH, {"MPIR_CVAR_ENABLE_GPU": "0"}, "MPIR_CVAR_ENABLE_GPU"),
        ("MVAPICH Version     : 4.0", {"MVP_ENABLE_GPU": "0"}, "MVP_ENABLE_GPU"),
        ("MVAPICH2 Version      : 2.3.7", {}, "MV2_USE_CUDA"),
        ("MVAPICH2 Version      : 2.3.7", {"MV2_USE_CUDA": "1"}, None),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS", {}, "I_MPI_OFFLOAD"),
        (OPENMPI, {}, None),
        (OPENMPI, {"OMPI_MCA_accelerator": "cuda"}, None),
        (OPENMPI, {"OMPI_MCA_accelerator": "^cuda"}, "OMPI_MCA_accelerator"),
        (OPENMPI, {"OMPI_MCA_opal_cuda_support": "0"}, None),
        ("Open MPI v4.1.6, package", {"OMPI_MCA_opal_cuda_support": "false"},
         "OMPI_MCA_opal_cuda_support"),
    ],
)  # fmt: skip
def test_disabled_switch_of_the_mpi_library(version, environment, name):
    found = mpi_support.find_switch(version, environment)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("claims", "outcome", "cuda", "problem"),
    [
        ((), None, False, ""),
        (("q",), None, True, ""),
        (("q",), ProbeOutcome(2, OK, OK), True, ""),
        ((), ProbeOutcome(2, OK, OK), True, ""),
        (("q",), ProbeOutcome(1, OK, "hung"), False, "tried on one rank: transfer hung"),
        (("q",), ProbeOutcome(1, "failed: no GPU", ""), True, ""),
    ],
)  # fmt: skip
def test_judge(claims, outcome, cuda, problem):
    found = judge(rank(), claims, outcome)
    assert found.cuda is cuda
    assert found.settled == (outcome is not None)
    assert problem in found.problem and bool(found.problem) == bool(problem)
    assert "q: yes" in found.why if claims else "does not report" in found.why


@pytest.mark.skipif(library.kernels is None, reason=library.describe())
def test_ucx_with_cuda_is_detected_by_its_files(tmp_path):
    copied = shutil.copy(library.describe()[len("compiled (") : -1], tmp_path / "libuct.so.0")
    (tmp_path / "ucx").mkdir()
    held = ctypes.CDLL(copied)
    assert not mpi_support.has_ucx_cuda() and not mpi_support.find_ucx_remedy({})
    (tmp_path / "ucx" / "libuct_cuda.so.0").touch()
    assert mpi_support.has_ucx_cuda()
    assert mpi_support.find_ucx_remedy({}).startswith("set UCX_MEMTYPE_CACHE=n")
    assert not mpi_support.find_ucx_remedy({"UCX_MEMTYPE_CACHE": "n"})
    del held


KEY = {"version": "1", "settings": {"UCX_TLS": "all"}}
OUTCOME = ProbeOutcome(2, OK, "hung")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mpicoll"


def test_cached_outcome_is_used_for_the_same_key(cache):
    assert probe_cache.load(KEY) is None
    probe_cache.store(KEY, ProbeOutcome(2, "failed: no GPU", ""))
    assert not cache.exists(), "the outcome of a probe that was not started"
    probe_cache.store(KEY, OUTCOME)
    assert probe_cache.load(KEY) == OUTCOME
    assert probe_cache.load({**KEY, "settings": {}}) is None
    assert len(list(cache.iterdir())) == 1, "a temporary file was not removed"


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"key": 1}', "\xff", '{"key": KEY, "outcome": {}}',
     '{"key": KEY, "outcome": {"ranks": 2, "began": 1, "transfer": "ok"}}'],
)  # fmt: skip
def test_invalid_cache_file_is_ignored(cache, text):
    probe_cache.store(KEY, OUTCOME)
    (path,) = cache.iterdir()
    path.write_bytes(text.replace("KEY", json.dumps(KEY)).encode("latin-1"))
    assert probe_cache.load(KEY) is None
    probe_cache.store(KEY, OUTCOME)
    assert probe_cache.load(KEY) == OUTCOME


def test_unwritable_cache_is_ignored(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    probe_cache.store(KEY, OUTCOME)
    assert probe_cache.load(KEY) is None


DISCOVER = """
import mpicoll as dist
dist.init_process_group()
from mpicoll.cuda import capabilities
found = capabilities.discover(probes=True)
print(found.cuda, len(found.gpus), found.settled, found.why, sep="|")
"""


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("override", "expected"),
    [("", "False|0|True|there is no GPU"), ("1", "True|0|True|MPICOLL_CUDA_AWARE=1")],
)
def test_discover_without_a_gpu(override, expected):
    environment = os.environ | {"MPICOLL_CUDA_AWARE": override}
    done = run_program(sys.executable, "-c", DISCOVER, env=environment)
    assert done.stdout == f"{expected}\n", done
