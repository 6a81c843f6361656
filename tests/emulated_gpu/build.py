"""Build an emulated CUDA device that runs CuPy's GPU code on the CPU.

    python tests/emulated_gpu/build.py VENV FOLDER

VENV is a virtual environment with CuPy's wheel (cupy-cuda13x or cupy-cuda12x) and the packages in
REQUIREMENTS. The script writes to FOLDER:

- libcuda.so.1: the CUDA runtime and driver functions of this folder's C files;
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
import os
import re
import shutil
import ssl
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = ("cython", "nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-nvrtc")
PACKAGES = ("cupy", "cupy_backends", "cupyx")
MODULE = "cupy_backends/cuda/api/runtime"
#: CUDA version of the API that the emulated device implements.
CUDA_VERSION = 13020
CFLAGS = (
    "-O2", "-g", "-Wall", "-Wextra", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden",
    "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic",
)  # fmt: skip
#: The wheel nvidia-cuda-runtime lacks this header.
PROFILER_HEADER = """#pragma once
#include <cuda_runtime_api.h>
#ifdef __cplusplus
extern "C" {
#endif
cudaError_t cudaProfilerStart(void);
cudaError_t cudaProfilerStop(void);
#ifdef __cplusplus
}
#endif
"""
#: Where CuPy declares the functions that it needs.
API = Path("cupy_backends/cuda/api")
#: A missing function prints its name and returns 801 (cudaErrorNotSupported).
STUB = """#include <stdio.h>

