"""Device memory given to MPI, tried in processes of their own, so that a crash costs nothing.

``python -m mpicoll.cuda.probe FOLDER SECONDS [RANK SIZE]`` is one such process. It writes down how
far it comes, because what goes wrong leaves no other word: libraries that take device memory for
the host's crash, hang, or move garbage.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpicoll import launch
from mpicoll.cuda import runtime

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["LAUNCHED", "ProbeOutcome", "run_probe"]

#: Seconds that the processes have: CUDA and a network file system are slow to start on.
LIMIT = 60.0
#: Seconds that the others have once one has ended badly, and that killed processes have to go.
_GRACE = 5.0
#: Bytes of the messages: one that is sent at once, one that the receiver has to ask for.
SIZES = (64, 4 * 1024 * 1024)
OK = "ok"

#: Variables of whoever launched this process, which its children must not take for theirs.
LAUNCHED = re.compile(
    "PMI2?_|PMIX_(?!MCA_)|PRTE_(?!MCA_|ALLOW_)|MPI_LOCAL|HYDI?_|HYDRA_|I_MPI_(HYDRA|INFO|PMI)"
    "|OMPI_(?!MCA_|ALLOW_)|OMPI_MCA_(orte|ess|pmix|initial_wdir|num_procs)"
    "|SLURM|PALS_|FLUX_|PBS_|LSB_|TORCHELASTIC_"
    "|((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT))$"
)


class ProbeOutcome(NamedTuple):
    """What became of a try.

    ranks:     between how many ranks.
    began:     MPI and the device were there; else what came in between.
    transfer, reduction: "ok", or what went wrong; "" where it did not come to that.
    """

    ranks: int
    began: str
    transfer: str
    reduction: str


# --- here ---------------------------------------------------------------------------------------


def run_probe(
    openmpi: bool,
    library: Path,
    limit: float = LIMIT,
    environment: Mapping[str, str] = os.environ,
) -> ProbeOutcome:
    """Moves and reduces device memory between two processes, which become a world of their own;
    where they cannot be started, in one.

    openmpi: the MPI library is Open MPI, whose own mpirun has to start them.
    library: the file of the MPI library.
    limit:   seconds.
    environment: what they get of it is all but the launcher's part.
    """
    own = _without_launcher(environment)
    mpirun = _mpirun(library, own) if openmpi else None
    trial = None
    if not openmpi:
        trial = _run([["0", "2"], ["1", "2"]], [], 2, limit, own)
    elif mpirun is not None:
        trial = _run([[]], [str(mpirun), "-n", "2"], 2, limit, own)
    if trial is None or trial.began != OK:
        alone = _run([["0", "1"]], [], 1, limit, own)
        trial = alone if trial is None or alone.began == OK else trial
    return trial


def _mpirun(library: Path, environment: dict[str, str]) -> Path | None:
    """Open MPI's mpirun that belongs to the library, if there is one."""
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
    """The environment of processes that become a world of their own."""
    kept = {name: value for name, value in environment.items() if not LAUNCHED.match(name)}
    paths = [*filter(None, [kept.get("PYTHONPATH")]), str(Path(__file__).parents[2])]
    # Two processes, wherever they find room; from Open MPI 5 on, and before.
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
    """Starts processes, one for each place, sees them end, and reads what they wrote."""
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
    """Until all have ended, or one badly and the others in vain, or the time is over."""
    deadline = time.monotonic() + limit
    failed = False
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if not failed and any(process.poll() for process in processes):
            failed, deadline = True, min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.02)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Whoever is left goes; mpirun is asked first, for it takes its ranks along."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(path: Path) -> dict[str, str]:
    """What a process has written: for each stage how it went."""
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
    # The one that ended by itself; the others waited for it until they were ended.
    ended = next((code for code in codes if code not in (None, 0, *late)), None)
    if ended is None:
        return "hung"
    number = -ended if ended < 0 else ended - 128  # mpirun's way to say so
    if number in set(signal.Signals):
        return f"crashed ({signal.Signals(number).name})"
    return f"crashed (exit code {ended})"


