"""Remove each wait between streams, or of the host for a stream, once: a test has to fail.

    . .cache/emulated_gpu/env.sh
    python tests/gpu/removed_waits.py VENV [NAME ...]

For each row of WAITS it copies the library, replaces the line by ``pass``, and runs the row's tests
on ranks of an emulated device, on which work that is not waited for has not run. It prints the
first failed assertion, missing error or invalid access of each. A timeout or another error does not
count, and the tests have to pass without the change.

Exits with 1 if a wait is not missed, or if the library has a call that waits (CALL) which is
neither in WAITS nor in NOT_RUN.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TIMEOUT_S = 240

#: Calls that make a stream or the host wait for the work of a device.
CALL = re.compile(
    r"(?!self\.synchronize\(\))[\w.()]*(synchronize(_\w+)?|follow|_make_wait|_wait_for|wait_event"
    r"|wait_stream|(order|point)\.(join|enter)|(runtime|cuda)\.wait|context\.after)\("
    r"|poll_until\(.*\bis_(done|completed)\b|.*\bwait=True\)"
)
#: Functions that only call them: their callers are listed.
WRAPPERS = {
    "after", "enter", "follow", "join", "synchronize", "synchronize_devices", "_make_wait",
    "_synchronize_all", "_wait_for",
}  # fmt: skip


class Wait(NamedTuple):
    """A wait: its file, the tests that miss it, its line, and the route of the tests.

    line: preceded by the end of the line before it, if the file has several of these lines.
    ranks: 0: the tests start jobs.
    instead: replaces the line.
    """

    file: str
    tests: str
    line: str
    route: str = "ipc"
    ranks: int = 2
    instead: str = "pass"


DEVICES = "tests/gpu/test_devices.py"
STREAMS = "tests/gpu/test_streams.py"
IPC = "tests/gpu/test_ipc.py"
NCCL = "tests/gpu/test_nccl.py"
NODES = "tests/gpu/test_nodes.py"
PEER = "tests/gpu/test_peer.py"
WAITS = {
    "ipc: worker waits until arrays are ready": Wait("routes/device/ipc.py", IPC,
        "self._wait_for({rank for rank, _ in starts} - {self.me}, READY)"),
    "ipc: rank waits until workers are done": Wait("routes/device/ipc.py", IPC,
        "self._wait_for(set(workers) - {self.me}, DONE)"),
    "call waits until the caller's earlier work is done": Wait("dispatch/packing.py", DEVICES,
        "order.enter(context)"),
    "caller's stream waits until a synchronous call is done": Wait("cuda/streams.py", DEVICES,
        "self._make_wait(self._streams)"),
    "wait() waits until an asynchronous call is done": Wait("core/work.py", STREAMS,
        'order.join("Work.wait")'),
    "wait(timeout) waits until the device is done": Wait("core/work.py", STREAMS,
        "if not poll_until(self.is_completed, moment):", "staged", instead="if False:"),
    "wait() of a Future waits until the call is done": Wait("core/work.py", STREAMS,
        'point.join("Future.wait")'),
    "wait() of a Future waits until a callback's work is done": Wait("core/work.py", STREAMS,
        "after.points = [point.here() for point in done.points]"),
    "callbacks wait until the call is done": Wait("cuda/streams.py", STREAMS,
        "self._make_wait((stream,))"),
    "copy to another device waits until the array is ready": Wait("routes/device/space.py", DEVICES,
        "home.follow(context)"),
    "caller waits until a call on another device is done": Wait("routes/device/space.py", DEVICES,
        "context.follow(home)"),
    "staged: copy waits until the array is ready": Wait("routes/device/staged.py", DEVICES,
        "context.after(context.to_host, context.work)", "staged"),
    "staged: copy waits until a buffer is free": Wait("routes/device/staged.py", DEVICES,
        "context.after(context.to_host, context.to_device)", "staged"),
    "staged: host waits until a chunk has arrived": Wait("routes/device/staged.py", DEVICES,
        "context.runtime.synchronize(here)", "staged"),
    "staged: later work waits for copies to the host after an error": Wait(
        "routes/device/staged.py", STREAMS, "context.after(context.work, context.to_host)",
        "staged"),
    "staged: later work waits until the result has arrived": Wait("routes/device/staged.py",
        DEVICES, "context.after(context.work, context.to_device)", "staged"),
    "message: copy waits until the array may be written": Wait("arrays/host_staging.py", STREAMS,
        "order.enter(context)", "staged"),
    "message: host waits until the array has arrived": Wait("arrays/host_staging.py", DEVICES,
        "context.synchronize(context.work)", "staged"),
    "message: host waits until a part has arrived": Wait("arrays/host_staging.py", DEVICES,
        "context.runtime.synchronize(done[k % 2])", "staged"),
    "direct: host waits until MPI may read": Wait("routes/device/space.py", DEVICES,
        "space.synchronize()", "direct"),
    "direct: host waits until scaled elements are ready": Wait("routes/algorithms.py", DEVICES,
        "space.synchronize()", "direct"),
    "direct: host waits until elements are copied": Wait("routes/reductions.py", DEVICES,
        "scope.space.synchronize()", "direct"),
    "direct: host waits until the results of a scan are ready": Wait("routes/reductions.py",
        DEVICES, "len(ranks))\n        space.synchronize()", "direct"),
    "direct: host waits until a chunk is combined": Wait("routes/reductions.py", DEVICES,
        "may be sent.\n                space.synchronize()", "direct"),
    "direct: host waits until the last chunk is combined": Wait("routes/reductions.py", DEVICES,
        "then is not None:\n            space.synchronize()", "direct"),
    "direct: host waits until its block of an all_gather is copied": Wait("routes/moves.py",
        DEVICES, "space.synchronize()", "direct", ranks=3),
    "probe: host waits until a message is on the device": Wait("cuda/probe.py", NODES,
        "memory.address, host.address, values.nbytes, self.stream)\n"
        "        self.cuda.synchronize(self.cuda.record(self.number, self.stream))", "auto"),
    "probe: host waits until a message is on the host": Wait("cuda/probe.py", NODES,
        "host.address, memory.address, values.nbytes, self.stream)\n"
        "        self.cuda.synchronize(self.cuda.record(self.number, self.stream))", "auto"),
    "nccl: destroy waits for calls": Wait("routes/device/nccl.py", NCCL,
        "while wait and self._failure is None and self._pending:", "auto", instead="while False:"),
    "destroy waits for device errors": Wait("api/lifecycle.py", PEER,
        ")\n    group.check_device_errors(wait=True)", "auto"),
    "exit waits for device errors": Wait("api/lifecycle.py", "tests/gpu/test_ends.py",
        "            group.check_device_errors(wait=True)", "auto", ranks=0),
    "callbacks may use the stream that an array names": Wait("cuda/streams.py", STREAMS,
        "self._make_wait(self._named)"),
    "staging buffer is replaced after its last use": Wait("cuda/streams.py", STREAMS,
        "is not None:\n                self._synchronize_all()", "staged"),
    "staging buffer is freed after its last use": Wait("cuda/streams.py", STREAMS,
        '"""\n        self._synchronize_all()', "staged"),
    "ipc: destroy waits before it closes mappings": Wait("routes/device/ipc.py", IPC,
        "self.context.synchronize(self.context.work)"),
    "ipc: mappings over the limit are closed after their last use": Wait(
        "routes/device/mappings.py", IPC,
        "if not poll_until(partial(self._context.runtime.is_done, event), moment):",
        instead="if False:"),
    "host waits for a call on arrays without a stream": Wait("cuda/streams.py", STREAMS,
        "self._runtime.synchronize(event)"),
    "peer: destroy waits for calls": Wait("routes/device/peer.py", STREAMS,
        "context.synchronize(context.work)", "peer"),
    "peer: host waits for the trial call": Wait("routes/device/peer.py", STREAMS,
        "_TRIED, stream)\n            context.synchronize(stream)", "peer"),
    "peer: destroy waits for errors of calls": Wait("routes/device/peer.py", PEER,
        "try:\n                self._synchronize()", "auto"),
    "peer: destroy of a failed group waits for calls": Wait("routes/device/peer.py", PEER,
        "None:\n        self._synchronize()", "auto"),
    "peer: destroy waits for graphs": Wait("routes/device/peer.py", PEER,
        "context.runtime.synchronize_device(context.index)", "auto"),
    "peer: host waits until its workspace is initialized": Wait("routes/device/peer.py", STREAMS,
        "header, stream)\n        context.synchronize(stream)", "peer"),
}  # fmt: skip


