"""Test MPI with device memory in child processes, so that a crash does no harm.

``python -m mpicoll.cuda.probe FOLDER SECONDS [RANK SIZE]`` is one such process. It writes its
progress to a file, because failures leave no other trace: libraries that treat device memory as
host memory crash, hang, or move garbage.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpicoll.cuda import runtime
from mpicoll.cuda.probe_cache import HUNG, OK, ProbeOutcome
from mpicoll.cuda.streams import poll_until
from mpicoll.launch.launchers import without_launcher
from mpicoll.launch.rendezvous import find_rendezvous, read_rank
from mpicoll.launch.world import start_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

#: Timeout in seconds for the processes: starting CUDA from a network file system is slow.
LIMIT = 60.0
#: Seconds before the remaining processes are terminated after one has failed, and before terminated
#: processes are killed.
_GRACE_S = 5.0
#: Message sizes in bytes: an eager message, and one that waits for its receiver.
SIZES = (64, 4 * 1024 * 1024)

# --- in the calling process ---------------------------------------------------------------------


def run_probe(
    openmpi: bool,
    library: Path,
    limit: float = LIMIT,
    environment: Mapping[str, str] = os.environ,
) -> ProbeOutcome:
    """Move device memory between two child processes with their own MPI world. Return the outcome.

    If two processes cannot be started, a single one is probed.

    openmpi:     the MPI library is Open MPI, whose own mpirun must start them.
    library:     file of the MPI library.
    limit:       timeout in seconds.
    environment: environment of the processes, from which the launcher's variables are removed.
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
    """Return the mpirun that belongs to an Open MPI library, or None."""
    prefix = environment.get("OPAL_PREFIX")
    folders = [Path(prefix)] if prefix else []
    folders += library.resolve().parents
    paths = [str(one / "bin" / name) for one in folders for name in ("mpirun", "mpirun.openmpi")]
    paths += filter(None, [shutil.which("mpirun")])
    return next((Path(path) for path in paths if _is_openmpi(path, environment)), None)


def _is_openmpi(mpirun: str, environment: dict[str, str]) -> bool:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [mpirun, "--version"], env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=_GRACE_S, check=False,
        )  # fmt: skip
        return "Open MPI" in done.stdout or "Open MPI" in done.stderr
    return False


