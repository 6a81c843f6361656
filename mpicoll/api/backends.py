"""Names of backends, and their availability."""

from __future__ import annotations

import importlib.util
import os
from typing import ClassVar

from mpicoll.errors import ArgumentError, UnsupportedError
from mpicoll.output import warn

__all__ = [
    "Backend", "get_default_backend_for_device", "is_available", "is_backend_available",
    "is_gloo_available", "is_mpi_available", "is_nccl_available", "is_torchelastic_launched",
    "is_ucc_available", "is_xccl_available",
]  # fmt: skip


class Backend(str):
    """Name of a backend in lower case: ``Backend("MPI") == Backend.MPI == "mpi"``.

    All backends run over MPI. "mpicoll" is the same as "mpi", for scripts that also run with
    PyTorch. "gloo" and "nccl" let existing scripts run unchanged. With "nccl", device buffers use
    NCCL if every rank has its own GPU.
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

        name: in upper or lower case.

        Returns it in lower case. Raises ArgumentError (a ValueError) unless it is a string.
        """
        if not isinstance(name, str):
            raise ArgumentError(f"Backend: expected a name, got {type(name).__name__}")
        return super().__new__(cls, name.lower())

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: object,
        extended_api: bool = False,
        devices: str | list[str] | None = None,
    ) -> None:
        """Raise UnsupportedError: every backend runs over MPI.

        name, func, extended_api, devices: as in torch.

        Raises UnsupportedError (a ValueError).
        """
        raise UnsupportedError(
            f"Backend.register_backend: {name!r}: not supported by mpicoll; register it with "
            "torch.distributed"
        )


def parse_backend(name: str | None, where: str) -> str:
    """Return the name of a backend (default "mpi"). Raises ArgumentError for an unknown one."""
    if name is None:
        return Backend.MPI
    backend = str(Backend(name))
    for part in backend.split(","):
        device, _, one = part.rpartition(":")
        if device not in ("", *Backend.default_device_backend_map) or not is_backend_available(one):
            raise ArgumentError(
                f"{where}: backend {backend!r} is not available; expected mpi or mpicoll, or gloo "
                "or nccl (which also run over MPI)"
            )
    return backend


_warned_about_options = False


def warn_about_options(pg_options: object, where: str) -> None:
    """Warn once per process that ``pg_options`` are ignored, as by torch's Gloo."""
    global _warned_about_options
    if pg_options is None or _warned_about_options:
        return
    _warned_about_options = True
    warn(
        f"{where}: pg_options ({type(pg_options).__name__}) are ignored by mpicoll; leave them "
        "out, and set the timeout with timeout="
    )


def is_available() -> bool:
    """Return True: mpicoll is always available."""
    return True


def is_mpi_available() -> bool:
    """Return whether mpi4py is installed, which backends "mpi" and "gloo" need.

    It may still fail to load an MPI library.
    """
    return importlib.util.find_spec("mpi4py") is not None


is_gloo_available = is_mpi_available


def is_nccl_available() -> bool:
    """Return whether CuPy finds a GPU and NCCL.

    backend="nccl" is accepted in any case, and runs over MPI if this is False.
    """
    from mpicoll.cuda import runtime

    try:
        return runtime.get_runtime().has_nccl()
    except UnsupportedError:
        return False


def is_ucc_available() -> bool:
    """Return False: backends "ucc" and "xccl" are not supported."""
    return False


is_xccl_available = is_ucc_available


def is_backend_available(backend: str) -> bool:
    """Return whether init_process_group accepts a backend.

    backend: name in upper or lower case.

    Returns True for "mpi", "mpicoll", "gloo" and "nccl" if mpi4py is installed, else False.
    """
    return str(backend).lower() in Backend.backend_capability and is_mpi_available()


def is_torchelastic_launched() -> bool:
    """Return whether torchrun (torchelastic) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def get_default_backend_for_device(device: object) -> str:
    """Return the name of the default backend of a device, "mpi".

    device: "cpu", "cuda", "cuda:1" or a torch.device.

    Raises ArgumentError (a ValueError) for an unsupported device.
    """
    kind = str(getattr(device, "type", device)).partition(":")[0]
    try:
        return Backend.default_device_backend_map[kind]
    except KeyError:
        raise ArgumentError(
            f"get_default_backend_for_device: device {device!r} is not supported; expected one of "
            f"{', '.join(Backend.default_device_backend_map)}"
        ) from None
