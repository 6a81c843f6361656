"""The PyTorch backend: ``torch.distributed.init_process_group("mpicoll")`` on a stock wheel.

Importing torch registers it (an entry point of the group ``torch.backends``), so programs need not
import anything of mpicoll. MPI is loaded by init_process_group, not before.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from typing import Any

from mpicoll import settings
from mpicoll.errors import ArgumentError

__all__ = ["MARK", "NAME", "autoload", "install_as", "register"]

#: The name of the backend.
NAME = "mpicoll"
#: Environment variable: names that mpicoll serves besides its own, as ``install_as`` does.
INSTALL_AS = settings.INSTALL_AS.name
#: The option -X of the interpreter that runs a script for ``python -m mpicoll run``.
MARK = "mpicoll_run"


def register() -> None:
    """Registers the backend and the rendezvous ``mpi://`` with torch.distributed.

    Called by ``import torch``; calling it again changes nothing.
    """
    import torch.distributed as c10d

    if not c10d.is_available() or hasattr(c10d.Backend, NAME.upper()):
        return
    from mpicoll.torch import rendezvous
    from mpicoll.torch.devices import devices

    c10d.Backend.register_backend(NAME, _create, extended_api=True, devices=list(devices()))
    rendezvous.register()
    if os.environ.get(INSTALL_AS):
        install_as(os.environ[INSTALL_AS])
    if MARK in sys._xoptions:
        from mpicoll.torch import stand_in

        atexit.register(stand_in.tell_if_unused)


def autoload() -> None:
    """What ``import torch`` calls: registers, and never makes that import fail.

    A torch that this version of mpicoll does not understand is told by a warning.
    """
    try:
        register()
    except Exception as error:
        import torch

        from mpicoll.torch.versions import KNOWN

        warnings.warn(
            f"mpicoll cannot register with torch {torch.__version__} ({KNOWN}): "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )


def install_as(names: str) -> None:
    """Has torch's own backends of these names mean mpicoll, for scripts that say ``"gloo"``.

    names: "gloo", "nccl", "mpi" or several of them, with commas between. Call it before
    init_process_group, or set MPICOLL_INSTALL_AS and leave the script as it is. Names by device,
    as in "cpu:gloo,cuda:nccl", are mpicoll for each device whose name is installed. get_backend()
    says what the script asked for; name() of a group says who carries it.

    Raises ArgumentError (a ValueError) for any other name.
    """
    found = settings.INSTALL_AS.value({INSTALL_AS: names})
    if not found:
        raise ArgumentError(f"install_as: expected {settings.INSTALL_AS.expected}, got {names!r}")
    from mpicoll.torch import stand_in

    register()
    stand_in.install(set(found.split(",")))


def _create(options: Any, pg_options: Any) -> Any:
    from mpicoll.torch.creation import create

    return create(options, pg_options)
