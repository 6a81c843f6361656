"""Print the traceback of a failed rank with the rank on each line, without mpicoll's own frames.

An error that several ranks of a node raise is printed once.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import re
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import mpicoll
from mpicoll import processes
from mpicoll.errors import MpicollError
from mpicoll.launch.host_identity import job_name, node
from mpicoll.launch.launchers import find_launcher
from mpicoll.launch.session import current_session
from mpicoll.output import write_lines
from mpicoll.settings import DEBUG

_HOME = str(Path(mpicoll.__file__).parent) + os.sep
#: The files of torch's functions that call a backend, of the decorator around them, and of context
#: managers.
_WRAPPERS = (
    "torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py", "/contextlib.py",
)  # fmt: skip
#: Seconds that a rank waits for the rank that prints the same error and then ends the job.
_PRINTING_TIMEOUT_S = 10.0
_CHECK_INTERVAL_S = 0.05
#: Seconds that the job may need to end after the printing rank has ended.
_ENDING_TIMEOUT_S = 2.0


def with_rank(rank: str, text: str) -> str:
    """Prefix each line of a text with the rank, unless it is "?" (unknown)."""
    return text if rank == "?" else "\n".join(f"[rank {rank}] {x}" for x in text.split("\n"))


def format_error(error: BaseException) -> str:
    """Return the traceback of an exception.

    Errors that mpicoll raises on purpose are shown without mpicoll's own frames, unless
    MPICOLL_DEBUG is set.
    """
    found = traceback.TracebackException.from_exception(error, compact=True)
    if isinstance(error, (MpicollError, KeyboardInterrupt)):
        _hide(found)
    return "".join(found.format()).rstrip("\n")


def find_stack(thread: int) -> list[traceback.FrameSummary]:
    """Return the stack of a thread, outermost frame first, without mpicoll's own frames.

    thread: its threading.get_ident. Of a deep stack, the innermost 100 frames.

    The thread may be running, and CPython can crash when a frame that has just returned is asked
    for its caller. faulthandler reads all stacks while no other thread runs.
    """
    with os.fdopen(os.memfd_create("stacks", os.MFD_CLOEXEC), "r+", encoding="utf-8") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read()
    threads = re.split(r"^(?:Current t|T)hread 0x([0-9a-f]+).*\n", text, flags=re.MULTILINE)[1:]
    stacks = {int(ident, 16): stack for ident, stack in zip(*[iter(threads)] * 2, strict=True)}
    frames = re.findall(r'  File "(.*)", line (\d+) in (.*)', stacks.get(thread, ""))
    return _visible(
        traceback.FrameSummary(path, int(line), name) for path, line, name in reversed(frames)
    )


def _hide(found: traceback.TracebackException | None) -> None:
    """Remove mpicoll's frames from an exception and its causes."""
    while found is not None:
        found.stack = traceback.StackSummary.from_list(_visible(found.stack))
        found = found.__context__ if found.__cause__ is None else found.__cause__


def _visible(stack: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames without mpicoll's own and torch's wrappers that call mpicoll."""
    frames = list(stack)
    if os.environ.get(DEBUG.name):
        return frames
    kept: list[traceback.FrameSummary] = []
    is_hidden = False  # of the frame that the current frame calls
    for frame in reversed(frames):
        is_wrapper = is_hidden and frame.filename.endswith(_WRAPPERS)
        is_hidden = frame.filename.startswith(_HOME) or is_wrapper
        if not is_hidden:
            kept.append(frame)
    return kept[::-1] or frames


# --- print an error once per node -----------------------------------------------------------------


def print_once(error: BaseException, rank: str, extra_lines: Callable[[], list[str]]) -> None:
    """Print an exception that ends the job, unless another rank of this node prints the same one.

    extra_lines: returns lines to print after it.

    The first rank prints, and claims the error until its process ends. Other ranks print at most
    the location of the error and wait, because the printing rank ends the job. If it does not, the
    next rank prints the error.
    """
    name = type(error).__qualname__
    message = re.sub(r"\brank \d+ of ", "", f"{name}: {error}")
    location = _find_location(error)
    end = time.monotonic() + _PRINTING_TIMEOUT_S
    last = extra_lines()
    if claim(message):
        claim(f"{message}\n{location}")
    else:
        time.sleep(_CHECK_INTERVAL_S)
        if claim(f"{message}\n{location}"):
            write_lines(with_rank(rank, f"{name} {location}: another rank prints the same error"))
        while not claim(message):
            if time.monotonic() > end:
                break
            time.sleep(_CHECK_INTERVAL_S)
        else:  # the printing rank has ended, and usually the job ends now
            time.sleep(_ENDING_TIMEOUT_S)
    write_lines("\n".join([with_rank(rank, format_error(error)), *last]))


def _find_location(error: BaseException) -> str:
    """Return the file, line and function where an exception was raised."""
    frames = _visible(traceback.extract_tb(error.__traceback__))
    if not frames:
        return "at an unknown location"
    frame = frames[-1]
    return f'at File "{frame.filename}", line {frame.lineno}, in {frame.name}'


def claim(text: str) -> bool:
    """Return True on the first rank of this node that claims a text, and if the job is unknown."""
    job, launcher, session = job_name(), find_launcher(), current_session()
    if job is None and launcher is not None and launcher.is_parent:
        job = f"mpicoll/{os.getppid()}"
    elif job is None and session is not None:
        job = f"mpicoll/{node()}/{session.job[:16]}"
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32]
    return not job or processes.claim(f"{job}/error/{digest}")
