"""Remove each wait between streams, or of the host for a stream, once: a test has to fail.

    . .cache/emulated_gpu/env.sh
    python tests/gpu/removed_waits.py VENV [NAME ...]

For each row of WAITS it copies the library, replaces the line by ``pass``, and runs the row's tests
on ranks of an emulated device, on which work that is not waited for has not run. It prints the
first failed assertion, missing error or invalid access of each, and exits with 1 if a wait is not
missed. A timeout or another error does not count.

Waits that are not listed:

- torch/sparse.py, torch/works.py and Horovod's functions wait for streams of torch, whose CUDA
  wheel only ``make test-gpu-emulated-torch`` installs.
- cli/bench_calls.py: without the wait, the measured times are wrong, not the results.
- api/lifecycle.py, at exit without destroy_process_group: its tests start jobs (test_ends.py).
- peer.py, ``find_failure`` and ``close`` call the same wait, which the rows of `peer` remove.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TIMEOUT_S = 240


class Wait(NamedTuple):
    """A wait: its file, its line, and the tests that miss it, with their route.

    line: preceded by the end of the line before it, if the file has several of these lines.
    instead: replaces the line.
    """

    file: str
    line: str
    tests: str
    route: str = "ipc"
    ranks: int = 2
    instead: str = "pass"


DEVICES = "tests/gpu/test_devices.py"
STREAMS = "tests/gpu/test_streams.py"
IPC = "tests/gpu/test_ipc.py"
NCCL = "tests/gpu/test_nccl.py"
NODES = "tests/gpu/test_nodes.py"
WAITS = {
    "ipc: worker waits until arrays are ready": Wait(
        "routes/device/ipc.py", "self._wait_for({rank for rank, _ in starts} - {self.me}, READY)",
        IPC,
    ),
    "ipc: rank waits until workers are done": Wait(
        "routes/device/ipc.py", "self._wait_for(set(workers) - {self.me}, DONE)", IPC
    ),
    "call waits until the caller's earlier work is done": Wait(
        "cuda/streams.py", "self._runtime.wait(context.index, context.work, event)", DEVICES
    ),
    "caller's stream waits until a synchronous call is done": Wait(
        "cuda/streams.py", "self._make_wait(self._streams)", DEVICES
    ),
    "wait() waits until an asynchronous call is done": Wait(
        "core/work.py", 'order.join("Work.wait")', STREAMS
    ),
    "wait(timeout) waits until the device is done": Wait(
        "core/work.py", "if not poll_until(self.is_completed, moment):", STREAMS, "staged",
        instead="if False:",
    ),
    "wait() of a Future waits until the call is done": Wait(
        "core/work.py", 'point.join("Future.wait")', STREAMS
    ),
    "wait() of a Future waits until a callback's work is done": Wait(
        "core/work.py", "after.points = [point.here() for point in done.points]", STREAMS
    ),
    "callbacks wait until the call is done": Wait(
        "cuda/streams.py", "self._make_wait((stream,))", STREAMS
    ),
    "copy to another device waits until the array is ready": Wait(
        "routes/device/space.py", "home.follow(context)", DEVICES
    ),
    "caller waits until a call on another device is done": Wait(
        "routes/device/space.py", "context.follow(home)", DEVICES
    ),
    "staged: copy waits until the array is ready": Wait(
        "routes/device/staged.py", "context.after(context.to_host, context.work)", DEVICES, "staged"
    ),
    "staged: copy waits until a buffer is free": Wait(
        "routes/device/staged.py", "context.after(context.to_host, context.to_device)", DEVICES,
        "staged",
    ),
    "staged: host waits until a chunk has arrived": Wait(
        "routes/device/staged.py", "context.runtime.synchronize(here)", DEVICES, "staged"
    ),
    "staged: later work waits for copies to the host after an error": Wait(
        "routes/device/staged.py", "context.after(context.work, context.to_host)", STREAMS, "staged"
    ),
    "staged: later work waits until the result has arrived": Wait(
        "routes/device/staged.py", "context.after(context.work, context.to_device)", DEVICES,
        "staged",
    ),
    "message: copy waits until the array may be written": Wait(
        "arrays/host_staging.py", "order.enter(context)", STREAMS, "staged"
    ),
    "message: host waits until the array has arrived": Wait(
        "arrays/host_staging.py", "context.synchronize(context.work)", DEVICES, "staged"
    ),
    "message: host waits until a part has arrived": Wait(
        "arrays/host_staging.py", "context.runtime.synchronize(done[k % 2])", DEVICES, "staged"
    ),
    "direct: host waits until MPI may read": Wait(
        "routes/device/space.py", "space.synchronize()", DEVICES, "direct"
    ),
    "direct: host waits until scaled elements are ready": Wait(
        "routes/algorithms.py", "space.synchronize()", DEVICES, "direct"
    ),
    "direct: host waits until elements are copied": Wait(
        "routes/reductions.py", "scope.space.synchronize()", DEVICES, "direct"
    ),
    "direct: host waits until the results of a scan are ready": Wait(
        "routes/reductions.py", "len(ranks))\n        space.synchronize()", DEVICES, "direct"
    ),
    "direct: host waits until a chunk is combined": Wait(
        "routes/reductions.py", "may be sent.\n                space.synchronize()", DEVICES,
        "direct",
    ),
    "direct: host waits until the last chunk is combined": Wait(
        "routes/reductions.py", "then is not None:\n            space.synchronize()", DEVICES,
        "direct",
    ),
    "direct: host waits until its block of an all_gather is copied": Wait(
        "routes/moves.py", "space.synchronize()", DEVICES, "direct", ranks=3
    ),
    "probe: host waits until a message is on the device": Wait(
        "cuda/probe.py", "memory.address, host.address, values.nbytes, self.stream)\n"
        "        self.cuda.synchronize(self.cuda.record(self.number, self.stream))", NODES, "auto",
    ),
    "probe: host waits until a message is on the host": Wait(
        "cuda/probe.py", "host.address, memory.address, values.nbytes, self.stream)\n"
        "        self.cuda.synchronize(self.cuda.record(self.number, self.stream))", NODES, "auto",
    ),
    "nccl: destroy waits for calls": Wait(
        "routes/device/nccl.py", "while wait and self._failure is None and self._pending:", NCCL,
        "auto", instead="while False:",
    ),
    "destroy waits for device errors": Wait(
        "api/lifecycle.py", ")\n    group.check_device_errors(wait=True)", NCCL, "auto"
    ),
    "callbacks may use the stream that an array names": Wait(
        "cuda/streams.py", "self._make_wait(self._named)", STREAMS
    ),
    "staging buffer is replaced after its last use": Wait(
        "cuda/streams.py", "is not None:\n                self._synchronize_all()", STREAMS,
        "staged",
    ),
    "staging buffer is freed after its last use": Wait(
        "cuda/streams.py", '"""\n        self._synchronize_all()', STREAMS, "staged"
    ),
    "ipc: destroy waits before it closes mappings": Wait(
        "routes/device/ipc.py", "self.context.synchronize(self.context.work)", IPC
    ),
    "ipc: mappings over the limit are closed after their last use": Wait(
        "routes/device/mappings.py", "moment):\n                return", IPC
    ),
    "host waits for a call on arrays without a stream": Wait(
        "cuda/streams.py", "self._runtime.synchronize(event)", STREAMS
    ),
    "peer: destroy waits for calls": Wait(
        "routes/device/peer.py", "context.synchronize(context.work)", STREAMS, "peer"
    ),
    "peer: host waits for the trial call": Wait(
        "routes/device/peer.py", "_TRIED, stream)\n            context.synchronize(stream)",
        STREAMS, "peer",
    ),
    "peer: destroy waits for graphs": Wait(
        "routes/device/peer.py", "context.runtime.synchronize_device(context.index)",
        "tests/gpu/test_peer.py", "auto",
    ),
    "peer: host waits until its workspace is initialized": Wait(
        "routes/device/peer.py", "header, stream)\n        context.synchronize(stream)", STREAMS,
        "peer",
    ),
}  # fmt: skip


