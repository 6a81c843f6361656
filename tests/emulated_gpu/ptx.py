"""Translate PTX to C, and compile it.

    python ptx.py INPUT.ptx OUTPUT.so

A kernel becomes a function that runs one thread until it exits or waits for other threads. Where it
waits, it returns, and later calls resume there: see kernel.h for the interface, execute.c for the
caller, ptx_parser.py for the parser, ptx_functions.py and ptx_instructions.py for the C code.
"""

from __future__ import annotations

import os
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
    image = {name: one for name, one in module.variables.items() if one.space != "shared"}
    nbytes = max((one.offset + one.bytes for one in image.values()), default=0)
    contents = bytearray(nbytes)
    for one in image.values():
        contents[one.offset : one.offset + len(one.initial)] = one.initial
    lines = ["static const struct variable variables[] = {"]
    lines += [f'    {{"{name}", {one.offset}, {one.bytes}}},' for name, one in image.items()]
    lines += ["};", "static const unsigned char globals[] = {"]
    lines += [",".join(map(str, contents[i : i + 32])) + "," for i in range(0, nbytes, 32)]
    lines += [
        "};",
        "const struct module_image emulated_module = {",
        f"    {kernels}, {len(image)}, {nbytes}, kernels, variables, globals}};",
    ]
    return lines


def instruction_count(block: Block) -> int:
    return sum(instruction_count(one) if isinstance(one, Block) else 1 for one in block.items)


def compile_ptx(text: str, output: Path) -> None:
    """Translate PTX, and compile it to a shared library."""
    module = parse(text)
    source = output.with_suffix(".c")
    source.write_text(to_c(module))
    count = max((instruction_count(one.body) for one in module.functions), default=0)
    level = "-O1" if count <= OPTIMIZED_INSTRUCTIONS else "-O0"
    command = ["gcc", level, *CFLAGS, f"-I{HERE}", "-o", output, source, "-lm"]
    subprocess.run([str(each) for each in command], check=True)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, output = map(Path, sys.argv[1:])
    partial = output.with_suffix(f".{os.getpid()}.so")
    try:
        compile_ptx(source.read_text(errors="replace").replace("\0", ""), partial)
    except UnsupportedError as error:
        sys.exit(f"{source}: unsupported {error}")
    partial.rename(output)
    partial.with_suffix(".c").rename(output.with_suffix(".c"))


if __name__ == "__main__":
    main()
