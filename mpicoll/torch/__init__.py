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

from mpicoll import launch, settings
from mpicoll.errors import ArgumentError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions

    from mpicoll.torch.backend import BackedGroup, TorchBackend
    from mpicoll.torch.group import TorchGroup

__all__ = ["NAME", "autoload", "install_as", "register"]

#: The name of the backend.
NAME = "mpicoll"
#: Environment variable with names for ``install_as``.
INSTALL_AS = settings.INSTALL_AS.name


def register() -> None:
    """Register the backend and the rendezvous ``mpi://`` with torch.distributed.

    ``import torch`` calls it; another call changes nothing.
    """
    import torch.distributed as c10d

    if not c10d.is_available() or hasattr(c10d.Backend, NAME.upper()):
        return
    from mpicoll.torch import rendezvous
    from mpicoll.torch.devices import device_types

    c10d.Backend.register_backend(NAME, _create, extended_api=True, devices=list(device_types()))
    rendezvous.register()
    if os.environ.get(INSTALL_AS):
        install_as(os.environ[INSTALL_AS])
    if launch.RUN_OPTION in sys._xoptions:
        from mpicoll.torch import aliases

        atexit.register(aliases.warn_if_unused)
        atexit.register(aliases.explain_missing_variable)


def autoload() -> None:
    """Register, without ever making ``import torch`` fail, which calls it.

    Warns about a torch that this version of mpicoll does not understand.
    """
    try:
        register()
    except Exception as error:
        import torch

        from mpicoll.torch.versions import REQUIREMENT

        warnings.warn(
            f"mpicoll cannot register with torch {torch.__version__} ({REQUIREMENT}): "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )


def install_as(names: str) -> None:
    """Make names of torch's own backends mean mpicoll, for scripts that use ``"gloo"``.

    names: "gloo", "nccl", "mpi" or several of them, separated by commas.

    Call it before init_process_group, or set MPICOLL_INSTALL_AS and leave the script unchanged. In
    names by device, such as "cpu:gloo,cuda:nccl", each of these names means mpicoll. get_backend()
    returns the name that the script used; a group's name() returns "mpicoll".

    Raises ArgumentError (a ValueError) for any other name.
    """
    valid = settings.INSTALL_AS.value({INSTALL_AS: names})
    if not valid:
        raise ArgumentError(f"install_as: expected {settings.INSTALL_AS.expected}, got {names!r}")
    from mpicoll.torch import aliases

    register()
    aliases.install(set(valid.split(",")))


def _create(
    options: _DistributedBackendOptions, pg_options: object
) -> TorchGroup | BackedGroup | TorchBackend:
    from mpicoll.torch.creation import create

    return create(options, pg_options)
