"""Find GPUs and CUDA's compiler on this machine.

    python tests/gpu/machine.py            whether the driver finds a GPU
    python tests/gpu/machine.py compile    compile a kernel with CuPy's NVRTC; needs no GPU
    python tests/gpu/machine.py toolkits   folders with NVRTC's library, in order of preference

Only `compile` needs CuPy.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

KERNEL = """
#include <cuda_fp16.h>
extern "C" __global__ void twice(__half *x) { *x = __hadd(*x, *x); }
"""


def find_gpus() -> tuple[int, str]:
    """Return the number of GPUs that the driver finds, and why it finds none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return 0, f"no driver ({error})"
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value, "" if count.value else f"the driver finds no GPU (CUDA error {code})"


def compile_kernel() -> None:
    """Compile a kernel with the NVRTC and the CUDA headers that CuPy finds."""
    import cupy
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(KERNEL, "twice.cu", (), ())
    folder = cupy.cuda.get_cuda_path()
    options = ("--gpu-architecture=compute_80", *([f"-I{folder}/include"] if folder else []))
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError as error:
        sys.exit(f"NVRTC, with headers of {folder}: {error}: {nvrtc.getProgramLog(program)}")
    print("NVRTC", *nvrtc.getVersion(), "compiles, with headers of", folder)


def toolkits() -> list[str]:
    """Return the folders with NVRTC's library: NVIDIA's wheels, then the system's."""
    wheels = [path for place in sys.path for path in Path(place, "nvidia").glob("*/lib")]
    places = [*wheels, *sorted(Path("/usr/local").glob("cuda*/lib64"))]
    return [str(place) for place in places if any(place.glob("libnvrtc.so*"))]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["compile"]:
            compile_kernel()
        case ["toolkits"]:
            print("\n".join(toolkits()))
        case _:
            print("GPU:", find_gpus()[1] or "found")
