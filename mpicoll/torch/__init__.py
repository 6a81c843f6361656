"""The PyTorch backend: ``torch.distributed.init_process_group("mpicoll")`` on a stock wheel.

Importing torch registers it (an entry point of the group ``torch.backends``), so programs need not
import anything of mpicoll. MPI is loaded by init_process_group, not before.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from mpicoll import settings
from mpicoll.errors import ArgumentError

__all__ = ["NAME", "autoload", "install_as", "register"]

#: The name of the backend.
NAME = "mpicoll"
#: Environment variable: names that mpicoll serves besides its own, as ``install_as`` does.
INSTALL_AS = settings.INSTALL_AS.name


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


def install_as(name: str) -> None:
    """Lets mpicoll serve scripts that say ``backend="mpi"``, which stock wheels do not have.

    name: "mpi". Call it before init_process_group, or set MPICOLL_INSTALL_AS=mpi and leave the
    script as it is. Raises ArgumentError (a ValueError) for any other name: Gloo and NCCL are in
    the wheels, and a script that names them may rely on what only they have.
    """
    if name.lower() != "mpi":
        raise ArgumentError(
            f"install_as: expected 'mpi', got {name!r}; for other backends change the script's "
            f"init_process_group to backend={NAME!r}"
        )
    from mpicoll.torch import stand_in

    register()
    stand_in.install()


def _create(options: Any, pg_options: Any) -> Any:
    from mpicoll.torch.creation import create

    return create(options, pg_options)
