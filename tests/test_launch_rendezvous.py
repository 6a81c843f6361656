"""Failures of the rendezvous: missing ranks, mismatches, other programs and stale files."""

from __future__ import annotations

import textwrap

import pytest
from launch_jobs import VENDOR, Ended, job, job_on_any_mpi

from mpicoll.launch.rendezvous import ServerAddress, ServerNotFoundError

pytestmark = pytest.mark.waits


INIT = """
    start = time.monotonic()
    try:
        dist.init_process_group(init_method="$method", timeout=$limit)
    except dist.MpicollError as error:
        say(f"{os.environ['RANK']} {type(error).__name__} {error}")
        say("seconds", time.monotonic() - start < $limit + 6)
    else:
        say("not reached")
"""


@pytest.mark.parametrize("method", ["env://", "file://$FOLDER/meet"])
@job(INIT, {"limit": 3}, ranks=(0, 2), size=4)
def test_missing_ranks_time_out(method: str, ended: Ended) -> None:
    assert ended.codes == [0, 0], ended
    for rank, line in zip((0, 2), ended.lines, strict=False):
        assert f"{rank} CollectiveTimeoutError" in line, ended
        assert f"rank {rank} of 4: timed out after 3 s waiting for ranks 1, 3" in line, ended
    assert ended.lines[2:] == ["seconds True"] * 2
    assert not (ended.folder / "meet").exists()


@pytest.mark.parametrize("method", ["env://", "file://$FOLDER/meet"])
@job(INIT, {"limit": 2}, ranks=(1,), size=2)
def test_missing_rank_0_times_out(method: str, ended: Ended) -> None:
    line = ended.lines[0]
    assert "1 CollectiveTimeoutError" in line and "did not reach rank 0's server" in line, ended
    assert ended.lines[1:] == ["seconds True"]


@job("""
    if os.environ["RANK"] == "1":
        os.environ["WORLD_SIZE"] = "3"
""" + INIT, {"method": "env://", "limit": 20})  # fmt: skip
def test_different_world_sizes_raise(ended: Ended) -> None:
    for rank in range(2):
        assert f"{rank} LaunchError" in ended.lines[rank], ended
        assert "rank 1 has world_size=3, and rank 0 has world_size=2" in ended.lines[rank], ended


@job(INIT, {"method": "env://", "limit": 14}, ranks=(0, 1, 1), size=3, later=(2,))
def test_duplicate_rank_raises(ended: Ended) -> None:
    assert "another process has connected as rank 1 of this job" in ended.out, ended
    assert ended.out.count("waiting for rank 2") == 2, ended


@pytest.mark.parametrize("failing", ["0", "1"])
@job("""
    fails = os.environ["RANK"] == "$failing"
    try:
        dist.init_process_group(timeout="long" if fails else 30)
    except (dist.LaunchError, TypeError) as error:
        say(fails, type(error).__name__, "rank $failing failed: Arg" in str(error))
""")
def test_invalid_argument_raises_on_all_ranks(failing: str, ended: Ended) -> None:
    ended.printed("False LaunchError True", "True ArgumentTypeError False")


@job("""
    os.environ["MPICOLL_SECRET"] = "the same" if "$own" == "no" else os.environ["RANK"]
    """ + textwrap.indent(textwrap.dedent(INIT), "    ").strip() + """
    if dist.is_initialized():
        say("sum", total(1))
""", {"method": "env://"})  # fmt: skip
@pytest.mark.parametrize(("own", "limit"), [("no", 20), ("yes", 3)])
def test_ranks_need_the_same_secret(own: str, limit: int, ended: Ended) -> None:
    if own == "no":
        assert ended.lines.count("sum 2.0") == 2, ended
    else:
        assert "waiting for rank 1" in ended.out, ended
        assert "does not have this job's secret" in ended.out or "closed the conn" in ended.out


@job_on_any_mpi("""
    from mpi4py import MPI
    say(error_of(dist.LaunchError, dist.init_process_group))
""")
def test_mpi_started_before_raises(ended: Ended) -> None:
    assert len(ended.lines) == 2
    assert all("before any module imports mpi4py.MPI" in line for line in ended.lines), ended


@pytest.mark.skipif(VENDOR != "Open MPI", reason="for Open MPI")
@pytest.mark.parametrize("method", ["env://", "tcp://127.0.0.1:$PORT", "file://$FOLDER/meet"])
@job_on_any_mpi(INIT, {"limit": 20})
def test_open_mpi_without_mpirun_raises(method: str, ended: Ended) -> None:
    assert ended.codes == [0, 0]
    for rank in range(2):
        line = ended.lines[rank]
        assert f"{rank} LaunchError" in line and "mpirun -n 2 python" in line, ended
        assert "pip install mpich" in line


#: Invalid contents of a store.
INVALID_ADDRESSES = {
    "binary": b"\x80\x04\x95\xff\x00",
    "a FileStore of torch's": b"\x03\x00\x00\x00\x00\x00\x00\x00/0/init/\x01",
    "deep": b"[" * 60000,
    "nothing": b"{}",
    "a host": b'{"hosts": "here", "port": 1, "secret": "", "machine": ""}',
    "a port in words": b'{"hosts": [], "port": "1", "secret": "", "machine": ""}',
    "no port": b'{"hosts": [], "port": 70000, "secret": "", "machine": ""}',
}


@pytest.mark.parametrize("value", INVALID_ADDRESSES.values(), ids=list(INVALID_ADDRESSES))
def test_parse_rejects_invalid_addresses(value: bytes) -> None:
    with pytest.raises(ServerNotFoundError, match="expected the address") as caught:
        ServerAddress.parse(value)
    assert caught.value.is_other


@pytest.mark.parametrize(
    "left", [INVALID_ADDRESSES["binary"], INVALID_ADDRESSES["nothing"],
             b'{"hosts": ["..."], "port": 1, "secret": "", "machine": ""}',
             b'{"hosts": ["127.0.0.1"], "port": 1, "secret": "old", "machine": ""}'],
    ids=["binary", "nothing", "no host", "stale"],
)  # fmt: skip
@job("""
    if os.environ["RANK"] == "3":
        with open("$FOLDER/meet", "wb") as file:
            file.write($left)
    else:
        time.sleep(2)
    dist.init_process_group(init_method="file://$FOLDER/meet", timeout=20)
    say(dist.get_rank(), total(1))
""", ranks=(3, 0, 1, 2), later=(2,))  # fmt: skip
def test_invalid_or_stale_file_is_replaced(left: bytes, ended: Ended) -> None:
    """By rank 0, which is late. Another rank is still later."""
    ended.printed(*(f"{rank} 4.0" for rank in range(4)))
