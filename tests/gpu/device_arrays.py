"""Arrays and routes that run.py selects.

TEST_MPICOLL_DEVICES: array libraries (real.py). TEST_MPICOLL_ROUTES: routes; "auto" forces none. If
TEST_MPICOLL_OWN_GPU is set, device 0 is a different GPU on each rank.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import mpicoll as dist
from mpicoll.cuda import capabilities
from mpicoll.launch.launchers import find_local_rank
from mpicoll.routes.device import ipc

LIBRARIES = os.environ.get("TEST_MPICOLL_DEVICES", "cupy").split(",")
ROUTES = os.environ.get("TEST_MPICOLL_ROUTES", "auto").split(",")
#: True if each rank has its own GPU.
OWN_GPU = bool(os.environ.get("TEST_MPICOLL_OWN_GPU"))


@contextlib.contextmanager
def devices(library: str) -> Iterator[Any]:
    """Yield an ``Arrays`` of a library."""
    if OWN_GPU:
        see_own_gpu_first()
    import real

    yield real.Arrays(library)
    # No device writes to the memory kept for failed calls any more, so release it.
    ipc._left_behind.clear()
    ipc._in_use.clear()


def see_own_gpu_first() -> None:
    """Rotate CUDA_VISIBLE_DEVICES by the local rank. Call before a library initializes CUDA."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if seen == [""]:
        listed = subprocess.check_output(["nvidia-smi", "-L"], text=True).splitlines()
        seen = [str(index) for index, _ in enumerate(filter(lambda s: s[:3] == "GPU", listed))]
    turn = (find_local_rank() or 0) % len(seen)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen[turn:] + seen[:turn])


@contextlib.contextmanager
def forced(route: str) -> Iterator[None]:
    """Force a device route for groups created within the context."""
    with pytest.MonkeyPatch.context() as patch:
        if route == "auto":
            patch.delenv("MPICOLL_DEVICE_ROUTE", raising=False)
        else:
            patch.setenv("MPICOLL_DEVICE_ROUTE", route)
        patch.setattr(capabilities, "_known", None)
        yield


def check_route_is_off(route: str, reason: str, first_call: Callable[[], Any], group: Any) -> None:
    """Make a group's first call. All ranks have to use another route, and rank 0 has to warn.

    reason: pattern of the warning and of the group's reason.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first_call()
    warned = [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]
    warned = [text for text in warned if f"{route} is off" in text]
    assert len(warned) == (dist.get_rank() == 0), list(map(str, caught))
    agreed = group.resources.find("devices")
    assert route not in agreed.names
    for text in (*warned, agreed.describe()[route]):
        assert re.search(reason, text), text
