"""PyTorch's own tests of a backend as a class, as in PyTorch's test_distributed_spawn.py.

The process that runs the tests and all ranks import this module. BACKEND and WORLD_SIZE are
PyTorch's settings. Ranks are forked from a server, because PyTorch's ``spawn`` imports torch again.

On import, PyTorch's module selects tests by BACKEND, and does not know names of plug-ins. So with
BACKEND=mpicoll it is imported with BACKEND=gloo, and the name is changed before any test runs.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal import common_distributed
from torch.testing._internal.common_utils import find_free_port

BACKEND = os.environ["BACKEND"]

if BACKEND == "mpicoll":
    # Tests check these features at run time.
    for feature in "ddp", "subgroup", "plugin":
        common_distributed.DistTestCases.backend_feature[feature].add(BACKEND)
    os.environ["BACKEND"] = "gloo"
from torch.testing._internal.distributed import distributed_test  # noqa: E402

os.environ["BACKEND"] = BACKEND


class BackendName(str):
    """The name of a plug-in that is also equal to "gloo", for tests that compare it at run time."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str(self) == other or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other


distributed_test.BACKEND = BackendName(BACKEND) if BACKEND == "mpicoll" else BACKEND
# Profiler events have the name mpicoll. tests/pytorch/test_profiler.py checks them.
distributed_test.PROFILING_SUPPORTED_BACKENDS.remove("mpi")


class TestDistributed(
    distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _spawn_processes(self) -> None:
        environment = dict(os.environ)
        if BACKEND == "mpi":
            # torch passes no init_method, rank or world_size for this name.
            environment["MASTER_PORT"] = str(find_free_port())

        def process(target: Callable[..., None], args: Any, **options: Any) -> Any:
            own = {"RANK": str(args[0])} if BACKEND == "mpi" else {}
            args = (environment | own, self.log, target, *args)
            return multiprocessing.get_context("forkserver").Process(
                target=rank, args=args, **options
            )

        self._start_processes(process)

    def _init_group_test(self, **kwargs: Any) -> Any:
        if int(self.world_size) < 3:  # PyTorch never runs these tests on fewer ranks
            self.skipTest("The group is of ranks 1 and 2")
        return super()._init_group_test(**kwargs)

    #: The output file of the ranks.
    log = os.devnull

    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        super()._check_return_codes(fn, elapsed_time)
        # PyTorch checks only the first rank.
        codes = [process.exitcode for process in self.processes]
        if fn not in self.skip_return_code_checks and fn not in self.special_return_code_checks:
            assert len(set(codes)) == 1, f"the ranks ended with {codes}"


def rank(
    environment: dict[str, str], log: str, target: Callable[..., None], *args: Any, **kwargs: Any
) -> None:
    """Run a rank with the environment of the process that runs the test."""
    os.environ.update(environment)
    distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # After a failure of another rank or a timeout, PyTorch sends SIGTERM: print the stack.
    faulthandler.register(signal.SIGTERM, file=2, chain=True)
    target(*args, **kwargs)


torch.backends.cuda.matmul.allow_tf32 = False
