"""Which devices the tests have, and by which routes calls on their arrays go.

Plainly run, simulated ones (simulated.py). On a GPU tests/gpu/run.py runs the same tests, on arrays
of the libraries that TEST_MPICOLL_DEVICES names (tests/gpu/real.py), by the routes that
TEST_MPICOLL_ROUTES names. With TEST_MPICOLL_OWN_GPU device 0 is another GPU on each rank.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import simulated

from mpicoll import launch
from mpicoll.cuda import capabilities, runtime
from mpicoll.routes.device import user_buffers

LIBRARIES = os.environ.get("TEST_MPICOLL_DEVICES", "simulated").split(",")
#: There is no GPU.
SIMULATED = LIBRARIES == ["simulated"]
#: Routes take a GPU for each rank.
OWN_GPU = bool(os.environ.get("TEST_MPICOLL_OWN_GPU"))


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
            if OWN_GPU:
                see_own_gpu_first()
            import real

            made = real.Arrays(library)
        yield made
    # Where no device can write late any more, what was kept for that can go.
    user_buffers._left_behind.clear()
    user_buffers._in_use.clear()


def see_own_gpu_first() -> None:
    """Turn the GPUs that this process sees, before it has loaded a library that looks for them."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if seen == [""]:
        listed = subprocess.check_output(["nvidia-smi", "-L"], text=True).splitlines()
        seen = [str(index) for index, _ in enumerate(filter(lambda s: s[:3] == "GPU", listed))]
    turn = (launch.find_local_rank() or 0) % len(seen)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen[turn:] + seen[:turn])


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
