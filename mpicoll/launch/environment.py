"""Read environment variables: the launcher of this process, and how MPI starts."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Literal

from mpicoll.errors import LaunchError
from mpicoll.launch import launchers
from mpicoll.launch.host_identity import job_name
from mpicoll.launch.launchers import PmiProtocol
from mpicoll.settings import ALLOW_SINGLETON

#: Set to 1 to run as a single rank although the launcher started several.
SINGLETON = ALLOW_SINGLETON.name
#: The variables that torchrun sets on each rank.
TORCH_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
#: The address of rank 0 if all ranks are on one node.
LOOPBACK = "127.0.0.1"


def is_started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun (torchelastic) started this process."""
    return "TORCHELASTIC_RUN_ID" in environment


def is_started_by_mpi(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether an MPI process manager started this process directly.

    False for torchrun's workers inside an MPI job, and for children of MPI ranks.
    """
    return (
        not is_started_by_torchrun(environment)
        and not is_inherited(environment)
        and any(launcher.protocol for launcher in launchers.find_launchers(environment))
    )


def is_inherited(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process inherited the process manager's variables from its parent."""
    if is_multiprocessing_child():
        return True
    descriptor = environment.get("PMI_FD", "")
    if not descriptor.isdigit():
        return False
    try:  # child processes usually do not inherit the PMI connection itself
        return not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode)
    except OSError:
        return True


def is_multiprocessing_child() -> bool:
    """Return whether multiprocessing started this process, and has therefore been imported."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def is_child_of_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a rank of an MPI job with several ranks started this multiprocessing child.

    The process is not a rank of that job. Only an MPI of the MPICH family can start in it.
    """
    return (
        is_multiprocessing_child()
        and not is_started_by_torchrun(environment)
        and any(_managed_size(protocol, environment) not in (None, 1) for protocol in PmiProtocol)
    )


def choose_bootstrap(
    world_size: int, openmpi: bool, environment: Mapping[str, str] = os.environ
) -> Literal["manager", "server", "single"]:
    """Return how ranks that were given their rank and world size become one MPI world.

    openmpi: the MPI library is Open MPI; else one of the MPICH family.

    "manager": by the process manager that started them; "server": by mpicoll's PMI server;
    "single": one rank, without either. A manager that announces another number of ranks is used:
    MPI then reports the mismatch. One that announces a single rank has only started a process.
    """
    protocol = PmiProtocol.PMIX if openmpi else PmiProtocol.PMI
    announced = None if is_inherited(environment) else _managed_size(protocol, environment)
    if world_size == 1:
        return "manager" if announced == 1 else "single"
    if is_started_by_torchrun(environment) or announced in (None, 1):
        return "server"
    return "manager"


def _managed_size(protocol: PmiProtocol, environment: Mapping[str, str]) -> int | None:
    """Return the world size that a process manager announces by this protocol; None without one."""
    for launcher in launchers.find_launchers(environment):
        if launcher.protocol is protocol:
            size = environment.get(launcher.size, "")
            return int(size) if size.isdigit() else None
    return None


@contextlib.contextmanager
def replace_bootstrap_variables(
    values: Mapping[str, str], protocols: Collection[PmiProtocol] = tuple(PmiProtocol)
) -> Iterator[None]:
    """Set variables and hide the variables of process managers while MPI starts.

    protocols: hide only process managers that use these protocols. All variables are restored
    afterwards, for child processes.
    """
    hidden = {
        name: os.environ.pop(name)
        for name in list(os.environ)
        if launchers.is_bootstrap_variable(name, protocols)
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
    """Set each of TORCH_VARIABLES, which many libraries read, unless the user has set it."""
    values = rank, world_size, local_rank, local_world_size, master_addr, master_port
    for name, value in zip(TORCH_VARIABLES, values, strict=True):
        if name not in environment or was_filled(name, environment):
            environment[name] = _filled[name] = str(value)


def interpreter_options() -> list[str]:
    """Return the options of this interpreter, for another one."""
    import subprocess

    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [*options, *["-u"] * getattr(sys.stdout, "write_through", False)]


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

    Needs no MPI. Omits variables whose value the launcher does not set.
    """
    launcher = launchers.find_launcher(environment)
    if launcher is None or launcher.is_batch or is_inherited(environment):
        return {}
    rank, size, is_one_node = launchers.announced(environment)
    job = launchers.find_identity(environment) or (is_one_node and job_name(environment))
    address = LOOPBACK if is_one_node else launchers.find_first_host(environment)
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
    """Return whether the variable has the value that fill_environment or ``run`` gave it."""
    return name in _filled and environment.get(name) == _filled[name]


def has_own_gpus(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher has assigned separate GPUs to each rank.

    Only the innermost launcher counts: GPUs that srun assigns to torchrun are shared by torchrun's
    workers. LOCAL_RANK set by the program means that another program started the ranks.
    """
    launcher = launchers.find_launcher(environment)
    is_inside = "LOCAL_RANK" in environment and not was_filled("LOCAL_RANK", environment)
    return launcher is not None and not is_inside and bool(environment.get(launcher.own_gpus))


def check_world(size: int, environment: Mapping[str, str] = os.environ) -> None:
    """Raise LaunchError if ``size`` is 1 but a launcher started more ranks, unless SINGLETON=1."""
    if size != 1 or environment.get(SINGLETON) == "1":
        return
    for launcher in launchers.find_launchers(environment):
        if (announced := environment.get(launcher.size)) is None:
            continue
        if announced.isdigit() and int(announced) > 1:
            raise LaunchError(
                f"init_process_group: {launcher.name} announces {announced} ranks ({launcher.size}="
                f"{announced}), but MPI sees this process alone: {launcher.remedy}. Set "
                f"{SINGLETON}=1 to run as a single rank"
            )
        return