#define STUB(name)                                                                       \\
    __attribute__((visibility("default"))) int name(void);                               \\
    int name(void)                                                                       \\
    {                                                                                    \\
        fprintf(stderr, "emulated GPU: the function " #name " is not implemented\\n");    \\
        return 801;                                                                      \\
    }

"""
#: Prints the folders of the packages and of Python's headers, and CuPy's version.
INSPECT = """
import sysconfig
from importlib import metadata
names = "cupy-cuda13x", "cupy-cuda12x"
found = [each.version for each in metadata.distributions() if each.metadata["Name"] in names]
print(sysconfig.get_path("purelib"), sysconfig.get_path("include"), *found[:1])
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


def digest(*inputs: str | Path) -> str:
    """Return a hash of strings and of the contents of files."""
    found = hashlib.sha256()
    for each in inputs:
        content = each.read_bytes() if isinstance(each, Path) else each.encode()
        found.update(len(content).to_bytes(8, "little") + content)
    return found.hexdigest()


class Stamp:
    """A record of the inputs of a step that has run."""

    def __init__(self, folder: Path, step: str, *inputs: str | Path) -> None:
        self.file, self.digest = folder / f"{step}.stamp", digest(*inputs)

    def is_current(self) -> bool:
        return self.file.exists() and self.file.read_text() == self.digest

    def write(self) -> None:
        self.file.write_text(self.digest)


class Environment:
    """The virtual environment: its Python, packages, CuPy version and CUDA headers."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "bin" / "python"
        site, include, *version = run(self.python, "-c", INSPECT).split()
        if not version:
            sys.exit(f"{folder} has no CuPy: pip install 'cupy-cuda13x[ctk]'")
        self.site, self.include, self.cupy = Path(site), Path(include), version[0]
        self.cuda = self._cuda_include()

    def _cuda_include(self) -> Path:
        places = [*self.site.glob("nvidia/cu*/include"), Path("/usr/local/cuda/include")]
        for place in places:
            if (place / "cuda_runtime_api.h").exists() and (place / "crt/host_defines.h").exists():
                return place
        sys.exit(f"no CUDA headers: {self.python} -m pip install {' '.join(REQUIREMENTS)}")

    def index(self) -> str:
        """Return the URL of the package index that pip uses."""
        command = [self.python, "-m", "pip", "config", "get", "global.index-url"]
        done = subprocess.run(command, capture_output=True, text=True)
        found = os.environ.get("PIP_INDEX_URL") or done.stdout.strip()
        return (found or "https://pypi.org/simple").rstrip("/")


def fetch(url: str) -> bytes:
    """Return the contents of a URL."""
    certificates = os.environ.get("PIP_CERT") or None
    context = ssl.create_default_context(cafile=certificates)
    request = urllib.request.Request(url, headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=120, context=context) as answer:
        found: bytes = answer.read()
        return found


def download_source(environment: Environment, folder: Path) -> Path:
    """Download and unpack CuPy's backends in the version of the wheel. Return their folder."""
    name = f"cupy-{environment.cupy}"
    source = folder / name
    stamp = Stamp(folder, "source", name)
    if stamp.is_current():
        return source
    page = f"{environment.index()}/cupy/"
    links = re.findall(r'<a [^>]*href="([^"]+)"', fetch(page).decode())
    addresses = [urllib.parse.urljoin(page, html.unescape(link)) for link in links]
    address = next((one for one in addresses if f"/{name}.tar.gz" in one), None)
    if address is None:
        sys.exit(f"{page} has no {name}.tar.gz")
    plain, _, checksum = address.partition("#sha256=")
    archive = fetch(plain)
    if checksum and hashlib.sha256(archive).hexdigest() != checksum:
        sys.exit(f"{plain}: the checksum differs from the index")
    file = folder / f"{name}.tar.gz"
    file.write_bytes(archive)
    with tarfile.open(file) as members:
        wanted = [one for one in members if one.name.startswith(f"{name}/cupy_backends/")]
        members.extractall(folder, wanted, filter="data")
    file.unlink()
    stamp.write()
    return source


def write_stubs(source: Path, output: Path, sources: list[Path]) -> None:
    """Write a C file with stubs of the functions that CuPy links or loads and C files lack."""
    runtime, driver, module = (
        (source / API / name).read_text()
        for name in ("_runtime_extern.pxi", "_driver_extern.pxi", "runtime.pyx")
    )
    loaded = re.findall(r"_L\.get\(f?'(\w+)(\{version\})?'\)", driver)
    needed = {
        *re.findall(r"\bint (cuda\w+)\(", runtime + module),
        *(f"cu{name}{'_v2' if version else ''}" for name, version in loaded),
    }
    text = "".join(file.read_text() for file in sources)
    defined = re.findall(r"^EXPORT [\w *]*?\b(cu\w+)\(", text, re.MULTILINE)
    output.write_text(STUB + "".join(f"STUB({name})\n" for name in sorted(needed - {*defined})))


def compile_library(environment: Environment, folder: Path, sources: list[Path]) -> Path:
    """Compile libcuda.so.1 from C files."""
    library = folder / "libcuda.so.1"
    definitions = {
        "PYTHON": str(environment.python.absolute()),
        "TRANSLATOR": str(HERE / "ptx.py"),
        "TRANSLATOR_VERSION": digest(*sorted([*HERE.glob("ptx*"), HERE / "kernel.h"]))[:16],
    }
    options = [*CFLAGS, *(f'-D{name}="{value}"' for name, value in definitions.items())]
    stamp = Stamp(folder, "library", *options, *sources, *sorted(HERE.glob("*.h")))
    if not stamp.is_current():
        command = ["gcc", *options, f"-I{HERE}", f"-I{environment.cuda}", "-o", library, *sources]
        print(run(*command, "-ldl", "-lpthread", "-lrt", "-lm"), end="")
        stamp.write()
    return library


def compile_module(environment: Environment, folder: Path, source: Path, library: Path) -> Path:
    """Rebuild CuPy's module of the CUDA runtime, linked to the library."""
    (module,) = environment.site.glob(f"{MODULE}.*.so")
    built = folder / module.name
    stamp = Stamp(folder, "module", source.name, str(environment.cuda), module.name)
    if stamp.is_current():
        return built
    values = {
        "CUPY_USE_CUDA_PYTHON": False, "CUPY_CUFFT_STATIC": False, "CUPY_CYTHON_VERSION": "3.2",
        "CUPY_CUDA_VERSION": CUDA_VERSION, "CUPY_HIP_VERSION": 0,
    }  # fmt: skip
    settings = [part for name, value in values.items() for part in ("-E", f"{name}={value}")]
    run(environment.python, "-m", "cython", "--cplus", "-3", *settings, f"{MODULE}.pyx", cwd=source)
    headers = folder / "include"
    headers.mkdir(exist_ok=True)
    (headers / "cuda_profiler_api.h").write_text(PROFILER_HEADER)
    places = [source, source / "cupy_backends", environment.cuda, headers, environment.include]
    run(
        "g++", "-O1", "-w", "-fPIC", "-shared", "-std=c++17", f"-DCUPY_CUDA_VERSION={CUDA_VERSION}",
        *(f"-I{place}" for place in places), "-o", built, source / f"{MODULE}.cpp", library,
    )  # fmt: skip
    stamp.write()
    return built


def assemble_site(environment: Environment, folder: Path, module: Path) -> Path:
    """Link the wheel's packages into a folder, with the rebuilt module in place of the wheel's."""
    site = folder / "site"
    stamp = Stamp(folder, "site", str(environment.site), environment.cupy, module)
    if stamp.is_current():
        return site
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir()
    for name in PACKAGES:
        if MODULE.startswith(f"{name}/"):
            shutil.copytree(environment.site / name, site / name)
        else:
            (site / name).symlink_to(environment.site / name)
    shutil.copy(module, site / Path(MODULE).parent)
    stamp.write()
    return site


def write_variables(folder: Path, site: Path) -> Path:
    """Write the environment variables as a shell script. Return its path."""
    variables = {
        "LD_LIBRARY_PATH": f"{folder}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}",
        "PYTHONPATH": f"{site}${{PYTHONPATH:+:$PYTHONPATH}}",
        "CUPY_COMPILE_WITH_PTX": "1",
        "CUPY_ACCELERATORS": "",
        "CUPY_CACHE_DIR": str(folder / "cupy"),
        "EMULATED_GPU_CACHE": str(folder / "kernels"),
        "CUDA_VISIBLE_DEVICES": "${CUDA_VISIBLE_DEVICES:-0,1}",  # there is no nvidia-smi to ask
    }
    (folder / "kernels").mkdir(exist_ok=True)
    file = folder / "env.sh"
    file.write_text("".join(f'export {name}="{value}"\n' for name, value in variables.items()))
    return file


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    environment, folder = Environment(Path(sys.argv[1]).absolute()), Path(sys.argv[2]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    source = download_source(environment, folder)
    sources = sorted(HERE.glob("*.c"))
    stubs = folder / "stubs.c"
    write_stubs(source, stubs, sources)
    library = compile_library(environment, folder, [*sources, stubs])
    module = compile_module(environment, folder, source, library)
    site = assemble_site(environment, folder, module)
    print(f"the emulated device is ready: . {write_variables(folder, site)}")


if __name__ == "__main__":
    main()
