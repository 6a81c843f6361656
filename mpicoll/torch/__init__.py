"""The PyTorch backend: ``torch.distributed.init_process_group("mpicoll")`` on a stock wheel.

Importing torch registers it, by an entry point of the group ``torch.backends``, so programs need
not import mpicoll. MPI is loaded by init_process_group, not before.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from typing import TYPE_CHECKING

from mpicoll import settings
from mpicoll.errors import ArgumentError
from mpicoll.launch.environment import RUN_OPTION

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions
    from torch.distributed import ProcessGroup

    from mpicoll.torch.backend import TorchBackend

__all__ = ["NAME", "REQUIREMENT", "autoload", "install_as", "register"]

#: The name of the backend.
NAME = "mpicoll"
#: Supported versions of torch; the oldest is the same as in pyproject.toml.
REQUIREMENT = "it needs 2.11 or newer, and was tested with 2.11 and 2.13 to 2.15"
#: Environment variable with names for ``install_as``.
INSTALL_AS = settings.INSTALL_AS.name


def register() -> None:
    """Register the backend and the rendezvous ``mpi://`` with torch.distributed.

    ``import torch`` calls it. Further calls do nothing.
    """
    import torch.distributed as c10d

    if not c10d.is_available() or hasattr(c10d.Backend, NAME.upper()):
        return
    from mpicoll.torch import rendezvous
    from mpicoll.torch.internals import device_types

    c10d.Backend.register_backend(NAME, _create, extended_api=True, devices=list(device_types()))
    rendezvous.register()
    if os.environ.get(INSTALL_AS):
        install_as(os.environ[INSTALL_AS])
    if RUN_OPTION in sys._xoptions:
        from mpicoll.torch import aliases

        atexit.register(aliases.warn_if_unused)
        atexit.register(aliases.explain_missing_variable)


def autoload() -> None:
    """Register during ``import torch``. Warns instead of raising if this torch is not supported."""
    try:
        register()
    except Exception as error:
        import torch

        warnings.warn(
            f"mpicoll cannot register with torch {torch.__version__} ({REQUIREMENT}): "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )


def install_as(names: str) -> None:
    """Make names of torch's own backends select mpicoll, for scripts that use ``"gloo"``.

    names: "gloo", "nccl", "mpi" or several of them, separated by commas.

    Call it before init_process_group, or set MPICOLL_INSTALL_AS and leave the script unchanged.
    Names by device, such as "cpu:gloo,cuda:nccl", also work. get_backend() returns the name that
    the script used; ``name()`` of a group returns "mpicoll".

    Raises ArgumentError (a ValueError) for any other name.
    """
    valid = settings.INSTALL_AS.value({INSTALL_AS: names})
    if not valid:
        raise ArgumentError(f"install_as: expected {settings.INSTALL_AS.expected}, got {names!r}")
    from mpicoll.torch import aliases

    register()
    aliases.install(set(valid.split(",")))


def _create(options: _DistributedBackendOptions, pg_options: object) -> ProcessGroup | TorchBackend:
    from mpicoll.torch.creation import create

    return create(options, pg_options)
