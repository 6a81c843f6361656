"""Which devices the tests have, and by which routes calls on their arrays go.

Plainly run, simulated ones (simulated.py). On a GPU tests/gpu/run.py runs the same tests, on arrays
of the libraries that TEST_MPICOLL_DEVICES names (tests/gpu/real.py), by the routes that
TEST_MPICOLL_ROUTES names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import simulated

from mpicoll.cuda import capabilities, runtime
from mpicoll.routes.device import user_buffers

LIBRARIES = os.environ.get("TEST_MPICOLL_DEVICES", "simulated").split(",")
#: There is no GPU.
SIMULATED = LIBRARIES == ["simulated"]


def routes(*names: str) -> list[str]:
    """Those that TEST_MPICOLL_ROUTES names, else these; "auto": the one that mpicoll chooses."""
    return os.environ.get("TEST_MPICOLL_ROUTES", ",".join(names)).split(",")


@contextlib.contextmanager
def devices(library: str) -> Iterator[Any]:
    """In here this process has devices; gives where arrays come from, an ``Arrays``."""
    with pytest.MonkeyPatch.context() as patch:
        if library == "simulated":
            made: Any = simulated.Arrays()
            patch.setattr(runtime, "_runtime", made.cuda)
            patch.setenv("MPICOLL_CUDA_AWARE", "full")  # in truth it is the host's memory
        else:
            import real

            made = real.Arrays(library)
        yield made
    # Where no device can write late any more, what was kept for that can go.
    user_buffers._left_behind.clear()
    user_buffers._in_use.clear()


@contextlib.contextmanager
def forced(route: str) -> Iterator[None]:
    """In here calls of new groups take a route."""
    with pytest.MonkeyPatch.context() as patch:
        if route == "auto":
            patch.delenv("MPICOLL_DEVICE_ROUTE", raising=False)
        else:
            patch.setenv("MPICOLL_DEVICE_ROUTE", route)
        patch.setattr(capabilities, "_known", None)
        yield