def _without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for processes with a separate MPI world."""
    # Two processes, regardless of the number of slots; variables of Open MPI 5 and later, and
    # before.
    return without_launcher(environment) | {
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def _run(
    argument_lists: Sequence[list[str]],
    start: list[str],
    ranks: int,
    limit: float,
    environment: dict[str, str],
) -> ProbeOutcome:
    """Run processes, one for each list of arguments, and return their outcome."""
    with tempfile.TemporaryDirectory(prefix="mpicoll-", ignore_cleanup_errors=True) as folder:
        program = [sys.executable, "-m", __name__, folder, str(limit)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for arguments in argument_lists:
                command = [*start, *program, *arguments]
                process = subprocess.Popen(
                    command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
                processes.append(process)
            _wait(processes, limit + _GRACE_S)
            codes = [process.poll() for process in processes]
        except OSError as error:
            return ProbeOutcome(ranks, str(error), "")
        finally:
            _end(processes)
        notes = [_read(Path(folder, f"rank-{rank}")) for rank in range(ranks)]
    began = _verdict("began", notes, codes)
    return ProbeOutcome(ranks, began, _verdict("transfer", notes, codes) if began == OK else "")


def _wait(processes: list[subprocess.Popen[bytes]], limit: float) -> None:
    """Wait until all processes have exited, the time is over, or _GRACE_S after one has failed."""
    deadline = time.monotonic() + limit
    failed = False
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if not failed and any(process.poll() for process in processes):
            failed, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
        time.sleep(0.02)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Terminate the remaining processes; mpirun first, because it terminates its ranks."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(path: Path) -> dict[str, str]:
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
    # The process that exited by itself; the other processes waited for it until they were
    # terminated.
    ended = next((code for code in codes if code not in (None, 0, *late)), None)
    if ended is None:
        return HUNG
    number = -ended if ended < 0 else ended - 128  # how mpirun reports a signal
    if number in set(signal.Signals):
        return f"crashed ({signal.Signals(number).name})"
    return f"crashed (exit code {ended})"


# --- on the ranks -------------------------------------------------------------------------------


class ProbeDevice(NamedTuple):
    """A rank that tests MPI: its world, its device and a stream of the device."""

    world: MPI.Intracomm
    cuda: runtime.Runtime
    number: int
    stream: int

    def fill(self, values: np.ndarray[Any, Any]) -> runtime.Memory:
        """Copy values to new device memory."""
        memory = self.cuda.allocate(self.number, values.nbytes)
        host = self.cuda.allocate_pinned(self.number, values.nbytes)
        host.on_host()[...] = values.view(np.uint8)
        self.cuda.copy(self.number, memory.address, host.address, values.nbytes, self.stream)
        self.cuda.synchronize(self.cuda.record(self.number, self.stream))
        return memory

    def holds(self, memory: runtime.Memory, values: np.ndarray[Any, Any]) -> bool:
        """Return whether device memory holds the values."""
        host = self.cuda.allocate_pinned(self.number, values.nbytes)
        self.cuda.copy(self.number, host.address, memory.address, values.nbytes, self.stream)
        self.cuda.synchronize(self.cuda.record(self.number, self.stream))
        return bool(np.array_equal(host.on_host(), values.view(np.uint8)))


def _values(nbytes: int, rank: int) -> np.ndarray[Any, Any]:
    """Return the test message that a rank sends."""
    return (np.arange(nbytes // 4) % 251 + 1000 * rank).astype(np.float32)


def _message(memory: runtime.Memory) -> list[Any]:
    from mpi4py import MPI

    return [MPI.buffer.fromaddress(memory.address, memory.nbytes), memory.nbytes // 4, MPI.FLOAT]


#: Messages that were not received, and their memory, to which MPI may still write.
_in_flight: list[Any] = []


def exchange_messages(place: ProbeDevice, partners: Iterable[int], limit: float = LIMIT) -> str:
    """Send device memory of each of SIZES to each partner and receive it. All partners call this.

    limit: timeout in seconds for the messages of one size.

    Returns "ok", or a description of the problem. Raises errors of MPI and CUDA.
    """
    from mpi4py import MPI

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
        all_done = partial(MPI.Request.Testall, requests)
        if not poll_until(all_done, time.monotonic() + limit):
            return HUNG
        _in_flight.pop()
        right &= all(place.holds(recv, _values(nbytes, rank)) for rank, recv in taken.items())
    return OK if right else "moved wrong data"


def _probe(folder: Path, limit: float, rank: int | None, size: int | None) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit)  # exits this process, even inside MPI
    me = rank or 0

    def note(stage: str, how: str) -> None:
        with Path(folder, f"rank-{me}").open("a") as file:
            file.write(f"{stage} {' '.join(how.split())}\n")

    stage = "began"
    try:
        rendezvous = None
        if rank is not None:
            method = f"file://{folder}/rendezvous"
            rendezvous = find_rendezvous(method, read_rank(method, rank, size), limit)
        with start_mpi(rendezvous, limit) as world:
            me = world.Get_rank()
            cuda = runtime.get_runtime()
            index = me % cuda.count()
            cuda.use(index)
            place = ProbeDevice(world, cuda, index, cuda.create_stream(index))
            world.Barrier()
            stage = "transfer"
            note("began", OK)
            n = world.Get_size()
            note(stage, exchange_messages(place, {(me - 1) % n, (me + 1) % n}))
            world.Barrier()
    except Exception as error:
        note(stage, f"failed: {type(error).__name__}: {error}")
        os._exit(1)  # the other ranks are waiting


if __name__ == "__main__":
    _folder, _limit, *_place = sys.argv[1:]
    _rank, _size = map(int, _place) if _place else (None, None)
    _probe(Path(_folder), float(_limit), _rank, _size)
