"""The names of backends, and what is available."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, ClassVar

from mpicoll.cuda import runtime
from mpicoll.errors import ArgumentError, UnsupportedError
from mpicoll.output import warn

__all__ = [
    "Backend",
    "check_device",
    "get_default_backend_for_device",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "named",
    "warn_of_options",
]


class Backend(str):
    """The name of a backend in lower case: ``Backend("MPI") == Backend.MPI == "mpi"``.

    Everything is carried by MPI. "mpicoll" means the same, as in scripts that PyTorch runs too;
    "gloo" and "nccl" are names under which existing scripts keep running; with "nccl" NCCL takes
    device buffers, where every rank has a GPU of its own.
    """

    __slots__ = ()

    UNDEFINED: ClassVar[str] = "undefined"
    MPI: ClassVar[str] = "mpi"
    MPICOLL: ClassVar[str] = "mpicoll"
    GLOO: ClassVar[str] = "gloo"
    NCCL: ClassVar[str] = "nccl"
    UCC: ClassVar[str] = "ucc"
    XCCL: ClassVar[str] = "xccl"
    FAKE: ClassVar[str] = "fake"

    backend_list: ClassVar[list[str]] = ["undefined", "gloo", "nccl", "mpi", "mpicoll"]
    default_device_backend_map: ClassVar[dict[str, str]] = {"cpu": "mpi", "cuda": "mpi"}
    backend_capability: ClassVar[dict[str, list[str]]] = {
        "mpi": ["cpu", "cuda"],
        "gloo": ["cpu", "cuda"],
        "nccl": ["cpu", "cuda"],
        "mpicoll": ["cpu", "cuda"],
    }

    def __new__(cls, name: str) -> Backend:
        """Make the name of a backend.

        name: in whatever case.

        Returns it in lower case. Raises ArgumentError (a ValueError) for what is no string.
        """
        if not isinstance(name, str):
            raise ArgumentError(f"Backend: expected a name, got {type(name).__name__}")
        return super().__new__(cls, name.lower())

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Any,
        extended_api: bool = False,
        devices: str | list[str] | None = None,
    ) -> None:
        """Refuse: everything goes over MPI, and there are no plug-ins.

        name, func, extended_api, devices: as in torch, for the message.

        Raises UnsupportedError (a ValueError).
        """
        raise UnsupportedError(
            f"Backend.register_backend: {name!r}: mpicoll takes no other backends; register it "
            "with torch.distributed"
        )


def named(name: str | None, where: str) -> str:
    """The backend asked for, "mpi" where none is; raises ArgumentError for one that is not ours."""
    if name is None:
        return Backend.MPI
    found = str(Backend(name))
    for part in found.split(","):
        device, _, one = part.rpartition(":")
        if device not in ("", *Backend.default_device_backend_map) or not is_backend_available(one):
            raise ArgumentError(
                f"{where}: backend {found!r} is not available; expected mpi or mpicoll, or gloo "
                "or nccl as names under which scripts run over MPI"
            )
    return found


def check_device(device_id: Any, where: str) -> None:
    """Raises for a ``device_id`` ("cuda:1", 1, a torch.device) that is no GPU of this process.

    It has no other use: every array says where it is.
    """
    if device_id is None:
        return
    kind, _, number = str(device_id).rpartition(":")
    if kind not in ("", "cuda") or not number.isdecimal():
        raise ArgumentError(
            f"{where}: device_id: expected the number of a GPU, or a device such as 'cuda:0', got "
            f"{device_id!r}"
        )
    try:
        count = runtime.get_runtime().count()
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}: device_id: {error}") from error
    if int(number) >= count:
        raise ArgumentError(f"{where}: device_id: expected 0 to {count - 1}, got {device_id!r}")


_warned_of_options = False


def warn_of_options(pg_options: Any, where: str) -> None:
    """Warns, once a process, that ``pg_options`` have no use, as torch's Gloo has none for them."""
    global _warned_of_options
    if pg_options is None or _warned_of_options:
        return
    _warned_of_options = True
    warn(
        f"{where}: pg_options ({type(pg_options).__name__}) have no effect on mpicoll; leave them "
        "out. The timeout is that of timeout="
    )


def is_available() -> bool:
    """Tell whether mpicoll is here.

    Returns True.
    """
    return True


def is_mpi_available() -> bool:
    """Tell whether mpi4py is installed.

    Returns True or False; which MPI library it loads, if any, shows at init_process_group.
    """
    return importlib.util.find_spec("mpi4py") is not None


def is_gloo_available() -> bool:
    """Tell whether "gloo" is a backend: a name under which host arrays go over MPI.

    Returns True where mpi4py is installed.
    """
    return is_mpi_available()


def is_nccl_available() -> bool:
    """Tell whether there are a GPU and NCCL, which CuPy finds.

    Returns True or False; backend="nccl" is taken anyway, and goes over MPI.
    """
    try:
        return runtime.get_runtime().has_nccl()
    except UnsupportedError:
        return False


def is_ucc_available() -> bool:
    """Tell whether "ucc" is a backend.

    Returns False: there is none.
    """
    return False


def is_xccl_available() -> bool:
    """Tell whether "xccl" is a backend.

    Returns False: there is none.
    """
    return False


def is_backend_available(backend: str) -> bool:
    """Tell whether init_process_group takes a backend.

    backend: its name, in whatever case.

    Returns True for "mpi", "mpicoll", "gloo" and "nccl" where mpi4py is installed, else False.
    """
    return backend.lower() in Backend.backend_capability and is_mpi_available()


def is_torchelastic_launched() -> bool:
    """Tell whether torchrun (torchelastic) started this process.

    Returns True or False.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def get_default_backend_for_device(device: Any) -> str:
    """Tell the backend of a device.

    device: "cpu", "cuda", "cuda:1" or a torch.device.

    Returns its name, "mpi".

    Raises ArgumentError (a ValueError) for a device that no backend serves.
    """
    kind = str(getattr(device, "type", device)).partition(":")[0]
    try:
        return Backend.default_device_backend_map[kind]
    except KeyError:
        raise ArgumentError(
            f"get_default_backend_for_device: no backend serves device {device!r}; expected one of "
            f"{', '.join(Backend.default_device_backend_map)}"
        ) from None
