"""Repeat one call and check its results, with a fault on the last rank.

    LAUNCHER python tests/chaos/program.py FAULT CALL FOLDER

The fault occurs in call FAULTY of the last rank, which writes the time to FOLDER/fault. Every rank
writes its process id to FOLDER/pid-RANK, and the time of a successful end to FOLDER/end-RANK.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

#: Number of the call with the fault, and number of calls.
FAULTY, CALL_COUNT = 100, 150
#: Timeouts of groups and of initialization on a busy machine; a delay shorter than the timeout; a
#: time longer than any job.
TIMEOUT_S, INIT_TIMEOUT_S, DELAY_S, LONG_S = 4.0, 60.0, 1.5, 1000.0

#: Faults of all ranks that are set before the first call.
LIMITS = ("few open files", "no shared memory")


def limit(fault: str) -> None:
    """Limit a resource of this process."""
    if fault == "few open files":
        used = len([*Path("/proc/self/fd").iterdir()])
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, used + 12))
    else:

        def refused(*_: object) -> NoReturn:
            raise OSError(28, "No space left on device")

        os.memfd_create = refused  # type: ignore[assignment]


def main() -> None:
    fault, call_name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    import numpy as np

    import mpicoll as dist

    dist.init_process_group(timeout=INIT_TIMEOUT_S)
    if fault in LIMITS:
        limit(fault)
    n, me = dist.get_world_size(), dist.get_rank()

    def write_time(name: str) -> None:
        (folder / name).write_text(repr(time.time()))

    if fault == "SIGKILL after init" and me == n - 1:
        write_time("fault")
        os.kill(os.getpid(), signal.SIGKILL)
    group, other = dist.new_group(timeout=TIMEOUT_S), dist.new_group(timeout=TIMEOUT_S)
    (folder / f"pid-{me}").write_text(str(os.getpid()))

    def reduce(count: int, asynchronous: bool = False) -> None:
        x = np.full(count, me + 1, np.float32)
        work = dist.all_reduce(x, group=group, async_op=asynchronous)
        if work is not None:
            work.wait()
        assert (x == n * (n + 1) / 2).all(), f"a silent wrong result: {x}"

    def message() -> None:
        x, y = np.full(100, me), np.empty(100, int)
        receipt = dist.irecv(y, (me - 1) % n, group)
        dist.send(x, (me + 1) % n, group)
        receipt.wait()
        assert (y == (me - 1) % n).all(), f"a silent wrong result: {y}"

    def gather_objects() -> None:
        found: list[int] = [-1] * n
        dist.all_gather_object(found, me, group)
        assert found == [*range(n)], f"a silent wrong result: {found}"

    def broadcast(root: int = 0) -> None:
        x = np.full(1000, me)
        dist.broadcast(x, root, group)
        assert (x == root).all(), f"a silent wrong result: {x}"

    calls: dict[str, Callable[[], None]] = {
        "small": lambda: reduce(1),
        "large": lambda: reduce(1 << 20),
        "asynchronous": lambda: reduce(1000, True),
        "message": message,
        "objects": gather_objects,
        "broadcast": broadcast,
        "barrier": lambda: dist.barrier(group),
    }
    call = calls[call_name.partition(",")[0]]

    def raise_error() -> None:
        raise ValueError("the program's own")

    def pause() -> None:
        wake = f"sleep {DELAY_S}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake], stdout=subprocess.DEVNULL)
        os.kill(os.getpid(), signal.SIGSTOP)

    def raise_in_thread() -> None:
        thread = threading.Thread(target=raise_error)
        thread.start()
        thread.join()

    def raise_in_hook() -> None:
        x = np.ones(3)
        future = dist.all_reduce(x, group=other, async_op=True).get_future()
        future.then(lambda _: raise_error())
        future.wait()

    def reduce_in_order(*groups: object) -> None:
        for each in groups:
            dist.all_reduce(np.ones(5), group=each)  # type: ignore[arg-type]

    # The faulty rank's action, whether it then makes its call, and the other ranks' action.
    faults: dict[str, tuple[Callable[[], object], bool, Callable[[], object] | None]] = {
        "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), False, None),
        "SIGSEGV": (lambda: ctypes.string_at(0), False, None),
        "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), True, None),
        "exit": (lambda: os._exit(3), False, None),
        "sys.exit": (lambda: sys.exit(3), False, None),
        "SIGSTOP": (lambda: os.kill(os.getpid(), signal.SIGSTOP), False, None),
        "a pause": (pause, True, None),
        "an exception before": (raise_error, False, None),
        "an exception after": (lambda: (call(), raise_error()), False, None),
        "an exception in a hook": (raise_in_hook, True,
                                   lambda: dist.all_reduce(np.ones(3), group=other)),
        "an exception in a thread": (raise_in_thread, True, None),
        "a bad argument": (lambda: dist.all_reduce("x", group=group), False, None),
        "late": (lambda: time.sleep(DELAY_S), True, None),
        "never": (lambda: time.sleep(LONG_S), False, None),
        "another call": (lambda: dist.all_gather_object([None] * n, me, group), False, None),
        "another root": (lambda: dist.broadcast(np.ones(9), 1, group), False,
                         lambda: dist.broadcast(np.ones(9), 0, group)),
        "another order of groups": (lambda: reduce_in_order(other, group), True,
                                    lambda: reduce_in_order(group, other)),
        "destroyed early": (lambda: (dist.destroy_process_group(), time.sleep(LONG_S)), False,
                            None),
        "the launcher killed": (lambda: time.sleep(LONG_S), False, None),
        **{each: (lambda: None, True, None) for each in (*LIMITS, "SIGKILL after init")},
    }  # fmt: skip
    inject, continues, on_other_ranks = faults[fault]
    for number in range(CALL_COUNT):
        if number == FAULTY:
            if me == n - 1:
                write_time("fault")
                inject()
                if not continues:
                    continue
            elif on_other_ranks is not None:
                on_other_ranks()
                if fault == "another root":  # it replaces the call
                    continue
        call()
    write_time(f"end-{me}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
