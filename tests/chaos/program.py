"""One rank of a job to which something happens: calls of one way, over and over, each checked.

    LAUNCHER python tests/chaos/program.py FAULT WAY FOLDER

The last rank is the one that it happens to, in its CALLS-th call. It writes into FOLDER what time
it is then, and every rank its process id at the beginning and the time at its good end.
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

#: The call in which it happens, and how many there are.
FAULTY, CALLS = 100, 150
#: Seconds: the timeout of groups, and of the beginning, which takes its time on a busy machine; a
#: delay that all wait for, and "for ever".
TIMEOUT, BEGINNING, DELAY, LONG = 4.0, 60.0, 1.5, 1000.0

#: What happens before the first call: to the process, not to a call.
LIMITS = ("few open files", "no shared memory")


def limit(fault: str) -> None:
    """Take something from this process that a call may want."""
    if fault == "few open files":
        used = len([*Path("/proc/self/fd").iterdir()])
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, used + 12))
    else:

        def refused(*_: object) -> NoReturn:
            raise OSError(28, "No space left on device")

        os.memfd_create = refused  # type: ignore[assignment]


def main() -> None:
    fault, way, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    import numpy as np

    import mpicoll as dist

    dist.init_process_group(timeout=BEGINNING)
    if fault in LIMITS:
        limit(fault)
    n, me = dist.get_world_size(), dist.get_rank()
    if fault == "SIGKILL after init" and me == n - 1:
        (folder / "fault").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    group, other = dist.new_group(timeout=TIMEOUT), dist.new_group(timeout=TIMEOUT)
    (folder / f"pid-{me}").write_text(str(os.getpid()))

    def mark(name: str) -> None:
        (folder / name).write_text(repr(time.time()))

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

    ways: dict[str, Callable[[], None]] = {
        "small": lambda: reduce(1),
        "large": lambda: reduce(1 << 20),
        "asynchronous": lambda: reduce(1000, True),
        "message": message,
        "objects": gather_objects,
        "broadcast": broadcast,
        "barrier": lambda: dist.barrier(group),
    }
    call = ways[way.partition(",")[0]]

    def die() -> None:
        ctypes.string_at(0)

    def raise_it() -> None:
        raise ValueError("the program's own")

    def pause() -> None:
        wake = f"sleep {DELAY}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake], stdout=subprocess.DEVNULL)
        os.kill(os.getpid(), signal.SIGSTOP)

    def in_a_thread() -> None:
        thread = threading.Thread(target=raise_it)
        thread.start()
        thread.join()

    def in_a_hook() -> None:
        x = np.ones(3)
        future = dist.all_reduce(x, group=other, async_op=True).get_future()
        future.then(lambda _: raise_it())
        future.wait()

    def beside() -> None:
        """Make the call that the other ranks need for ``in_a_hook``."""
        dist.all_reduce(np.ones(3), group=other)

    def in_order(first: object, then: object) -> None:
        for each in (first, then):
            dist.all_reduce(np.ones(5), group=each)  # type: ignore[arg-type]

    # The faulty rank's action, whether it then makes its call, and the other ranks' action.
    happenings: dict[str, tuple[Callable[[], object], bool, Callable[[], object] | None]] = {
        "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), False, None),
        "SIGSEGV": (die, False, None),
        "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), True, None),
        "exit": (lambda: os._exit(3), False, None),
        "sys.exit": (lambda: sys.exit(3), False, None),
        "SIGSTOP": (lambda: os.kill(os.getpid(), signal.SIGSTOP), False, None),
        "a pause": (pause, True, None),
        "an exception before": (raise_it, False, None),
        "an exception after": (lambda: (call(), raise_it()), False, None),
        "an exception in a hook": (in_a_hook, True, beside),
        "an exception in a thread": (in_a_thread, True, None),
        "a bad argument": (lambda: dist.all_reduce("x", group=group), False, None),
        "late": (lambda: time.sleep(DELAY), True, None),
        "never": (lambda: time.sleep(LONG), False, None),
        "another call": (lambda: dist.all_gather_object([None] * n, me, group), False, None),
        "another root": (lambda: dist.broadcast(np.ones(9), 1, group), False,
                         lambda: dist.broadcast(np.ones(9), 0, group)),
        "another order of groups": (lambda: in_order(other, group), True,
                                    lambda: in_order(group, other)),
        "destroyed early": (lambda: (dist.destroy_process_group(), time.sleep(LONG)), False, None),
        "the launcher killed": (lambda: time.sleep(LONG), False, None),
        **{each: (lambda: None, True, None) for each in (*LIMITS, "SIGKILL after init")},
    }  # fmt: skip
    happens, goes_on, others = happenings[fault]
    in_place = fault == "another root"
    for number in range(CALLS):
        if number == FAULTY:
            if me == n - 1:
                mark("fault")
                happens()
                if not goes_on:
                    continue
            elif others is not None:
                others()
                if in_place:
                    continue
        call()
    mark(f"end-{me}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
