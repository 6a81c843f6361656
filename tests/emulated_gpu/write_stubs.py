"""Write stubs for the CUDA functions that CuPy needs and the emulated device lacks.

    python write_stubs.py CUPY_SOURCE OUTPUT.c SOURCE.c...

CUPY_SOURCE is CuPy's unpacked source distribution. A stub prints its name and returns 801
(cudaErrorNotSupported), so that a missing function is named when a program calls it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

API = Path("cupy_backends/cuda/api")
HEADER = """/* Written by write_stubs.py. */
#include <stdio.h>

#define STUB(name)                                                                       \\
    __attribute__((visibility("default"))) int name(void);                               \\
    int name(void)                                                                       \\
    {                                                                                    \\
        fprintf(stderr, "emulated GPU: the function " #name " is not implemented\\n");    \\
        return 801;                                                                      \\
    }

"""


def needed(source: Path) -> set[str]:
    """Return the names of the runtime and driver functions that CuPy links or loads."""
    runtime = (source / API / "_runtime_extern.pxi").read_text()
    driver = (source / API / "_driver_extern.pxi").read_text()
    module = (source / API / "runtime.pyx").read_text()
    loaded = re.findall(r"_L\.get\(f?'(\w+)(\{version\})?'\)", driver)
    return {
        *re.findall(r"\bint (cuda\w+)\(", runtime + module),
        *(f"cu{name}{'_v2' if version else ''}" for name, version in loaded),
    }


def defined(sources: Sequence[Path]) -> set[str]:
    """Return the names of the functions that C files export."""
    return {
        name
        for file in sources
        for name in re.findall(r"^EXPORT [\w *]*?\b(cu\w+)\(", file.read_text(), re.MULTILINE)
    }


def write_stubs(source: Path, output: Path, sources: Sequence[Path]) -> list[str]:
    """Write a C file with the stubs. Return their names."""
    missing = sorted(needed(source) - defined(sources))
    output.write_text(HEADER + "".join(f"STUB({name})\n" for name in missing))
    return missing


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    paths = [Path(each) for each in sys.argv[1:]]
    print("stubs:", *write_stubs(paths[0], paths[1], paths[2:]))
