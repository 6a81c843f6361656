"""Translate PTX to C, and compile it.

    python ptx.py OUTPUT.so < INPUT.ptx

A kernel becomes a function that runs one thread until it exits or waits for other threads. Where it
waits, it returns, and later calls resume there: see kernel.h for the interface, execute.c for the
caller, ptx_parser.py for the parser, ptx_functions.py and ptx_instructions.py for the C code.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

from ptx_instructions import InstructionWriter
from ptx_parser import Block, Module, UnsupportedError, parse

HERE = Path(__file__).resolve().parent
CFLAGS = (
    "-w", "-shared", "-fPIC", "-std=gnu11", "-fno-strict-aliasing", "-fwrapv",
    "-ffp-contract=off", "-fno-math-errno",
)  # fmt: skip
#: Larger modules are compiled without optimization: gcc needs more than twice the time for the
#: largest kernels of collectives, and the tests use many of them with small arrays only.
OPTIMIZED_INSTRUCTIONS = 6000


def to_c(module: Module) -> str:
    """Return the C source of a module."""
    lines = ['#include "ptx.h"']
    writers = [InstructionWriter(module, function) for function in module.functions]
    lines += [writer.prototype() + ";" for writer in writers]
    for writer in writers:
        lines.append(writer.definition())
    kernels = [writer for writer in writers if writer.function.is_kernel]
    lines.append("static const struct kernel kernels[] = {")
    lines += [f"    {writer.descriptor()}," for writer in kernels]
    lines.append("};")
    lines += module_image(module, len(kernels))
    return "\n".join(lines) + "\n"


def module_image(module: Module, kernels: int) -> list[str]:
    """Return the definitions of the module's variables and of its description."""
    image = [one for one in module.variables.values() if one.space != "shared"]
    nbytes = max((one.offset + one.bytes for one in image), default=0)
    contents = bytearray(nbytes)
    for one in image:
        contents[one.offset : one.offset + len(one.initial)] = one.initial
    return [
        "static const unsigned char globals[] = {",
        *(",".join(map(str, contents[i : i + 32])) + "," for i in range(0, nbytes, 32)),
        "};",
        f"const struct module_image emulated_module = {{{kernels}, {nbytes}, kernels, globals}};",
    ]


def instruction_count(block: Block) -> int:
    return sum(instruction_count(one) if isinstance(one, Block) else 1 for one in block.items)


def compile_ptx(text: str, output: Path) -> None:
    """Translate PTX, and compile it to a shared library."""
    module = parse(text)
    source, partial = output.with_suffix(".c"), output.with_suffix(".partial")
    source.write_text(to_c(module))
    count = max((instruction_count(one.body) for one in module.functions), default=0)
    level = "-O1" if count <= OPTIMIZED_INSTRUCTIONS else "-O0"
    command = ["gcc", level, *CFLAGS, f"-I{HERE}", "-o", partial, source, "-lm"]
    subprocess.run([str(each) for each in command], check=True)
    partial.rename(output)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    text, output = sys.stdin.buffer.read().decode(errors="replace"), Path(sys.argv[1])
    with output.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not output.exists():
                compile_ptx(text, output)
        except UnsupportedError as error:
            sys.exit(f"emulated GPU: unsupported {error}")


if __name__ == "__main__":
    main()