# --- there --------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """A rank of the trial, its device and the device's stream."""

    world: MPI.Intracomm
    cuda: runtime.Runtime
    number: int
    stream: int

    def filled(self, values: np.ndarray[Any, Any]) -> runtime.Memory:
        """Device memory that holds those values."""
        memory = self.cuda.allocate(self.number, values.nbytes)
        host = self.cuda.allocate_pinned(self.number, values.nbytes)
        host.on_host()[...] = values.view(np.uint8)
        self.cuda.copy(self.number, memory.address, host.address, values.nbytes, self.stream)
        self.cuda.synchronize(self.cuda.record(self.number, self.stream))
        return memory

    def holds(self, memory: runtime.Memory, values: np.ndarray[Any, Any]) -> bool:
        """Whether device memory holds those values."""
        host = self.cuda.allocate_pinned(self.number, values.nbytes)
        self.cuda.copy(self.number, host.address, memory.address, values.nbytes, self.stream)
        self.cuda.synchronize(self.cuda.record(self.number, self.stream))
        return bool(np.array_equal(host.on_host(), values.view(np.uint8)))


def _values(nbytes: int, rank: int) -> np.ndarray[Any, Any]:
    """float32, whose sums over two ranks are exact."""
    return (np.arange(nbytes // 4) % 251 + 1000 * rank).astype(np.float32)


def _message(memory: runtime.Memory) -> list[Any]:
    from mpi4py import MPI

    buffer = MPI.buffer.fromaddress(memory.address, memory.nbytes)
    return [buffer, memory.nbytes // 4, MPI.FLOAT]


def _transfer(place: _Place) -> bool:
    """MPI_Sendrecv around the ranks."""
    me, n = place.world.Get_rank(), place.world.Get_size()
    before, after, right = (me - 1) % n, (me + 1) % n, True
    for nbytes in SIZES:
        send = place.filled(_values(nbytes, me))
        recv = place.filled(np.full(nbytes // 4, -1, np.float32))
        place.world.Sendrecv(_message(send), after, 0, _message(recv), before, 0, None)
        right &= place.holds(recv, _values(nbytes, before))
    return right


def _reduction(place: _Place) -> bool:
    """MPI_Allreduce, in place and not."""
    from mpi4py import MPI

    n, right = place.world.Get_size(), True
    for nbytes in SIZES:
        own = _values(nbytes, place.world.Get_rank())
        total = np.stack([_values(nbytes, rank) for rank in range(n)]).sum(0, np.float32)
        both = place.filled(own)
        place.world.Allreduce(MPI.IN_PLACE, _message(both), MPI.SUM)
        send, recv = place.filled(own), place.filled(-own)
        place.world.Allreduce(_message(send), _message(recv), MPI.SUM)
        right &= place.holds(both, total) and place.holds(recv, total)
    return right


#: What is tried, in this order.
STAGES: tuple[tuple[str, Callable[[_Place], bool]], ...] = (
    ("transfer", _transfer),
    ("reduction", _reduction),
)


def _try(folder: Path, limit: float, rank: int | None, size: int | None) -> None:
    """One process's part."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit)  # the end of this process, even inside MPI
    me, stage = rank or 0, "began"

    def note(how: str) -> None:
        with Path(folder, f"rank-{me}").open("a") as file:
            file.write(f"{stage} {' '.join(how.split())}\n")

    try:
        meeting = None
        if rank is not None:
            method = f"file://{folder}/meeting"
            meeting = launch.meeting(method, launch.told(method, rank, size), limit)
        with launch.start(meeting, limit) as world:
            me = world.Get_rank()
            cuda = runtime.get_runtime()
            index = me % cuda.count()
            cuda.use(index)
            place = _Place(world, cuda, index, cuda.create_stream(index))
            world.Barrier()
        note(OK)
        for stage, test in STAGES:  # noqa: B007 (note reads it)
            right = test(place)
            everywhere = all(world.allgather(right))
            note(OK if right else "moved wrong data")
            if not everywhere:
                break
    except Exception as error:
        note(f"failed: {type(error).__name__}: {error}")
        os._exit(1)  # the others are waiting


if __name__ == "__main__":
    _folder, _limit, *_place = sys.argv[1:]
    _rank, _size = map(int, _place) if _place else (None, None)
    _try(Path(_folder), float(_limit), _rank, _size)
