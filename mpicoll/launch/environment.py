"""Decisions by environment variables: which launcher started this process, and how MPI starts."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import multiprocessing
import os
import stat
import sys
from collections.abc import Collection, Iterator, Mapping, MutableMapping

from mpicoll.errors import LaunchError
from mpicoll.launch import launchers
from mpicoll.launch.host_identity import addresses
from mpicoll.launch.launchers import Dialect
from mpicoll.launch.pmi import PmiClient, PmiError
from mpicoll.settings import ALLOW_SINGLETON

__all__ = [
    "LOOPBACK",
    "RUN_OPTION",
    "SINGLETON",
    "TORCH_VARIABLES",
    "Bootstrap",
    "check_world",
    "choose_bootstrap",
    "fill_environment",
    "find_torch_variables",
    "has_own_gpus",
    "is_child_of_rank",
    "is_inherited",
    "is_started_by_mpi",
    "is_started_by_torchrun",
    "replace_bootstrap_variables",
    "was_filled",
]

#: Set to 1 to run a single rank on purpose where a launcher has announced more.
SINGLETON = ALLOW_SINGLETON.name
#: The variables that torchrun sets on each rank.
TORCH_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
#: The address of rank 0 if all ranks are on one node.
LOOPBACK = "127.0.0.1"


def is_started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether torchrun (torchelastic) started this process."""
    return "TORCHELASTIC_RUN_ID" in environment


def is_started_by_mpi(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether a process manager of MPI started this process itself.

    It did not start torchrun's workers inside its job, nor children of its ranks.
    """
    return (
        not is_started_by_torchrun(environment)
        and not is_inherited(environment)
        and any(launcher.dialect for launcher in launchers.find_launchers(environment))
    )


def is_inherited(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether a process manager's variables were meant for a parent of this process."""
    if multiprocessing.parent_process() is not None:
        return True
    descriptor = environment.get("PMI_FD", "")
    if not descriptor.isdigit():
        return False
    try:  # a rank seldom passes the connection to its manager on to its children
        return not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode)
    except OSError:
        return True


