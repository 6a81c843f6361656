"""Parse PTX text: modules, functions, variables and instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

#: Size in bytes of each type.
SIZES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4,
    "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8,
}  # fmt: skip


class UnsupportedError(Exception):
    """The PTX has something that the translator does not support."""


@dataclass
class Variable:
    """A name in PTX: its state space, type, size in bytes, and the name or place in C."""

    space: str
    type: str
    bytes: int
    c_name: str = ""
    offset: int = 0
    initial: bytes = b""


@dataclass
class Instruction:
    """One instruction, such as `@%p1 ld.global.v2.u32 {%r1, %r2}, [%rd1+8]`."""

    text: str
    guard: str
    parts: tuple[str, ...]
    operands: list[str]

    @property
    def opcode(self) -> str:
        return self.parts[0]

    @property
    def type(self) -> str:
        return self.parts[-1]

    def has(self, *names: str) -> bool:
        return any(name in self.parts for name in names)


@dataclass
class Label:
    name: str


@dataclass
class Block:
    """Statements between braces, with their own names."""

    items: list[Instruction | Label | Block] = field(default_factory=list)
    declarations: list[str] = field(default_factory=list)


@dataclass
class Function:
    """A kernel or a device function."""

    name: str
    is_kernel: bool
    parameters: dict[str, Variable]
    results: dict[str, Variable]
    max_threads: int
    body: Block


@dataclass
class Module:
    functions: list[Function]
    variables: dict[str, Variable]


def split_operands(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += character in "{[("
        depth -= character in "}])"
        if character == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


STATEMENT = re.compile(
    r"\s*(?:(?P<open>\{)|(?P<close>\})|(?P<label>[\w$%]+)\s*:(?!:)|(?P<text>[^;{}]*(?:\{[^}]*\}"
    r"[^;{}]*)*);)"
)
DECLARATION = re.compile(
    r"\.(?P<space>reg|shared|local|param|global|const)\s+(?:\.attribute\([^)]*\)\s*)?"
    r"(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"(?:\.ptr\s*(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?(?P<names>.+)",
    re.S,
)
NAME = re.compile(
    r"(?P<name>[\w$%]+)(?:<(?P<count>\d+)>)?(?P<sizes>(?:\[\w*\])*)\s*(?:=\s*(?P<initial>.*))?",
    re.S,
)
HEADER = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*(?:"
    r"\.(?P<kind>entry|func)\s*(?P<results>\([^)]*\))?\s*(?P<name>[\w$]+)\s*"
    r"(?P<parameters>\([^)]*\))?(?P<directives>[^{;]*)(?P<begin>[{;])"
    r"|(?P<variable>\.(?:global|const|shared)\b[^;]*);)"
)


def declared(text: str) -> Iterator[tuple[str, Variable, int]]:
    """Yield the names, variables and alignments of a declaration."""
    found = DECLARATION.fullmatch(text.strip())
    if found is None or found["type"] not in SIZES:
        raise UnsupportedError(f"declaration: {text.strip()}")
    size = SIZES[found["type"]]
    for part in split_operands(found["names"]):
        name = NAME.fullmatch(part)
        if name is None:
            raise UnsupportedError(f"declaration: {text.strip()}")
        count = 1
        for length in re.findall(r"\[(\w*)\]", name["sizes"]):
            count *= int(length or "0", 0)
        align = max(int(found["align"] or 1), size)
        names = [name["name"]]
        if name["count"]:
            names = [f"{name['name']}{i}" for i in range(int(name["count"]))]
        initial = initial_bytes(name["initial"], size) if name["initial"] else b""
        for each in names:
            variable = Variable(found["space"], found["type"], count * size, initial=initial)
            yield each, variable, align


def initial_bytes(text: str, size: int) -> bytes:
    """Return the contents of a variable with an initial value."""
    values = re.findall(r"[\w.%$+-]+", text)
    result = b""
    for value in values:
        if re.fullmatch(r"0[fFdD][0-9A-Fa-f]+", value):
            number = int(value[2:], 16)
        elif re.fullmatch(r"-?(0[xX][0-9A-Fa-f]+|\d+)U?", value):
            number = int(value.rstrip("U"), 0)
        else:
            raise UnsupportedError(f"initial value: {value}")
        result += (number % (1 << 8 * size)).to_bytes(size, "little")
    return result


def place(variables: dict[str, Variable], found: Iterator[tuple[str, Variable, int]]) -> int:
    """Add variables at the next aligned offsets. Return the size in bytes of all variables."""
    end = max((each.offset + each.bytes for each in variables.values()), default=0)
    for name, variable, align in found:
        variable.offset = -(-end // align) * align
        variables[name] = variable
        end = variable.offset + variable.bytes
    return end


def parse_parameters(text: str | None) -> dict[str, Variable]:
    found: dict[str, Variable] = {}
    for part in split_operands((text or "()").strip()[1:-1]):
        place(found, declared(part))
    return found


def parse_instruction(text: str) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)(%?[\w$]+)\s+)?([\w.:]+)\s*(.*)", text, re.S)
    if found is None:
        raise UnsupportedError(f"statement: {text}")
    guard = f"{found[1]}{found[2]}" if found[2] else ""
    parts = tuple(part for part in found[3].split(".") if part)
    return Instruction(" ".join(text.split()), guard, parts, split_operands(found[4]))


def parse_body(text: str, start: int) -> tuple[Block, int]:
    """Parse statements up to the closing brace. Return them and the position after it."""
    block = Block()
    while True:
        found = STATEMENT.match(text, start)
        if found is None:
            raise UnsupportedError(f"statement: {text[start : start + 80]}")
        start = found.end()
        if found["open"]:
            inner, start = parse_body(text, start)
            block.items.append(inner)
        elif found["close"]:
            return block, start
        elif found["label"]:
            block.items.append(Label(found["label"]))
        elif found["text"].strip().startswith("."):
            if not found["text"].strip().startswith(".pragma"):
                block.declarations.append(found["text"].strip())
        elif found["text"].strip():
            block.items.append(parse_instruction(found["text"].strip()))


def parse(text: str) -> Module:
    """Parse a PTX module."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/|^\s*\.(?:loc|file)\b[^\n]*", "", text, flags=re.S | re.M)
    functions, variables, start = [], {}, 0
    while found := HEADER.search(text, start):
        start = found.end()
        if found["variable"]:  # shared variables have offsets of their own
            is_shared = found["variable"].startswith(".shared")
            alike = {k: v for k, v in variables.items() if (v.space == "shared") == is_shared}
            place(alike, declared(found["variable"]))
            variables.update(alike)
        elif found["begin"] == "{":
            body, start = parse_body(text, start)
            threads = re.search(r"\.(?:maxntid|reqntid)\s+([\d\s,]+)", found["directives"])
            product = 1
            for each in split_operands(threads[1]) if threads else ["1024"]:
                product *= int(each)
            functions.append(Function(
                found["name"], found["kind"] == "entry", parse_parameters(found["parameters"]),
                parse_parameters(found["results"]), product, body,
            ))  # fmt: skip
    return Module(functions, variables)
