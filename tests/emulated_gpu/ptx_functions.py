"""The C code of kernels and device functions: names, registers, operands and suspension points.

The names in the generated code are those of kernel.h and ptx.h. A derived class writes the
instructions: see ptx_instructions.py.
"""

from __future__ import annotations

import json
import re
from collections import ChainMap

from ptx_parser import (
    SIZES,
    Block,
    Function,
    Instruction,
    Label,
    Module,
    UnsupportedError,
    Variable,
    declared,
    place,
)

SPECIAL = {
    "%laneid": "(thread->number % 32)", "%warpid": "(thread->number / 32)",
    "%clock": "nanoseconds()", "%clock64": "nanoseconds()", "%globaltimer": "nanoseconds()",
}  # fmt: skip
VECTORS = {
    "tid": "thread->index", "ntid": "block->block_dim", "ctaid": "block->index",
    "nctaid": "block->grid_dim",
}  # fmt: skip


def c_type(type: str) -> str:
    """Return the C type of integers and bits."""
    bits = 8 * SIZES[type]
    return f"int{bits}_t" if type[0] == "s" else f"uint{bits}_t"


def bits_type(type: str) -> str:
    """Return the type of memory: floats are moved as bits."""
    return type if type[0] in "us" else f"b{8 * SIZES[type]}"


def is_float(type: str) -> bool:
    return type in ("f16", "f32", "f64")


def quoted(text: str) -> str:
    return json.dumps(text)