def is_child_of_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether one of several ranks of MPI's launcher started this process by multiprocessing.

    It is no rank of that job, and only a library of the MPICH family could give it a world.
    """
    return (
        multiprocessing.parent_process() is not None
        and not is_started_by_torchrun(environment)
        and any(_managed_size(dialect, environment) not in (None, 1) for dialect in Dialect)
    )


class Bootstrap(enum.Enum):
    """How the ranks of a job become one MPI world."""

    MANAGER = "through the process manager of MPI that started them"
    SERVER = "through a rendezvous, and a server of ours as their process manager"
    SINGLETON = "there is one rank"


def choose_bootstrap(
    world_size: int,
    openmpi: bool,
    environment: Mapping[str, str] = os.environ,
    inherited: bool = False,
) -> Bootstrap:
    """Choose for ranks that know their rank and the size of their world.

    openmpi:   the MPI library is Open MPI; else it is one of the MPICH family.
    inherited: a process manager's variables mean nothing here, see ``is_inherited``.

    A manager that announces another number of ranks is believed: MPI then reports the mismatch.
    One that announces a single rank only started something on a node.
    """
    dialect = Dialect.PMIX if openmpi else Dialect.PMI
    announced = None if inherited else _managed_size(dialect, environment)
    if world_size == 1:
        return Bootstrap.MANAGER if announced == 1 else Bootstrap.SINGLETON
    if is_started_by_torchrun(environment) or announced in (None, 1):
        return Bootstrap.SERVER
    return Bootstrap.MANAGER


def _managed_size(dialect: Dialect, environment: Mapping[str, str]) -> int | None:
    """Return the size of the world that a process manager announces in this dialect, if any."""
    for launcher in launchers.find_launchers(environment):
        if launcher.dialect is dialect:
            size = environment.get(launcher.size, "")
            return int(size) if size.isdigit() else None
    return None


@contextlib.contextmanager
def replace_bootstrap_variables(
    values: Mapping[str, str], dialects: Collection[Dialect] = tuple(Dialect)
) -> Iterator[None]:
    """Set these variables, and hide those of process managers that speak so, while MPI starts.

    Afterwards all are as before, for processes that this one starts.
    """
    hidden = {
        name: os.environ.pop(name)
        for name in list(os.environ)
        if launchers.is_bootstrap_variable(name, dialects)
    }
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(hidden)


def fill_environment(
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    master_addr: str,
    master_port: int | str,
    environment: MutableMapping[str, str] = os.environ,
) -> None:
    """Set TORCH_VARIABLES, which many libraries read, where they are missing, or were filled in
    before.
    """
    values = rank, world_size, local_rank, local_world_size, master_addr, master_port
    for name, value in zip(TORCH_VARIABLES, values, strict=True):
        if name not in environment or was_filled(name, environment):
            environment[name] = _filled[name] = str(value)


#: The -X option with which ``python -m mpicoll run`` starts the interpreter of a script. Its value
#: lists the variables that the command has set: NAME=VALUE,NAME=VALUE. Child processes do not
#: inherit the option.
RUN_OPTION = "mpicoll_run"

#: The variables that fill_environment or ``python -m mpicoll run`` has set.
_filled: dict[str, str] = {}
if isinstance(_option := sys._xoptions.get(RUN_OPTION), str):
    _filled.update(pair.partition("=")[::2] for pair in _option.split(","))


def find_torch_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return TORCH_VARIABLES with torchrun's meaning, from the launcher's variables.

    Needs no MPI. A variable is missing if the launcher does not set its value. Without a launcher
    all are missing. On several nodes every rank must call if the launcher has PMI-1, because the
    ranks exchange the address of rank 0.
    """
    launcher = launchers.find_launcher(environment)
    if launcher is None or launcher.is_batch or is_inherited(environment):
        return {}
    rank, size, is_one_node = launchers.announced(environment)
    job = launchers.find_identity(environment)
    address = LOOPBACK if is_one_node else launchers.find_first_host(environment)
    descriptor = environment.get("PMI_FD", "")
    if launcher.has_pmi_1 and not (job and address) and descriptor.isdigit():
        with contextlib.suppress(PmiError):
            manager = PmiClient(int(descriptor))
            job = job or manager.job
            if not address:
                own = environment.get("MASTER_ADDR") or addresses()[0]
                address = manager.broadcast(own, rank == "0")
    local = launchers.find_local_rank(environment), launchers.find_local_size(environment)
    values = rank, size, *local, address, _choose_port(job) if job else None
    found = zip(TORCH_VARIABLES, values, strict=True)
    return {name: str(value) for name, value in found if value not in (None, "", "?")}


def _choose_port(job: str) -> int:
    """Return a port from 16384 to 32767, the same on all ranks of a job.

    Linux assigns ephemeral ports from 32768 up, so that these rarely collide.
    """
    return 1 << 14 | int.from_bytes(hashlib.sha256(job.encode()).digest()[:2], "big") >> 2


def was_filled(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the variable has the value that fill_environment or ``run`` gave it."""
    return name in _filled and environment.get(name) == _filled[name]


def has_own_gpus(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the launcher has given each rank GPUs of its own.

    The innermost one: what srun gives a torchrun is for all of its workers. So is what it gives any
    other program that starts ranks of its own, as LOCAL_RANK tells.
    """
    launcher = launchers.find_launcher(environment)
    is_inside = "LOCAL_RANK" in environment and not was_filled("LOCAL_RANK", environment)
    return launcher is not None and not is_inside and bool(environment.get(launcher.own_gpus))


def check_world(size: int, environment: Mapping[str, str] = os.environ) -> None:
    """Raise LaunchError where a launcher started several ranks and MPI sees only this one."""
    if size != 1 or environment.get(SINGLETON) == "1":
        return
    present = launchers.find_launchers(environment)
    launcher = next((each for each in present if each.size in environment), None)
    if launcher is None:
        return
    announced = environment[launcher.size]
    if announced.isdigit() and int(announced) > 1:
        raise LaunchError(
            f"init_process_group: {launcher.name} announces {announced} ranks ({launcher.size}="
            f"{announced}), but MPI sees this process alone: {launcher.remedy}. "
            f"{SINGLETON}=1 runs a single rank all the same"
        )