def first_failure(wait: Wait, venv: Path, folder: Path) -> str:
    """Run the tests without a wait; return the first failed assertion or invalid access, or ""."""
    shutil.copytree(ROOT / "mpicoll", folder / "mpicoll", ignore=shutil.ignore_patterns("__pyc*"))
    path = folder / "mpicoll" / wait.file
    text = path.read_text()
    assert text.count(wait.line) == 1, f"{wait.file}: expected one {wait.line!r}"
    path.write_text(text.replace(wait.line, re.sub(r"\S.*$", wait.instead, wait.line)))
    paths = [folder, HERE, ROOT / "tests" / "mpi", os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TEST_MPICOLL_DEVICE": "cuda",
        "TEST_MPICOLL_DEVICES": "interface" if wait.tests == DEVICES else "cupy",
        "TEST_MPICOLL_ROUTES": wait.route,
        "MPICOLL_DEVICE_ROUTE": "" if wait.route == "auto" else wait.route,
        "MPICOLL_CUDA_AWARE": "1" if wait.route == "direct" else "0",
        "TEST_MPICOLL_OWN_GPU": "1" if wait.route == "peer" else "",
    }
    command = [
        venv / "bin" / "mpiexec", "-n", wait.ranks, venv / "bin" / "python", "-m", "mpi4py", "-m",
        "pytest", "-qx", "--with-mpi", "-p", "no:cacheprovider", ROOT / wait.tests,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            ["timeout", str(TIMEOUT_S), *map(str, command)], env=variables, cwd=folder,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder / "mpicoll")
    test = re.search(r"^FAILED \S*?(test_[^-\n]+)", done.stdout, re.MULTILINE)
    error = (
        r"^E +((?:AssertionError|assert\b|Failed: DID NOT RAISE|.*IllegalAddress"
        r"|.*UnsupportedError: .*did not arrive).*)"
    )
    found = re.search(error, done.stdout, re.MULTILINE)
    if test and found:
        return f"{test[1].strip()}: {found[1]}"
    print(done.stdout[-2000:], f"exit code {done.returncode}", sep="\n")
    return ""


def main() -> int:
    """Run all rows, or the named ones."""
    venv, names = Path(sys.argv[1]).absolute(), sys.argv[2:] or list(WAITS)
    kept = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            failed = first_failure(WAITS[name], venv, Path(folder))
        print(f"{name}: {failed or 'NOT MISSED'}", flush=True)
        kept += not failed
    return 1 if kept else 0


if __name__ == "__main__":
    sys.exit(main())