class FunctionWriter:
    """The C code of one kernel or device function."""

    def __init__(self, module: Module, function: Function) -> None:
        self.module, self.function = module, function
        self.registers: dict[str, int] = {}
        self.arrays: dict[str, int] = {}  # C arrays of local memory and of calls' parameters
        self.shared: dict[str, Variable] = {
            name: one for name, one in module.variables.items() if one.space == "shared"
        }
        self.points, self.flags = 0, 0
        self.used: set[str] = set()
        self.scope: ChainMap[str, Variable] = ChainMap({**module.variables})
        self._declare_parameters()
        self.items: list[tuple[ChainMap[str, Variable], Label | Instruction]] = []
        self._flatten(function.body, self.scope)
        self.looped = self._looped()

    # ---- Names ----

    def _declare_parameters(self) -> None:
        function = self.function
        for name, one in [*function.parameters.items(), *function.results.items()]:
            kind = "parameter" if function.is_kernel else "array"
            self.scope[name] = Variable(kind, one.type, one.bytes, self._unique(name), one.offset)

    def _unique(self, name: str) -> str:
        plain = re.sub(r"\W", "_", name.lstrip("%$"))
        found, n = plain, 1
        while found in self.used:
            found, n = f"{plain}_{n}", n + 1
        self.used.add(found)
        return found

    def _flatten(self, block: Block, outer: ChainMap[str, Variable]) -> None:
        """List the instructions of nested blocks, each with the names that it sees."""
        scope = outer.new_child()
        for text in block.declarations:
            for name, one, align in declared(text):
                self._declare(scope, name, one, align)
        for item in block.items:
            if isinstance(item, Label):
                scope[item.name] = Variable("label", "", 0, self._unique(f"label_{item.name}"))
        for item in block.items:
            if isinstance(item, Block):
                self._flatten(item, scope)
            else:
                self.items.append((scope, item))

    def _declare(
        self, scope: ChainMap[str, Variable], name: str, one: Variable, align: int
    ) -> None:
        one.c_name = self._unique(name)
        scope[name] = one
        if one.space == "reg":
            self.registers[one.c_name] = one.bytes
        elif one.space == "shared":
            place(self.shared, iter([(one.c_name, one, align)]))
        elif one.space in ("local", "param"):
            one.space = "array"
            self.arrays[one.c_name] = one.bytes
        else:
            raise UnsupportedError(f"variable {name} in a function")

    def _looped(self) -> set[int]:
        """Return the positions of the instructions between a label and a later branch to it."""
        labels = {
            scope[item.name].c_name: place
            for place, (scope, item) in enumerate(self.items)
            if isinstance(item, Label)
        }
        found: set[int] = set()
        for end, (scope, item) in enumerate(self.items):
            if isinstance(item, Instruction) and item.opcode == "bra":
                found.update(range(labels[scope[item.operands[0]].c_name], end + 1))
        return found

    # ---- Functions ----

    def prototype(self) -> str:
        name = re.sub(r"\W", "_", self.function.name)
        if self.function.is_kernel:
            return f"static int step_{name}(struct thread *thread, const struct block *block)"
        arrays = [*self.function.results, *self.function.parameters]
        places = "".join(f", char *{self.scope[one].c_name}" for one in arrays)
        return f"static int call_{name}(struct thread *thread, const struct block *block{places})"

    def definition(self) -> str:
        lines = []
        for position, (scope, item) in enumerate(self.items):
            self.scope = scope
            if isinstance(item, Label):
                lines.append(f"{scope[item.name].c_name}:;")
            else:
                lines.append(self._statement(item, position in self.looped))
        body = "\n".join(lines)
        name = re.sub(r"\W", "_", self.function.name)
        used = {one for one in re.findall(r"\br->(\w+)", body) if one in self.registers}
        fields = "".join(f" uint{8 * self.registers[one]}_t {one};" for one in sorted(used))
        arrays = " ".join(
            f"char {one}[{n}] __attribute__((aligned(16)));" for one, n in self.arrays.items()
        )
        if self.flags & 1:
            start = f"struct frame_{name} *const r = (struct frame_{name} *)thread;"
        else:
            start = f"struct frame_{name} registers, *const r = &registers;"
        begin = "switch (thread->resume) {\ncase 0:;" if self.function.is_kernel else "{"
        return (
            f"struct frame_{name} {{ struct thread thread;{fields} {arrays} }};\n"
            f"{self.prototype()}\n{{\n{start}\n{begin}\n{body}\n}}\nreturn EXITED;\n}}\n"
        )

    def descriptor(self) -> str:
        """Return the kernel's struct kernel; call it after ``definition``."""
        function, name = self.function, re.sub(r"\W", "_", self.function.name)
        shared = max((one.offset + one.bytes for one in self.shared.values()), default=0)
        parameters = function.parameters.values()
        parameter_bytes = max((one.offset + one.bytes for one in parameters), default=0)
        rows = ", ".join(f"{{{one.offset}, {one.bytes}}}" for one in parameters)
        return (
            f"{{{quoted(function.name)}, step_{name}, sizeof(struct frame_{name}), "
            f"{-(-shared // 16) * 16}, {parameter_bytes}, {function.max_threads}, "
            f"{self.flags}, {len(function.parameters)}, "
            f"(const struct parameter[]){{{rows}}}}}"
        )

    def _statement(self, one: Instruction, in_loop: bool) -> str:
        """Return the code of an instruction."""
        raise NotImplementedError

    def _suspend(self, outcome: str, poll: bool = False) -> str:
        """Return the code of a suspension point."""
        if not self.function.is_kernel:
            raise UnsupportedError("waiting in a function that is not inlined")
        self.points += 1
        self.flags |= 1
        return f"POLL({self.points})" if poll else f"SUSPEND({self.points}, {outcome})"

    # ---- Operands ----

    def read(self, operand: str, type: str) -> str:
        """Return an operand as a C expression. f16 is widened to double."""
        if operand.startswith("!"):
            return f"!{self.read(operand[1:], type)}"
        bits = self._bits(operand)
        if is_float(type):
            return f"to_{type}({bits})"
        return f"({bits} != 0)" if type == "pred" else f"(({c_type(type)}){bits})"

    def _bits(self, operand: str) -> str:
        """Return the bits of a register, a constant, a special register or an address."""
        variable = self.scope.get(operand)
        if variable is not None:
            return f"r->{variable.c_name}" if variable.space == "reg" else self._place(variable)
        if found := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", operand):
            return f"0x{found[1]}{'u' if len(found[1]) == 8 else 'ull'}"
        if re.fullmatch(r"[-+]?(0[xX][0-9A-Fa-f]+|\d+)U?", operand):
            return f"((uint64_t){int(operand.rstrip('U'), 0) & (1 << 64) - 1}ull)"
        if found := re.fullmatch(r"%(tid|ntid|ctaid|nctaid)\.([xyz])", operand):
            return f"{VECTORS[found[1]]}[{'xyz'.index(found[2])}]"
        if operand in SPECIAL:
            return SPECIAL[operand]
        if found := re.fullmatch(r"([\w$%.]+)\s*\+\s*(-?\w+)", operand):
            return f"({self.read(found[1], 'u64')} + ({int(found[2], 0)}))"
        raise UnsupportedError(f"operand: {operand}")

    def _place(self, variable: Variable) -> str:
        """Return the address of a variable, in its state space."""
        if variable.space == "parameter":
            return f"((uint64_t)block->parameters + {variable.offset})"
        if variable.space == "array":
            owner = "r->" if variable.c_name in self.arrays else ""
            return f"((uint64_t){owner}{variable.c_name})"
        if variable.space == "shared":
            dynamic = "(uint64_t)(block->shared_bytes - block->dynamic_shared_bytes)"
            return dynamic if variable.bytes == 0 else f"((uint64_t){variable.offset})"
        return f"((uint64_t)block->globals + {variable.offset})"

    def write(self, operand: str, type: str, value: str) -> str:
        """Return the assignment of an integer or float to a register. Integers are extended."""
        if operand == "_":
            return f"(void)({value});"
        variable = self.scope[operand]
        if variable.space != "reg":
            raise UnsupportedError(f"destination: {operand}")
        if is_float(type):
            value = f"from_{type}({value})"
        elif type == "pred":
            return f"r->{variable.c_name} = ({value}) != 0;"
        else:
            value = f"({c_type(type)})({value})"
        return f"r->{variable.c_name} = (uint{8 * variable.bytes}_t){value};"

    def _reads(self, one: Instruction, type: str = "", start: int = 1) -> list[str]:
        return [self.read(operand, type or one.type) for operand in one.operands[start:]]
