"""Runs Horovod's own tests of its functions for PyTorch over mpicoll; ``make test-horovod``.

    python tests/horovod/run.py FOLDER --mpiexec MPIEXEC [options]

by a Python that has torch, pytest, cloudpickle, packaging and the MPI of MPIEXEC.

FOLDER is a checkout of Horovod, whose tests no package has:

    git clone --branch master https://github.com/horovod/horovod

Run are the files of FILES, on a CPU, in one launch each, in which ``import horovod`` gives
``mpicoll.horovod`` (worker.py); those of test/single on one rank. left_out.txt names the tests that
are left out, and why. Others may skip themselves, as those that need a GPU. With ``--again`` each
test is run between hvd.init and hvd.shutdown of its own, as Horovod runs them with Gloo; else all
are run after one hvd.init, as it runs them with MPI.

The exit code is 1 if a test fails on any rank. What the ranks printed is in
.cache/horovod.
"""

from __future__ import annotations

import argparse
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
    "test/parallel/test_adasum_pytorch.py",
    "test/parallel/test_process_sets_multi_comm.py",
    "test/parallel/test_process_sets_static.py",
    "test/parallel/test_timeline.py",
    "test/single/test_torch_elastic.py",
]
#: By test: passed, failed or skipped on any rank, and why.
Outcomes = dict[str, tuple[str, str]]
CLONE = "git clone --branch master https://github.com/horovod/horovod"


def read_left_out(ranks: int) -> dict[str, str]:
    """Return the tests that are left out on so many ranks, and why."""
    found = {}
    for line in re.sub(r"\n[ \t]+", " ", LEFT_OUT.read_text()).splitlines():
        if line and not line.startswith("#"):
            head, _, reason = line.partition(": ")
            name, *sizes = head.split()
            if not sizes or str(ranks) in sizes:
                found[name] = reason.strip()
    return found


def run(file: Path, ranks: int, arguments: argparse.Namespace) -> tuple[Outcomes, str]:
    """Run a file of tests. Return their outcomes, and what is wrong with the launch, or ""."""
    logs = LOGS / ("again" if arguments.again else "once") / str(ranks) / file.stem
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
        "TEST_HOROVOD_AGAIN": str(int(arguments.again)),
    }
    wrong = ""
    with (logs / "launch.log").open("w") as log:
        try:
            code = subprocess.run(
                command, env=environment, cwd=logs, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, timeout=arguments.timeout, check=False,
            ).returncode  # fmt: skip
            if code:
                wrong = f"mpiexec ended with {code}"
        except subprocess.TimeoutExpired:
            wrong = f"not done after {arguments.timeout} s"
    outcomes: Outcomes = {}
    for rank in range(ranks):
        file_of_rank = logs / f"rank-{rank}.json"
        if not file_of_rank.exists():  # as where -k has chosen nothing
            continue
        for name, (outcome, reason) in json.loads(file_of_rank.read_text()).items():
            if outcome == "failed" or outcomes.get(name, ("", ""))[0] != "failed":
                outcomes[name] = outcome, reason
    return outcomes, f"{wrong}: {logs.relative_to(ROOT)}" if wrong else ""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", nargs="?", help="a checkout of Horovod")
    parser.add_argument("--mpiexec", default="mpiexec", help="what starts ranks (%(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], metavar="N")
    parser.add_argument("--again", action="store_true", help="hvd.init and shutdown in each test")
    parser.add_argument("--timeout", type=int, default=600, help="seconds a file (%(default)s)")
    parser.add_argument("-k", metavar="EXPRESSION", help="which tests, as for pytest")
    parser.add_argument("--look", action="store_true", help="only look whether FOLDER is there")
    parser.add_argument("-v", "--verbose", action="store_true", help="why tests were skipped")
    arguments = parser.parse_args()
    if not arguments.folder:
        parser.error(f"give a folder (make: HOROVOD=FOLDER) with what this makes: {CLONE}")
    arguments.folder = Path(arguments.folder).resolve()
    if missing := [each for each in FILES if not (arguments.folder / each).exists()]:
        parser.error(
            f"{arguments.folder}: no {missing[0]}; expected a folder that this makes: {CLONE}"
        )
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.look:
        return 0
    failed = False
    for ranks in arguments.ranks:
        left_out, seen, whole = read_left_out(ranks), set(), not arguments.k
        for name in FILES:
            few = 1 if "/single/" in name else ranks
            outcomes, wrong = run(arguments.folder / name, few, arguments)
            seen |= outcomes.keys()
            counts = Counter(outcome for outcome, _ in outcomes.values())
            chosen = len(left_out.keys() & outcomes.keys())
            counts["skipped"] -= chosen
            cells = "".join(f"{counts[each]:5} {each}" for each in ("passed", "failed", "skipped"))
            line = f"{few} ranks {Path(name).name:<26}{cells}{chosen:5} left out {wrong}"
            print(line.rstrip(), flush=True)
            for test, (outcome, reason) in sorted(outcomes.items()):
                if outcome == "failed":
                    print(f"FAILED {test}\n{reason}")
                elif outcome == "skipped" and (arguments.verbose or test in left_out):
                    print(f"  {test}: {reason.removeprefix('Skipped: ')}")
            failed |= bool(wrong or counts["failed"])
            whole &= not wrong
        if whole and (unknown := sorted(left_out.keys() - seen)):
            print(f"WRONG  left_out.txt has what are no tests: {', '.join(unknown)}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
