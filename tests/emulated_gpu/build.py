"""Build an emulated CUDA device that runs CuPy's GPU code on the CPU.

    VENV/bin/python tests/emulated_gpu/build.py FOLDER

VENV is a virtual environment with CuPy's wheel (cupy-cuda13x or cupy-cuda12x) and the packages in
REQUIREMENTS. The script writes to FOLDER:

- libcuda.so.1: the CUDA runtime and driver functions of this folder's C files;
- libcudart.so.13: loads libcuda.so.1 in place of the CUDA runtime that torch is linked to;
- site/: the wheel's packages, with the module cupy_backends.cuda.api.runtime rebuilt from CuPy's
  source distribution and linked to libcuda.so.1 instead of the static CUDA runtime;
- env.sh: the environment variables for a shell, e.g. `. FOLDER/env.sh && VENV/bin/python ...`;
- kernels/ and cupy/: caches of compiled kernels.

The source distribution comes from the package index that pip uses. Steps whose inputs have not
changed are skipped.
"""

from __future__ import annotations

import hashlib
import html
import io
import os
import re
import shutil
import ssl
import subprocess
import sys
import sysconfig
import tarfile
import urllib.parse
import urllib.request
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
SITE = Path(sysconfig.get_path("purelib"))
REQUIREMENTS = ("cython", "nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-nvrtc")
PACKAGES = ("cupy", "cupyx", "cupy_backends")
MODULE = "cupy_backends/cuda/api/runtime"
#: CUDA version of the API that the emulated device implements.
CUDA_VERSION = 13020
CFLAGS = (
    "-O2", "-g", "-Wall", "-Wextra", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden",
    "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic",
)  # fmt: skip
#: The wheel nvidia-cuda-runtime lacks the header cuda_profiler_api.h.
PROFILER_HEADER = """#include <cuda_runtime_api.h>
extern "C" cudaError_t cudaProfilerStart(void), cudaProfilerStop(void);
"""
#: A missing function prints its name and returns 801 (cudaErrorNotSupported).
STUB = """#include <stdio.h>

#define STUB(name)                                                                       \\
    __attribute__((visibility("default"))) int name(void)                                \\
    {                                                                                    \\
        fprintf(stderr, "emulated GPU: the function " #name " is not implemented\\n");    \\
        return 801;                                                                      \\
    }

"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command and return its output. Exit with the output if the command fails."""
    arguments = [str(each) for each in command]
    done = subprocess.run(
        arguments, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nexit code {done.returncode}: {' '.join(arguments)}")
    return done.stdout


def run_step(stamp: Path, make: Callable[[], None], *inputs: object) -> None:
    """Call a function unless it was called with these inputs before. Files count by contents."""
    contents = [each.read_bytes() if isinstance(each, Path) else each for each in inputs]
    digest = hashlib.sha256(repr(contents).encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        make()
        stamp.write_text(digest)


def cupy_version() -> str:
    for each in metadata.distributions():
        if each.metadata["Name"] in ("cupy-cuda13x", "cupy-cuda12x"):
            return each.version
    sys.exit(f"{SITE} has no CuPy: pip install 'cupy-cuda13x[ctk]'")


def cuda_headers() -> Path:
    places = [*SITE.glob("nvidia/cu*/include"), Path("/usr/local/cuda/include")]
    for place in places:
        if (place / "cuda_runtime_api.h").exists() and (place / "crt/host_defines.h").exists():
            return place
    sys.exit(f"no CUDA headers: {sys.executable} -m pip install {' '.join(REQUIREMENTS)}")


def fetch(url: str) -> bytes:
    """Return the contents of a URL."""
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
    request = urllib.request.Request(url, headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=120, context=context) as answer:
        found: bytes = answer.read()
        return found


def download(source: Path) -> None:
    """Download and unpack CuPy's backends in the version of the wheel."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    done = subprocess.run(command, capture_output=True, text=True)
    index = os.environ.get("PIP_INDEX_URL") or done.stdout.strip() or "https://pypi.org/simple"
    page = f"{index.rstrip('/')}/cupy/"
    links = re.findall(r'<a [^>]*href="([^"]+)"', fetch(page).decode())
    link = next((one for one in links if f"/{source.name}.tar.gz" in one), None)
    if link is None:
        sys.exit(f"{page} has no {source.name}.tar.gz")
    address, _, checksum = urllib.parse.urljoin(page, html.unescape(link)).partition("#sha256=")
    archive = fetch(address)
    if checksum and hashlib.sha256(archive).hexdigest() != checksum:
        sys.exit(f"{address}: the checksum differs from the index")
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        wanted = [one for one in members if one.name.startswith(f"{source.name}/cupy_backends/")]
        members.extractall(source.parent, wanted, filter="data")


def write_stubs(source: Path, cuda: Path, output: Path, sources: list[Path]) -> None:
    """Write a C file with stubs of the functions of the runtime, and of the driver functions that
    CuPy loads, that C files lack.
    """
    runtime, driver, module = (
        (source / "cupy_backends/cuda/api" / name).read_text()
        for name in ("_runtime_extern.pxi", "_driver_extern.pxi", "runtime.pyx")
    )
    loaded = re.findall(r"_L\.get\(f?'(\w+)(\{version\})?'\)", driver)
    declared = (cuda / "cuda_runtime_api.h").read_text()
    needed = {
        *re.findall(r"\bint (cuda\w+)\(", runtime + module),
        *re.findall(r"^extern .*\bcudaError_t CUDARTAPI (cuda\w+)\(", declared, re.MULTILINE),
        *(f"cu{name}{'_v2' if version else ''}" for name, version in loaded),
    }
    text = "".join(file.read_text() for file in sources)
    defined = re.findall(r"^EXPORT [\w *]*?\b(cu\w+)\(", text, re.MULTILINE)
    output.write_text(STUB + "".join(f"STUB({name})\n" for name in sorted(needed - {*defined})))


def compile_module(source: Path, built: Path, cuda: Path) -> None:
    """Rebuild CuPy's module of the CUDA runtime, linked to the library."""
    values = {
        "CUPY_USE_CUDA_PYTHON": False, "CUPY_CUFFT_STATIC": False, "CUPY_CYTHON_VERSION": "3.2",
        "CUPY_CUDA_VERSION": CUDA_VERSION, "CUPY_HIP_VERSION": 0,
    }  # fmt: skip
    settings = [part for name, value in values.items() for part in ("-E", f"{name}={value}")]
    cython = (sys.executable, "-m", "cython", "--cplus", "-3")
    run(*cython, *settings, f"{MODULE}.pyx", cwd=source)
    (source / "cuda_profiler_api.h").write_text(PROFILER_HEADER)
    places = [source, source / "cupy_backends", cuda, sysconfig.get_path("include")]
    run(
        "g++", "-O1", "-w", "-fPIC", "-shared", "-std=c++17", f"-DCUPY_CUDA_VERSION={CUDA_VERSION}",
        *(f"-I{place}" for place in places), "-o", built, source / f"{MODULE}.cpp",
        built.parent / "libcuda.so.1",
    )  # fmt: skip


def link_runtime(folder: Path) -> None:
    """Build an empty library with the name and the version of the CUDA runtime's symbols."""
    name = "libcudart.so.13"
    (folder / "version.map").write_text(f"{name} {{ }};\n")
    run(
        "gcc", "-shared", f"-Wl,-soname,{name}", f"-Wl,--version-script={folder / 'version.map'}",
        "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", "-o", folder / name, folder / "libcuda.so.1",
    )  # fmt: skip


def assemble_site(site: Path, module: Path) -> None:
    """Link the wheel's packages into a folder, with the rebuilt module in place of the wheel's."""
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir()
    *linked, copied = PACKAGES
    for name in linked:
        (site / name).symlink_to(SITE / name)
    shutil.copytree(SITE / copied, site / copied)
    shutil.copy(module, site / Path(MODULE).parent)


def write_variables(folder: Path, site: Path) -> None:
    """Write the environment variables as a shell script."""
    variables = {
        "LD_LIBRARY_PATH": f"{folder}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}",
        "PYTHONPATH": f"{site}${{PYTHONPATH:+:$PYTHONPATH}}",
        "CUPY_COMPILE_WITH_PTX": "1",
        "CUPY_ACCELERATORS": "",
        "CUPY_CACHE_DIR": str(folder / "cupy"),
        "EMULATED_GPU_CACHE": str(folder / "kernels"),
        "CUDA_VISIBLE_DEVICES": "${CUDA_VISIBLE_DEVICES:-0,1}",  # there is no nvidia-smi to ask
    }
    if (SITE / "torch/lib/libtorch_cuda.so").exists():
        # torch finds its own runtime by its RPATH, unless the name is loaded.
        variables["LD_PRELOAD"] = str(folder / "libcudart.so.13")
    lines = [f'export {name}="{value}"\n' for name, value in variables.items()]
    (folder / "env.sh").write_text("".join(lines))


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder, cuda = Path(sys.argv[1]).absolute(), cuda_headers()
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    source = folder / f"cupy-{cupy_version()}"
    run_step(folder / "source.stamp", lambda: download(source), source.name)

    sources, stubs, library = sorted(HERE.glob("*.c")), folder / "stubs.c", folder / "libcuda.so.1"
    write_stubs(source, cuda, stubs, sources)
    translator = [*sorted(HERE.glob("ptx*")), HERE / "kernel.h"]
    version = hashlib.sha256(b"".join(each.read_bytes() for each in translator)).hexdigest()
    definitions = {
        "PYTHON": sys.executable, "TRANSLATOR": HERE / "ptx.py", "TRANSLATOR_VERSION": version[:16],
    }  # fmt: skip
    options = [*CFLAGS, *(f'-D{name}="{value}"' for name, value in definitions.items())]
    command = ["gcc", *options, f"-I{HERE}", f"-I{cuda}", "-o", library, *sources, stubs]
    command += ["-ldl", "-lpthread", "-lrt", "-lm"]
    inputs = options, *sources, stubs, *sorted(HERE.glob("*.h"))
    run_step(folder / "library.stamp", lambda: print(run(*command), end=""), *inputs)
    link_runtime(folder)

    (installed,) = SITE.glob(f"{MODULE}.*.so")
    module, site = folder / installed.name, folder / "site"
    names = source.name, cuda / "cuda_runtime_api.h", module.name
    run_step(folder / "module.stamp", lambda: compile_module(source, module, cuda), *names)
    run_step(folder / "site.stamp", lambda: assemble_site(site, module), str(SITE), module)
    write_variables(folder, site)
    print(f"the emulated device is ready: . {folder}/env.sh")


if __name__ == "__main__":
    main()
