"""Run Horovod's own tests of its PyTorch API over mpicoll; ``make test-horovod``.

    python tests/horovod/run.py FOLDER --mpiexec MPIEXEC [options]

This Python needs torch, pytest, cloudpickle, packaging and the MPI of MPIEXEC. FOLDER is a checkout
of Horovod, because no package has its tests:

    git clone --branch master https://github.com/horovod/horovod

Each file of FILES runs in its own launch, on a CPU; the files of test/single run on one rank. There
``import horovod`` imports ``mpicoll.horovod`` (worker.py). left_out.txt lists the excluded tests,
with reasons. Tests that need a GPU skip themselves. All tests of a file run after one hvd.init, as
Horovod does with MPI.

The exit code is 1 if a test fails on any rank. The output of the ranks is in .cache/horovod.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LOGS = ROOT / ".cache" / "horovod"
LEFT_OUT = HERE / "left_out.txt"
FILES = [
    "test/parallel/test_torch.py",
    "test/single/test_torch_elastic.py",
]
#: Timeout of a file.
TIMEOUT_S = 600
#: By test: passed, failed or skipped on any rank, and why.
Outcomes = dict[str, tuple[str, str]]
CLONE = "git clone --branch master https://github.com/horovod/horovod"


def read_left_out(ranks: int) -> dict[str, str]:
    """Return patterns of the tests excluded on this number of ranks, with reasons."""
    found = {}
    for line in re.sub(r"\n[ \t]+", " ", LEFT_OUT.read_text()).splitlines():
        if line and not line.startswith("#"):
            head, _, reason = line.partition(": ")
            name, *sizes = head.split()
            if not sizes or str(ranks) in sizes:
                found[name] = reason.strip()
    return found


def run(file: Path, ranks: int, arguments: argparse.Namespace) -> tuple[Outcomes, str]:
    """Run a file of tests. Return their outcomes, and the error of the launch, or ""."""
    logs = LOGS / str(ranks) / file.stem
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.iterdir():
        old.unlink()
    listed = logs / "left_out.json"
    listed.write_text(json.dumps(read_left_out(ranks)))
    command = [*shlex.split(arguments.mpiexec), "-n", str(ranks), sys.executable, "-m", "mpi4py"]
    command += [str(HERE / "worker.py"), str(logs / "rank"), str(listed), str(file)]
    if arguments.k:
        command += ["-k", arguments.k]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    error = ""
    with (logs / "launch.log").open("w") as log:
        try:
            code = subprocess.run(
                command, env=environment, cwd=logs, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, timeout=TIMEOUT_S, check=False,
            ).returncode  # fmt: skip
            if code:
                error = f"mpiexec ended with {code}"
        except subprocess.TimeoutExpired:
            error = f"timed out after {TIMEOUT_S} s"
    outcomes: Outcomes = {}
    for rank in range(ranks):
        file_of_rank = logs / f"rank-{rank}.json"
        if not file_of_rank.exists():  # for example if -k selects no test
            continue
        for name, (outcome, reason) in json.loads(file_of_rank.read_text()).items():
            if outcome == "failed" or outcomes.get(name, ("", ""))[0] != "failed":
                outcomes[name] = outcome, reason
    return outcomes, f"{error}: {logs.relative_to(ROOT)}" if error else ""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", nargs="?", help="a checkout of Horovod")
    parser.add_argument("--mpiexec", default="mpiexec", help="the launcher (%(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], metavar="N")
    parser.add_argument("-k", metavar="EXPRESSION", help="select tests, as in pytest")
    parser.add_argument("--look", action="store_true", help="only check that FOLDER exists")
    arguments = parser.parse_args()
    if not arguments.folder:
        parser.error(f"FOLDER is missing (make: HOROVOD=FOLDER). Create it with: {CLONE}")
    arguments.folder = Path(arguments.folder).resolve()
    if missing := [each for each in FILES if not (arguments.folder / each).exists()]:
        parser.error(f"{arguments.folder} has no {missing[0]}. Create the folder with: {CLONE}")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.look:
        return 0
    failed = False
    for ranks in arguments.ranks:
        left_out, seen, whole = read_left_out(ranks), set(), not arguments.k
        for name in FILES:
            used = 1 if "/single/" in name else ranks
            outcomes, error = run(arguments.folder / name, used, arguments)
            seen |= outcomes.keys()
            counts = Counter(outcome for outcome, _ in outcomes.values())
            skipped = {each for pattern in left_out for each in fnmatch.filter(outcomes, pattern)}
            excluded = len(skipped)
            counts["skipped"] -= excluded
            cells = "".join(f"{counts[each]:5} {each}" for each in ("passed", "failed", "skipped"))
            line = f"{used} ranks {Path(name).name:<26}{cells}{excluded:5} excluded {error}"
            print(line.rstrip(), flush=True)
            for test, (outcome, reason) in sorted(outcomes.items()):
                if outcome == "failed":
                    print(f"FAILED {test}\n{reason}")
                elif test in skipped:
                    print(f"  {test}: {reason.removeprefix('Skipped: ')}")
            failed |= bool(error or counts["failed"])
            whole &= not error
        if whole and (unknown := [each for each in left_out if not fnmatch.filter(seen, each)]):
            print(f"FAILED left_out.txt has unknown tests: {', '.join(unknown)}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