HOROVOD = "needs torch with CUDA: Horovod's functions have no test of CUDA tensors"
#: Waits that are not removed, with the reason, by file and line.
NOT_RUN = {
    ("cli/bench_calls.py", "self._cupy.cuda.get_current_stream().synchronize()"):
        "without it, times are wrong and not results",
    ("torch/works.py", 'order.join("Work.get_future")'):
        "needs torch with CUDA: make test-gpu-emulated-torch",
    ("torch/sparse.py", "stream.synchronize()"):
        "needs torch's CUDA kernels of sparse tensors, which no emulated device runs",
    ("horovod/torch/engine.py", "synchronize_devices([request])"): HOROVOD,
    ("horovod/torch/engine.py", "synchronize_devices(requests)"): HOROVOD,
}  # fmt: skip


def locate(file: str, line: str) -> tuple[str, int]:
    """Return the file and the number of a line, which may follow the end of the line before it."""
    before, *after = (ROOT / "mpicoll" / file).read_text().split(line)
    assert len(after) == 1, f"{file}: expected one {line!r}"
    return file, (before + line).count("\n") + 1


def find_calls(node: ast.AST, inside: str = "") -> Iterator[int]:
    """Yield the line of each call that waits, except inside WRAPPERS."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and CALL.match(ast.unparse(child)):
            yield child.lineno
        name = child.name if isinstance(child, ast.FunctionDef) else inside
        if name not in WRAPPERS:
            yield from find_calls(child, name)


def find_unlisted() -> list[tuple[str, int]]:
    """Return the file and line of each call that waits and is not listed."""
    library = ROOT / "mpicoll"
    found = {
        (str(path.relative_to(library)), line)
        for path in library.rglob("*.py")
        for line in find_calls(ast.parse(path.read_text()))
    }
    listed = [(wait.file, wait.line) for wait in WAITS.values()]
    return sorted(found - {locate(*each) for each in (*listed, *NOT_RUN)})


def run(wait: Wait, venv: Path, folder: Path, without: bool) -> subprocess.CompletedProcess[str]:
    """Run the tests with a copy of the library in ``folder``, ``without`` the wait."""
    shutil.copytree(ROOT / "mpicoll", folder / "mpicoll", ignore=shutil.ignore_patterns("__pyc*"))
    if without:
        path = folder / "mpicoll" / wait.file
        removed = re.sub(r"\S.*$", wait.instead, wait.line)
        path.write_text(path.read_text().replace(wait.line, removed))
    paths = [folder, HERE, ROOT / "tests" / "mpi", os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TEST_MPICOLL_DEVICE": "cuda",
        "TEST_MPICOLL_MPIEXEC": str(venv / "bin" / "mpiexec"),
        "TEST_MPICOLL_DEVICES": "interface" if wait.tests == DEVICES else "cupy",
        "TEST_MPICOLL_ROUTES": wait.route,
        "MPICOLL_DEVICE_ROUTE": "" if wait.route == "auto" else wait.route,
        "MPICOLL_CUDA_AWARE": "1" if wait.route == "direct" else "0",
        "TEST_MPICOLL_OWN_GPU": "1" if wait.route == "peer" else "",
    }
    python, mpiexec = [venv / "bin" / "python", "-m"], [venv / "bin" / "mpiexec", "-n", wait.ranks]
    command = [
        *([*mpiexec, *python, "mpi4py", "-m", "pytest", "--with-mpi"] if wait.ranks else
          [*python, "pytest"]), "-qx", "-p", "no:cacheprovider", ROOT / wait.tests,
    ]  # fmt: skip
    return subprocess.run(
        ["timeout", str(TIMEOUT_S), *map(str, command)], env=variables, cwd=folder,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip


def find_failure(output: str) -> str:
    """Return the first failed assertion, missing error or invalid access of a run, or ""."""
    test = re.search(r"^FAILED \S*?(test_[^-\n]+)", output, re.MULTILINE)
    error = (
        r"^E +((?:AssertionError|assert\b|Failed: DID NOT RAISE|.*IllegalAddress"
        r"|.*UnsupportedError: .*did not arrive).*)"
    )
    found = re.search(error, output, re.MULTILINE)
    return f"{test[1].strip()}: {found[1]}" if test and found else ""


def main() -> int:
    """Run all rows, or the named ones."""
    venv, names = Path(sys.argv[1]).absolute(), sys.argv[2:] or list(WAITS)
    unlisted, missed, passed = find_unlisted(), 0, {}
    for name in names:
        wait, failed = WAITS[name], ""
        tests = wait.tests, wait.route, wait.ranks
        for without in (False, True) if tests not in passed else (True,):
            with tempfile.TemporaryDirectory() as folder:
                done = run(wait, venv, Path(folder), without)
            if not without:
                passed[tests] = done.returncode == 0 and " passed" in done.stdout
                print(*tests, "PASS" if passed[tests] else "FAIL", "with all waits", flush=True)
            elif passed[tests]:
                failed = find_failure(done.stdout)
            if not (failed if without else passed[tests]):
                print(done.stdout[-2000:], f"exit code {done.returncode}", sep="\n")
        print(f"{name}: {failed or 'NOT MISSED'}", flush=True)
        missed += bool(failed)
    for (file, line), reason in NOT_RUN.items():
        print(f"not run: mpicoll/{file}: {line}: {reason}")
    for file, number in unlisted:
        print(f"NOT LISTED: mpicoll/{file}:{number}")
    print(f"{missed} of {len(names)} waits are missed, {len(NOT_RUN)} waits are not run here")
    return 1 if unlisted or missed < len(names) else 0


if __name__ == "__main__":
    sys.exit(main())
