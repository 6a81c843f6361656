"""mpicoll: the API of torch.distributed over MPI, on NumPy and CuPy arrays and torch tensors.

::

    import numpy as np
    import mpicoll as dist

    dist.init_process_group()
    x = np.full(4, dist.get_rank(), np.float32)
    dist.all_reduce(x)
    dist.destroy_process_group()

Run it with ``mpirun -n 4 python script.py``. Names are resolved on first use: importing mpicoll
does not load MPI, NumPy, CuPy or torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

#: The version of the package; pyproject.toml reads it from here.
__version__ = "0.3.0.dev0"

if TYPE_CHECKING:
    from mpicoll.api.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Return a public name or ``__all__``."""
        # ``from mpicoll import core`` also calls this function.
        is_module = PathFinder.find_spec(f"mpicoll.{name}", __path__)  # noqa: F405
        if name == "__all__" or not (is_module or name.startswith("_")):
            for home in ("errors", "api.lifecycle", "api.public"):  # the last one loads NumPy
                names = _public_names(home)
                if name in names:
                    globals().update(names)
                    return names[name]
            if name == "__all__":
                return sorted(names)
        # With ``obj``, tracebacks suggest a similar name.
        module = sys.modules[__name__]
        raise AttributeError(f"module 'mpicoll' has no attribute {name!r}", name=name, obj=module)


def _public_names(home: str) -> dict[str, Any]:
    module = importlib.import_module(f"mpicoll.{home}")
    names = getattr(module, "__all__", vars(module))
    return {name: getattr(module, name) for name in names if not name.startswith("_")}


def __dir__() -> list[str]:
    return sorted({*globals(), *_public_names("api.public")})


#: Suffixes of variables that launchers set in each rank. (The table of launchers is slow to load.)
_RANK_VARIABLES = ("RANK", "RANKID", "PROCID")

# From now on, an error that ends this rank ends the job. (The node monitor, a process without
# site-packages, also has the variables of a rank, but must start fast.)
if not sys.flags.no_site and any(name.endswith(_RANK_VARIABLES) for name in os.environ):
    importlib.import_module("mpicoll.launch.exit_hooks").install_in_rank()
