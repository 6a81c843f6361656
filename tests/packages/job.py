"""Check that the installed wheel uses its compiled modules; --torch: also with PyTorch.

Rank 0 prints one line with the versions. A failed check ends the job.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicoll as dist
from mpicoll.kernels import calls, library

HOME = Path(dist.__file__).parent


def python_of_a_call() -> set[str]:
    """Return the modules of mpicoll whose Python functions a repeated call runs."""
    seen = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(HOME):
            seen.add(str(path.relative_to(HOME)))

    size = dist.get_world_size()
    array = np.zeros(4, "float32")
    for _ in range(20):
        array[:] = dist.get_rank()
        sys.setprofile(look)
        dist.all_reduce(array)
        sys.setprofile(None)
        assert (array == size * (size - 1) / 2).all(), array
        if _ < 19:
            seen.clear()
    return seen


def check_torch() -> str:
    """Sum a tensor with the backend that torch finds by its entry point."""
    import torch
    import torch.distributed

    torch.distributed.init_process_group("mpicoll")
    tensor = torch.ones(1000, dtype=torch.bfloat16)
    torch.distributed.all_reduce(tensor)
    assert (tensor == torch.distributed.get_world_size()).all(), tensor
    torch.distributed.destroy_process_group()
    return f", torch {torch.__version__}"


def main() -> None:
    assert "site-packages" in HOME.parts, f"{HOME} is not an installation"
    for name in ("_kernels", "_calls"):
        compiled = HOME / "kernels" / f"{name}.abi3.so"
        assert compiled.is_file(), f"{compiled} is missing"
    assert library.describe().startswith("compiled"), library.describe()
    assert calls.describe() == "compiled", calls.describe()
    dist.init_process_group()
    seen = python_of_a_call()
    assert seen <= {"api/collectives.py"}, f"a native call runs Python: {sorted(seen)}"
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    assert size > 1, "each rank is alone"
    torch = check_torch() if "--torch" in sys.argv else ""
    if rank == 0:
        version = MPI.Get_library_version().strip("\0 \n").splitlines()[0].split(",")[0]
        versions = f"Python {sys.version.split()[0]}, {' '.join(version.split())}{torch}"
        print(f"{size} ranks, compiled: {versions}")


if __name__ == "__main__":
    main()
