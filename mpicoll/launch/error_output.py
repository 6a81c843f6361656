"""The traceback of a rank that fails: with the rank on each line, without the library's frames, and
once if all ranks of the node fail alike.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

import mpicoll
from mpicoll.errors import MpicollError
from mpicoll.launch.init_timeout import job_name
from mpicoll.launch.launchers import find_launcher
from mpicoll.output import write_lines
from mpicoll.settings import DEBUG

__all__ = ["claim", "format_error", "format_stack", "print_once", "with_rank"]

_HOME = str(Path(mpicoll.__file__).parent) + os.sep
#: The files of torch's functions that call a backend, of the decorator around them, and of context
#: managers.
_WRAPPERS = (
    "torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py", "/contextlib.py",
)  # fmt: skip
#: Seconds that a rank waits for another one, which prints the same error and then ends the job.
_PRINTING_TIMEOUT_S = 10.0
_CHECK_INTERVAL_S = 0.05
#: Seconds for each lower rank that a rank leaves to them to print first, and the most in all.
_RANK_DELAY_S, _MAX_RANK_DELAY_S = 0.01, 0.2
#: Seconds that the job may need to end after the rank that prints.
_ENDING_TIMEOUT_S = 2.0


def with_rank(rank: str, text: str) -> str:
    """Put the rank in front of every line of a text. rank: "?" if it is unknown."""
    return text if rank == "?" else "\n".join(f"[rank {rank}] {x}" for x in text.split("\n"))


def format_error(error: BaseException) -> str:
    """Return the traceback of an exception.

    An error that mpicoll raises on purpose is shown without mpicoll's own frames, unless
    MPICOLL_DEBUG is set. An exception of any other kind may be a fault in mpicoll, and is shown
    with all of them.
    """
    found = traceback.TracebackException.from_exception(error, compact=True)
    if isinstance(error, (MpicollError, KeyboardInterrupt)):
        _hide(found)
    return "".join(found.format()).rstrip("\n")


def format_stack(frame: FrameType | None) -> str:
    """Return the stack of a thread, as a traceback has it, without mpicoll's own frames."""
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame))
    stack.reverse()
    return "".join(traceback.StackSummary.from_list(_visible(stack)).format())


def _hide(found: traceback.TracebackException | None) -> None:
    """Hide mpicoll's frames in an exception and in its causes."""
    while found is not None:
        found.stack = traceback.StackSummary.from_list(_visible(found.stack))
        found = found.__context__ if found.__cause__ is None else found.__cause__


def _visible(stack: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames that are neither mpicoll's nor wrappers of torch's that call mpicoll."""
    frames = list(stack)
    if os.environ.get(DEBUG.name):
        return frames
    kept: list[traceback.FrameSummary] = []
    is_hidden = False  # whether the frame below, which this one calls, is
    for frame in reversed(frames):
        is_wrapper = is_hidden and frame.filename.endswith(_WRAPPERS)
        is_hidden = frame.filename.startswith(_HOME) or is_wrapper
        if not is_hidden:
            kept.append(frame)
    return kept[::-1] or frames


# --- once for all ranks of a node -----------------------------------------------------------------


def print_once(error: BaseException, rank: str, last_words: Callable[[], list[str]]) -> None:
    """Print an exception that ends the job, unless another rank of this node prints the same one.

    last_words: returns lines to print behind it.

    If ranks raise at the same time, the lowest one most often prints. The rank that prints holds an
    abstract socket address, which the system frees when the process ends. Another rank with this
    error prints at most the place where the error was raised, and waits, because the rank that
    prints ends the job. If that takes too long, or the printing rank has ended alone, the next rank
    prints the error, so that at least one copy is printed.
    """
    name = type(error).__qualname__
    message = re.sub(r"\brank \d+ of ", "", f"{name}: {error}")
    place = _find_place(error)
    end = time.monotonic() + _PRINTING_TIMEOUT_S
    last = last_words()
    if rank != "?":
        time.sleep(min(int(rank) * _RANK_DELAY_S, _MAX_RANK_DELAY_S))
    if claim(message):
        claim(f"{message}\n{place}")
    else:
        time.sleep(_CHECK_INTERVAL_S)
        if claim(f"{message}\n{place}"):
            write_lines(with_rank(rank, f"{name} {place}: another rank prints the same error"))
        while not claim(message):
            if time.monotonic() > end:
                break
            time.sleep(_CHECK_INTERVAL_S)
        else:  # the printing rank has ended, and most often the job ends now
            time.sleep(_ENDING_TIMEOUT_S)
    write_lines("\n".join([with_rank(rank, format_error(error)), *last]))


def _find_place(error: BaseException) -> str:
    """Return where the program was when an exception was raised."""
    frames = _visible(traceback.extract_tb(error.__traceback__))
    if not frames:
        return "at an unknown place"
    frame = frames[-1]
    return f'at File "{frame.filename}", line {frame.lineno}, in {frame.name}'


#: The sockets that hold the addresses, by the text: a process keeps them until it ends.
_claims: dict[str, socket.socket] = {}


def claim(text: str) -> bool:
    """Return whether this rank is the first one of its job on this node that claims a text."""
    job = job_name()
    launcher = find_launcher()
    if job is None and launcher is not None and launcher.is_parent:
        job = f"mpicoll/{os.getppid()}"
    if job is None or text in _claims:  # without a name, nothing tells its ranks from other jobs'
        return True
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32]
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0{job}/error/{digest}")
    except OSError as error:
        claim.close()
        return error.errno != errno.EADDRINUSE
    _claims[text] = claim
    return True
