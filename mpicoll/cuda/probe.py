"""Probe in child processes, where a crash costs nothing, what MPI does with device memory.

``python -m mpicoll.cuda.probe FOLDER SECONDS [RANK SIZE]`` is one such process. It writes down how
far it gets, because failures leave no other trace: libraries that take device memory for the host's
crash, hang, or move garbage.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpicoll import control_messages, launch
from mpicoll.cuda import runtime

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["HUNG", "OK", "Place", "ProbeOutcome", "exchange_messages", "run_probe"]

#: Seconds that the processes have: starting CUDA from a network file system is slow.
LIMIT = 60.0
#: Seconds that the others have once one has failed, and that terminated processes have to end.
_GRACE = 5.0
#: Bytes of the messages: an eager one, and one that waits for its receiver.
SIZES = (64, 4 * 1024 * 1024)
OK, HUNG = "ok", "hung"


class ProbeOutcome(NamedTuple):
    """What a probe has found.

    ranks: how many ranks it ran on.
    began: "ok" if MPI and the device were there, else what went wrong.
    transfer, reduction: "ok", or what went wrong; "" if the probe did not get there.
    """

    ranks: int
    began: str
    transfer: str
    reduction: str


# --- in this process ----------------------------------------------------------------------------


def run_probe(
    openmpi: bool,
    library: Path,
    limit: float = LIMIT,
    environment: Mapping[str, str] = os.environ,
) -> ProbeOutcome:
    """Move and reduce device memory between two processes with an MPI world of their own.

    If two cannot be started, one probes alone.

    openmpi: the MPI library is Open MPI, whose own mpirun has to start them.
    library: the file of the MPI library.
    limit:   seconds.
    environment: of which they get all but the launcher's variables.
    """
    own = _without_launcher(environment)
    mpirun = _mpirun(library, own) if openmpi else None
    outcome = None
    if not openmpi:
        outcome = _run([["0", "2"], ["1", "2"]], [], 2, limit, own)
    elif mpirun is not None:
        outcome = _run([[]], [str(mpirun), "-n", "2"], 2, limit, own)
    if outcome is None or outcome.began != OK:
        alone = _run([["0", "1"]], [], 1, limit, own)
        outcome = alone if outcome is None or alone.began == OK else outcome
    return outcome


def _mpirun(library: Path, environment: dict[str, str]) -> Path | None:
    """Return the mpirun that belongs to an Open MPI library, if there is one."""
    prefix = environment.get("OPAL_PREFIX")
    folders = [Path(prefix) / "bin"] if prefix else []
    folders += [parent / "bin" for parent in library.resolve().parents]
    for folder in folders:
        for name in ("mpirun", "mpirun.openmpi"):
            path = folder / name
            if os.access(path, os.X_OK) and _is_openmpi(path, environment):
                return path
    found = shutil.which("mpirun")
    return Path(found) if found and _is_openmpi(Path(found), environment) else None


def _is_openmpi(mpirun: Path, environment: dict[str, str]) -> bool:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [mpirun, "--version"], env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=_GRACE, check=False,
        )  # fmt: skip
        return "Open MPI" in done.stdout or "Open MPI" in done.stderr
    return False


def _without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for processes with an MPI world of their own."""
    kept = {
        name: value for name, value in environment.items() if not launch.is_launcher_variable(name)
    }
    paths = [*filter(None, [kept.get("PYTHONPATH")]), str(Path(__file__).parents[2])]
    # Two processes, on however many slots; from Open MPI 5 on, and before.
    return kept | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def _run(
    places: Sequence[list[str]],
    start: list[str],
    ranks: int,
    limit: float,
    environment: dict[str, str],
) -> ProbeOutcome:
    """Run processes, one for each place, and read what they wrote."""
    with tempfile.TemporaryDirectory(prefix="mpicoll-", ignore_cleanup_errors=True) as folder:
        program = [sys.executable, "-m", __name__, folder, str(limit)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for place in places:
                processes.append(
                    subprocess.Popen(
                        [*start, *program, *place],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )
            _wait(processes, limit + _GRACE)
            codes = [process.poll() for process in processes]
        except OSError as error:
            return ProbeOutcome(ranks, str(error), "", "")
        finally:
            _end(processes)
        notes = [_read(Path(folder, f"rank-{rank}")) for rank in range(ranks)]
    verdicts = []
    for stage in ("began", *(name for name, _ in STAGES)):
        verdicts.append(_verdict(stage, notes, codes))
        if verdicts[-1] != OK:
            break
    return ProbeOutcome(ranks, *(*verdicts, "", "", "")[:3])


def _wait(processes: list[subprocess.Popen[bytes]], limit: float) -> None:
    """Wait until all have ended, the time is over, or one has failed and the others had _GRACE."""
    deadline = time.monotonic() + limit
    failed = False
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if not failed and any(process.poll() for process in processes):
            failed, deadline = True, min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.02)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End what is left; mpirun is asked first, because it ends its ranks with it."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(path: Path) -> dict[str, str]:
    """Return what a process has written: how each stage went."""
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(line.partition(" ")[::2] for line in lines)


def _verdict(stage: str, notes: list[dict[str, str]], codes: list[int | None]) -> str:
    said = [note.get(stage, "") for note in notes]
    bad = [each for each in said if each not in ("", OK)]
    if bad:
        return bad[0]
    if all(said):
        return OK
    late = (-signal.SIGALRM, 128 + signal.SIGALRM, signal.SIGALRM)
    # The one that ended by itself; the others waited for it until they were terminated.
    ended = next((code for code in codes if code not in (None, 0, *late)), None)
    if ended is None:
        return HUNG
    number = -ended if ended < 0 else ended - 128  # how mpirun reports a signal
    if number in set(signal.Signals):
        return f"crashed ({signal.Signals(number).name})"
    return f"crashed (exit code {ended})"


# --- on the ranks -------------------------------------------------------------------------------


class Place(NamedTuple):
    """A rank that tries MPI with device memory: its world, its device and a stream of that."""

    world: MPI.Intracomm
    cuda: runtime.Runtime
    number: int
    stream: int

    def fill(self, values: np.ndarray[Any, Any]) -> runtime.Memory:
        """Return device memory with those values."""
        memory = self.cuda.allocate(self.number, values.nbytes)
        host = self.cuda.allocate_pinned(self.number, values.nbytes)
        host.on_host()[...] = values.view(np.uint8)
        self.cuda.copy(self.number, memory.address, host.address, values.nbytes, self.stream)
        self.cuda.synchronize(self.cuda.record(self.number, self.stream))
        return memory

    def holds(self, memory: runtime.Memory, values: np.ndarray[Any, Any]) -> bool:
        """Return whether device memory holds those values."""
        host = self.cuda.allocate_pinned(self.number, values.nbytes)
        self.cuda.copy(self.number, host.address, memory.address, values.nbytes, self.stream)
        self.cuda.synchronize(self.cuda.record(self.number, self.stream))
        return bool(np.array_equal(host.on_host(), values.view(np.uint8)))


def _values(nbytes: int, rank: int) -> np.ndarray[Any, Any]:
    """Return float32 values whose sums over two ranks are exact."""
    return (np.arange(nbytes // 4) % 251 + 1000 * rank).astype(np.float32)


def _message(memory: runtime.Memory) -> list[Any]:
    from mpi4py import MPI

    buffer = MPI.buffer.fromaddress(memory.address, memory.nbytes)
    return [buffer, memory.nbytes // 4, MPI.FLOAT]


#: Messages that were not received, and their memory, in which MPI may still write.
_in_flight: list[Any] = []


def exchange_messages(place: Place, partners: Iterable[int], limit: float = LIMIT) -> str:
    """Exchange device memory with some ranks, which do the same, each way and of each size.

    limit: seconds for the messages of one size.

    Returns "ok", or what went wrong. Raises what MPI and CUDA raise.
    """
    world, right = place.world, True
    for nbytes in SIZES:
        send = place.fill(_values(nbytes, world.Get_rank()))
        taken = {rank: place.fill(np.full(nbytes // 4, -1, np.float32)) for rank in partners}
        requests: list[MPI.Request] = []
        _in_flight.append((send, taken, requests))
        for rank, recv in taken.items():
            requests.append(world.Irecv(_message(recv), rank))
        for rank in taken:
            requests.append(world.Isend(_message(send), rank))
        moment = time.monotonic() + limit
        while not all(request.Test() for request in requests):
            if time.monotonic() > moment:
                return HUNG
            time.sleep(1e-4)
        _in_flight.pop()
        right &= all(place.holds(recv, _values(nbytes, rank)) for rank, recv in taken.items())
    return OK if right else "moved wrong data"


def _transfer(place: Place) -> str:
    """Try messages around the ranks."""
    me, n = place.world.Get_rank(), place.world.Get_size()
    return exchange_messages(place, {(me - 1) % n, (me + 1) % n})


def _reduction(place: Place) -> str:
    """Try MPI_Allreduce, in place and not."""
    from mpi4py import MPI

    n, right = place.world.Get_size(), True
    for nbytes in SIZES:
        own = _values(nbytes, place.world.Get_rank())
        total = np.stack([_values(nbytes, rank) for rank in range(n)]).sum(0, np.float32)
        both = place.fill(own)
        place.world.Allreduce(MPI.IN_PLACE, _message(both), MPI.SUM)
        send, recv = place.fill(own), place.fill(-own)
        place.world.Allreduce(_message(send), _message(recv), MPI.SUM)
        right &= place.holds(both, total) and place.holds(recv, total)
    return OK if right else "moved wrong data"


#: The stages of a probe, in order.
STAGES: tuple[tuple[str, Callable[[Place], str]], ...] = (
    ("transfer", _transfer),
    ("reduction", _reduction),
)


def _probe(folder: Path, limit: float, rank: int | None, size: int | None) -> None:
    """Do one process's part."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit)  # the end of this process, even inside MPI
    me, stage = rank or 0, "began"

    def note(how: str) -> None:
        with Path(folder, f"rank-{me}").open("a") as file:
            file.write(f"{stage} {' '.join(how.split())}\n")

    try:
        rendezvous = None
        if rank is not None:
            method = f"file://{folder}/rendezvous"
            given = launch.read_rank(method, rank, size)
            rendezvous = launch.find_rendezvous(method, given, limit)
        with launch.start(rendezvous, limit) as world:
            me = world.Get_rank()
            cuda = runtime.get_runtime()
            index = me % cuda.count()
            cuda.use(index)
            place = Place(world, cuda, index, cuda.create_stream(index))
            world.Barrier()
        note(OK)
        for stage, test in STAGES:  # noqa: B007 (note reads it)
            how = test(place)
            everywhere = all(one == OK for one in control_messages.allgather(world, how, str))
            note(how)
            if not everywhere:
                break
    except Exception as error:
        note(f"failed: {type(error).__name__}: {error}")
        os._exit(1)  # the others are waiting


if __name__ == "__main__":
    _folder, _limit, *_place = sys.argv[1:]
    _rank, _size = map(int, _place) if _place else (None, None)
    _probe(Path(_folder), float(_limit), _rank, _size)
