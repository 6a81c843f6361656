"""The C code of PTX instructions.

Each instruction has a method of InstructionWriter, registered with its modifiers. Any other
modifier is an error, because ignoring it could change results.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ptx_functions import FORMATS, SPECIAL, FunctionWriter, bits_type, c_type, is_float, quoted
from ptx_parser import SIZES, Instruction, UnsupportedError, split_operands

SPACES = ("const", "global", "local", "param", "shared")
ORDERS = {
    "relaxed": "__ATOMIC_RELAXED", "volatile": "__ATOMIC_RELAXED", "mmio": "__ATOMIC_RELAXED",
    "acquire": "__ATOMIC_ACQUIRE", "release": "__ATOMIC_RELEASE", "acq_rel": "__ATOMIC_ACQ_REL",
    "sc": "__ATOMIC_SEQ_CST",
}  # fmt: skip
ROUNDING = {"rn": "FE_TONEAREST", "rz": "FE_TOWARDZERO", "rm": "FE_DOWNWARD", "rp": "FE_UPWARD"}
TO_INTEGRAL = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
SCOPES = {"cta", "cluster", "gpu", "sys", "gl"}
CACHING = {
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "L1::no_allocate", "L1::evict_last",
    "L1::evict_first", "L2::64B", "L2::128B", "L2::256B", "L1::evict_normal", "L1::evict_unchanged",
}  # fmt: skip
MEMORY = {*SPACES, "shared::cta", "param::entry", "param::func", "v2", "v4", "v8", "weak", "v1"}
FLOAT = {"rn", "rz", "rm", "rp", "ftz", "sat", "approx", "full"}
COMPARISONS = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=",
    "hi": ">", "hs": ">=",
}  # fmt: skip
LOGIC = {"and": "&", "or": "|", "xor": "^"}
COMPARISON_MODIFIERS = {
    *COMPARISONS,
    *(f"{one}u" for one in COMPARISONS),
    "num",
    "nan",
    *LOGIC,
    "ftz",
}
ATOMIC_OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
ATOMIC_MODIFIERS = {*ATOMIC_OPERATIONS, "noftz", *ORDERS, *MEMORY, *SCOPES}
Handler = Callable[["InstructionWriter", Instruction], str]
HANDLERS: dict[str, tuple[Handler, set[str]]] = {}


def instruction(*opcodes: str, allows: set[str] = frozenset()) -> Callable[[Handler], Handler]:
    """Register a method for opcodes, with the modifiers that it supports besides types."""

    def register(handler: Handler) -> Handler:
        for opcode in opcodes:
            HANDLERS[opcode] = handler, {*allows}
        return handler

    return register


class InstructionWriter(FunctionWriter):
    """The C code of a function with its instructions."""

    def _statement(self, one: Instruction, in_loop: bool) -> str:
        handler, allowed = HANDLERS.get(one.opcode, (None, set()))
        unknown = [part for part in one.parts[1:] if part not in allowed and part not in SIZES]
        if handler is None or unknown:
            raise UnsupportedError(f"instruction: {one.text}")
        self.in_loop = in_loop
        try:
            code = handler(self, one)
        except (IndexError, KeyError) as error:
            raise UnsupportedError(f"instruction: {one.text} ({error!r})") from error
        return f"if ({self.read(one.guard, 'pred')}) {{ {code} }}" if one.guard else code

    # ---- Arithmetic ----

    def _float(self, one: Instruction, template: str, values: list[str], type: str) -> str:
        """Return a float expression in the instruction's rounding mode."""
        mode = next((ROUNDING[part] for part in one.parts if part in ROUNDING), ROUNDING["rn"])
        if type in FORMATS:
            if mode != ROUNDING["rn"] or one.has("ftz"):
                raise UnsupportedError(f"instruction: {one.text}")
            result = template.format(*values)
            return f"sat_f64({result})" if one.has("sat") else result
        c = "float" if type == "f32" else "double"
        if one.has("ftz") and type == "f32":
            values = [f"ftz({value})" for value in values]
        if mode == ROUNDING["rn"]:
            result = template.format(*values)
        else:
            x, y, z = [*values, "0", "0"][:3]
            result = f"ROUNDED({mode}, {c}, {c}, {x}, {y}, {z}, {template.format('x', 'y', 'z')})"
        result = f"canonical_{type}({result})"
        if one.has("ftz") and type == "f32":
            result = f"ftz({result})"
        return f"sat_{type}({result})" if one.has("sat") else result

    def _packed(self, one: Instruction, compute: Callable[[list[str], str], str]) -> str:
        """Apply a computation on floats to both halves of registers, or to whole registers."""
        destination, *sources = one.operands
        if not one.type.endswith("x2"):
            return self.write(destination, one.type, compute(self._reads(one), one.type))
        half, parts = one.type.removesuffix("x2"), []
        for shift in (0, 16):
            values = [
                f"widen({self.read(source, 'b32')} >> {shift} & 0xffff, &{half})"
                for source in sources
            ]
            parts.append(f"narrow({compute(values, half)}, &{half}, FE_TONEAREST, 0)")
        return self.write(destination, "b32", f"{parts[0]} | {parts[1]} << 16")

    @instruction("add", "sub", "mul", "mad", "fma", allows=FLOAT | {"lo", "hi", "wide", "cc"})
    def add(self, one: Instruction) -> str:
        if is_float(one.type.removesuffix("x2")):
            name = {"mad": "fma"}.get(one.opcode, one.opcode)
            return self._packed(
                one, lambda v, type: self._float(one, self._sum(name, type), v, type)
            )
        if one.has("cc"):
            return self._with_carry(one)
        if one.has("sat"):
            sign = {"add": "+", "sub": "-"}[one.opcode]
            x, y = self._reads(one)
            value = f"CLAMP((int64_t){x} {sign} {y}, INT32_MIN, INT32_MAX)"
            return self.write(one.operands[0], one.type, value)
        # Signed integers wrap around like unsigned ones.
        if one.opcode in ("add", "sub"):
            x, y = self._reads(one, f"u{8 * SIZES[one.type]}")
            return self.write(one.operands[0], one.type, f"{x} {'+-'[one.opcode == 'sub']} {y}")
        value, type = self._product(one)
        if len(one.operands) > 3:
            value = f"({c_type(type)}){value} + {self.read(one.operands[3], type)}"
        return self.write(one.operands[0], type, value)

    def _sum(self, name: str, type: str) -> str:
        if type in FORMATS:  # exact, or rounded to odd before the result is narrowed
            return {
                "add": "sum_to_odd({0}, {1})", "sub": "sum_to_odd({0}, -{1})", "mul": "({0} * {1})",
                "fma": "sum_to_odd({0} * {1}, {2})",
            }[name]  # fmt: skip
        fma = "fmaf" if type == "f32" else "fma"
        return {
            "add": "({0} + {1})", "sub": "({0} - {1})", "mul": "({0} * {1})",
            "fma": f"{fma}({{0}}, {{1}}, {{2}})",
        }[name]  # fmt: skip

    def _product(self, one: Instruction) -> tuple[str, str]:
        """Return the low or high half or the whole of an integer product, and its type."""
        x, y = (self.read(operand, one.type) for operand in one.operands[1:3])
        wide = "__int128" if one.type[0] == "s" else "unsigned __int128"
        if one.has("wide"):
            type = f"{one.type[0]}{16 * SIZES[one.type]}"
            return f"(({c_type(type)}){x} * ({c_type(type)}){y})", type
        if one.has("hi"):
            return f"((({wide}){x} * ({wide}){y}) >> {8 * SIZES[one.type]})", one.type
        unsigned = f"uint{max(32, 8 * SIZES[one.type])}_t"
        return f"(({unsigned}){x} * ({unsigned}){y})", one.type

    @instruction("addc", "subc", "madc", allows={"cc", "lo", "hi"})
    def _with_carry(self, one: Instruction) -> str:
        bits = 8 * SIZES[one.type]
        opcode = one.opcode.removesuffix("c") if one.opcode != "madc" else "mad"
        carry = "r->carry" if one.opcode.endswith("c") else "0"
        wide, type = "(unsigned __int128)", f"u{bits}"
        last = self.read(one.operands[-1], type)
        if opcode == "mad":
            first = f"({c_type(type)})({self._product(one)[0]})"
        else:
            first = self.read(one.operands[1], type)
        sign = "-" if opcode == "sub" else "+"
        total = f"{wide}{first} {sign} {last} {sign} {carry}"
        store = f" r->carry = total >> {bits} & 1;" if one.has("cc") else ""
        result = self.write(one.operands[0], type, "total")
        return f"{{ const unsigned __int128 total = {total};{store} {result} }}"

    @instruction("div", "rem", allows=FLOAT)
    def div(self, one: Instruction) -> str:
        if is_float(one.type):
            value = self._float(one, "({0} / {1})", self._reads(one), one.type)
        else:
            value = f"{one.opcode}_{one.type}({', '.join(self._reads(one))})"
        return self.write(one.operands[0], one.type, value)

    @instruction("sqrt", "rcp", "rsqrt", "sin", "cos", "ex2", "lg2", "tanh", allows=FLOAT)
    def sqrt(self, one: Instruction) -> str:
        """Approximations are computed in double precision and rounded once."""
        is_single = one.type == "f32"
        wide = "((double){0})"
        template = {
            "sqrt": "sqrtf({0})" if is_single else "sqrt({0})",
            "rcp": "(1 / {0})", "rsqrt": f"(1 / sqrt({wide}))", "sin": f"sin({wide})",
            "cos": f"cos({wide})", "ex2": f"exp2({wide})", "lg2": f"log2({wide})",
            "tanh": f"tanh({wide})",
        }[one.opcode]  # fmt: skip
        if one.type not in ("f32", "f64"):
            raise UnsupportedError(f"instruction: {one.text}")
        value = self._float(one, template, self._reads(one), one.type)
        if one.type == "f64" and one.has("ftz"):  # rcp and rsqrt: the upper half of the bits
            value = f"to_f64(from_f64({value}) & 0xffffffff00000000)"
        return self.write(one.operands[0], one.type, value)

    @instruction("min", "max", allows={"ftz", "NaN", "relu"})
    def min(self, one: Instruction) -> str:
        if one.type.removesuffix("x2") in FORMATS or is_float(one.type):
            return self._packed(one, lambda values, type: self._extremum(one, values, type))
        x, y = self._reads(one)
        value = f"{x} {'<' if one.opcode == 'min' else '>'} {y} ? {x} : {y}"
        if one.has("relu"):
            value = f"({value}) < 0 ? 0 : ({value})"
        return self.write(one.operands[0], one.type, value)

    def _extremum(self, one: Instruction, values: list[str], type: str) -> str:
        x, y = values
        if one.has("relu") or (one.has("ftz") and type in FORMATS):
            raise UnsupportedError(f"instruction: {one.text}")
        if one.has("ftz"):
            x, y = f"ftz({x})", f"ftz({y})"
        found = f"{one.opcode}_{'f32' if type == 'f32' else 'f64'}({x}, {y})"
        if one.has("NaN"):
            found = f"({x} != {x} || {y} != {y} ? NAN : {found})"
        return f"canonical_{'f32' if type == 'f32' else 'f64'}({found})"

    @instruction("neg", "abs", allows={"ftz"})
    def neg(self, one: Instruction) -> str:
        type, is_negation = one.type, one.opcode == "neg"
        half = type.removesuffix("x2")
        if half in FORMATS:
            bits = bits_type(type)
            sign = 0x8000 if half == type else 0x80008000
            x = self.read(one.operands[1], bits)
            return self.write(
                one.operands[0], bits, f"{x} ^ {sign}u" if is_negation else f"{x} & ~{sign}u"
            )
        (x,) = self._reads(one)
        if is_float(type):
            x = f"ftz({x})" if one.has("ftz") else x
            return self.write(one.operands[0], type, f"-{x}" if is_negation else f"fabs({x})")
        wrapped = f"0 - ({c_type(type)}){x}"
        return self.write(
            one.operands[0], type, wrapped if is_negation else f"{x} < 0 ? {wrapped} : {x}"
        )

    @instruction("copysign")
    def copysign(self, one: Instruction) -> str:
        sign, magnitude = self._reads(one)
        name = "copysignf" if one.type == "f32" else "copysign"
        return self.write(one.operands[0], one.type, f"{name}({magnitude}, {sign})")

    @instruction(
        "testp", allows={"finite", "infinite", "number", "notanumber", "normal", "subnormal"}
    )
    def testp(self, one: Instruction) -> str:
        (x,) = self._reads(one)
        test = {
            "finite": f"isfinite({x})", "infinite": f"isinf({x}) != 0", "number": f"{x} == {x}",
            "notanumber": f"{x} != {x}", "normal": f"isnormal({x})",
            "subnormal": f"fpclassify({x}) == FP_SUBNORMAL",
        }[one.parts[1]]  # fmt: skip
        return self.write(one.operands[0], "pred", test)

    # ---- Bits ----

    @instruction("and", "or", "xor")
    def logic(self, one: Instruction) -> str:
        x, y = self._reads(one)
        return self.write(one.operands[0], one.type, f"{x} {LOGIC[one.opcode]} {y}")

    @instruction("not", "cnot")
    def not_(self, one: Instruction) -> str:
        (x,) = self._reads(one)
        sign = "!" if one.type == "pred" or one.opcode == "cnot" else "~"
        return self.write(one.operands[0], one.type, sign + x)

    @instruction("lop3")
    def lop3(self, one: Instruction) -> str:
        x, y, z = (self.read(operand, "b32") for operand in one.operands[1:4])
        return self.write(one.operands[0], "b32", f"logic_3({x}, {y}, {z}, {one.operands[4]})")

    @instruction("shl", "shr")
    def shift(self, one: Instruction) -> str:
        x, n = self.read(one.operands[1], one.type), self.read(one.operands[2], "u32")
        beyond = f"({x} < 0 ? -1 : 0)" if one.type[0] == "s" and one.opcode == "shr" else "0"
        sign = "<<" if one.opcode == "shl" else ">>"
        value = f"{n} >= {8 * SIZES[one.type]} ? {beyond} : {x} {sign} {n}"
        return self.write(one.operands[0], one.type, value)

    @instruction("shf", allows={"l", "r", "wrap", "clamp"})
    def shf(self, one: Instruction) -> str:
        low, high, n = self._reads(one)
        n = f"({n} & 31)" if one.has("wrap") else f"({n} > 32 ? 32 : {n})"
        both = f"((uint64_t){high} << 32 | {low})"
        return self.write(
            one.operands[0], "b32", f"{both} >> {n}" if one.has("r") else f"{both} << {n} >> 32"
        )

    @instruction("popc", "clz", "brev", "bfind", allows={"shiftamt"})
    def count(self, one: Instruction) -> str:
        (x,) = self._reads(one)
        bits = 8 * SIZES[one.type]
        if one.opcode == "brev":
            return self.write(one.operands[0], one.type, f"reverse_bits({x}, {bits})")
        negative = f"{x} < 0" if one.type[0] == "s" else "0"
        value = {
            "popc": f"__builtin_popcountll({x})",
            "clz": f"{x} ? __builtin_clzll({x}) - {64 - bits} : {bits}",
            "bfind": f"find_bit({x}, {negative}, {bits}, {int(one.has('shiftamt'))})",
        }[one.opcode]
        return self.write(one.operands[0], "u32", value)

    @instruction("bfe", "bfi", "fns", "bmsk", allows={"clamp", "wrap"})
    def field(self, one: Instruction) -> str:
        bits, operands = 8 * SIZES[one.type], one.operands
        if one.opcode == "fns":
            types = ("b32", "b32", "s32")
            values = [self.read(each, kind) for each, kind in zip(operands[1:], types, strict=True)]
            return self.write(operands[0], "b32", f"find_nth({', '.join(values)})")
        first = 2 if one.opcode == "bfe" else 3
        if one.opcode == "bmsk":
            if one.has("wrap"):
                raise UnsupportedError(f"instruction: {one.text}")
            start, length = (self.read(each, "u32") for each in operands[1:])
            value = (
                f"({length} > 31 ? ~0ull : (1ull << {length}) - 1) << ({start} > 63 ? 63 : {start})"
            )
            return self.write(operands[0], "b32", value)
        values = [self.read(each, one.type) for each in operands[1:first]]
        values += [self.read(each, "u32") for each in operands[first:]]
        if one.opcode == "bfi":
            return self.write(operands[0], one.type, f"insert_bits({', '.join(values)}, {bits})")
        signed = int(one.type[0] == "s")
        return self.write(
            operands[0], one.type, f"extract_bits({', '.join(values)}, {bits}, {signed})"
        )

    @instruction("prmt", allows={"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"})
    def prmt(self, one: Instruction) -> str:
        x, y, selectors = self._reads(one, "b32")
        modes = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
        mode = next((part for part in one.parts if part in modes), None)
        if mode:
            selectors = f"mode_selectors({modes.index(mode)}, {selectors})"
        return self.write(one.operands[0], "b32", f"permute({x}, {y}, {selectors})")

    @instruction("dp4a")
    def dp4a(self, one: Instruction) -> str:
        x, y = (self.read(operand, "b32") for operand in one.operands[1:3])
        signs = [int(part[0] == "s") for part in one.parts[1:3]]
        sum = f"dot_product({x}, {y}, {signs[0]}, {signs[1]}) + {self.read(one.operands[3], 'b32')}"
        return self.write(one.operands[0], "b32", sum)

    @instruction("sad")
    def sad(self, one: Instruction) -> str:
        x, y, z = self._reads(one)
        return self.write(one.operands[0], one.type, f"({x} < {y} ? {y} - {x} : {x} - {y}) + {z}")

    # ---- Comparisons ----

    def _comparison(self, one: Instruction, type: str) -> str:
        name = one.parts[1]
        x, y = (self.read(operand, type) for operand in one.operands[1:3])
        if type.endswith("x2") or (one.has("ftz") and type in FORMATS):
            raise UnsupportedError(f"instruction: {one.text}")
        if not is_float(type):
            return f"({x} {COMPARISONS[name]} {y})"
        if one.has("ftz") and type == "f32":
            x, y = f"ftz({x})", f"ftz({y})"
        unordered = f"__builtin_isunordered({x}, {y})"
        if name in ("num", "nan"):
            return unordered if name == "nan" else f"!{unordered}"
        if name.endswith("u"):
            return f"({unordered} || {x} {COMPARISONS[name[:-1]]} {y})"
        return f"(!{unordered} && {x} {COMPARISONS[name]} {y})"

    @instruction("setp", "set", allows=COMPARISON_MODIFIERS)
    def setp(self, one: Instruction) -> str:
        found, code = self._comparison(one, one.type), ""
        logic = next((part for part in one.parts[2:] if part in LOGIC), None)
        results = one.operands[0].split("|")
        for result, test in zip(results, (found, f"!{found}"), strict=False):
            if logic:
                test = f"({test} {LOGIC[logic]} {self.read(one.operands[3], 'pred')})"
            if one.opcode == "setp":
                code += self.write(result, "pred", test)
            elif one.parts[-2] == "f32":
                code += self.write(result, "f32", f"{test} ? 1.0f : 0.0f")
            else:
                code += self.write(result, one.parts[-2], f"{test} ? -1 : 0")
        return code

    @instruction("selp")
    def selp(self, one: Instruction) -> str:
        type = bits_type(one.type)
        x, y = (self.read(operand, type) for operand in one.operands[1:3])
        return self.write(
            one.operands[0], type, f"{self.read(one.operands[3], 'pred')} ? {x} : {y}"
        )

    @instruction("slct", allows={"ftz"})
    def slct(self, one: Instruction) -> str:
        type = bits_type(one.parts[-2])
        x, y = (self.read(operand, type) for operand in one.operands[1:3])
        return self.write(
            one.operands[0], type, f"{self.read(one.operands[3], one.type)} >= 0 ? {x} : {y}"
        )

    # ---- Moves and conversions ----

    @instruction("mov")
    def mov(self, one: Instruction) -> str:
        destination, source = one.operands
        type = bits_type(one.type) if one.type != "pred" else "pred"
        if source.startswith("{"):
            parts = split_operands(source[1:-1])
            bits = 8 * SIZES[type] // len(parts)
            values = [
                f"({c_type(type)}){self.read(part, f'b{bits}')} << {bits * i}"
                for i, part in enumerate(parts)
            ]
            return self.write(destination, type, " | ".join(values))
        if destination.startswith("{"):
            parts = split_operands(destination[1:-1])
            bits = 8 * SIZES[type] // len(parts)
            writes = [
                self.write(part, f"b{bits}", f"whole >> {bits * i}") for i, part in enumerate(parts)
            ]
            return f"{{ const uint64_t whole = {self.read(source, type)}; {' '.join(writes)} }}"
        return self.write(destination, type, self.read(source, type))

    @instruction("cvta", allows={*SPACES, "to", "shared::cta", "param::entry"})
    def cvta(self, one: Instruction) -> str:
        value = self.read(one.operands[1], "u64")
        if one.has("shared", "shared::cta"):
            value += " - (uint64_t)block->shared" if one.has("to") else " + (uint64_t)block->shared"
        return self.write(one.operands[0], "u64", value)

    @instruction("isspacep", allows={"global", "shared", "shared::cta"})
    def isspacep(self, one: Instruction) -> str:
        test = f"IS_SHARED({self.read(one.operands[1], 'u64')})"
        return self.write(one.operands[0], "pred", f"!{test}" if one.has("global") else test)

    @instruction("cvt", allows=FLOAT | {*TO_INTEGRAL, "relu", "satfinite"})
    def cvt(self, one: Instruction) -> str:
        to, of = one.parts[-2:]
        if to.endswith("x2"):
            return self._convert_pair(one, to.removesuffix("x2"), of)
        value = self.read(one.operands[1], of)
        if one.has("ftz") and of == "f32":
            value = f"ftz({value})"
        if one.has("relu"):
            value = f"({value} < 0 ? 0 : {value})"
        if is_float(to):
            return self._convert_to_float(one, value, to, of)
        if not is_float(of):
            if one.has("sat"):
                bits, is_signed = 8 * SIZES[to], to[0] == "s"
                least = f"-((__int128)1 << {bits - 1})" if is_signed else "0"
                value = f"CLAMP({value}, {least}, ((__int128)1 << {bits - is_signed}) - 1)"
            return self.write(one.operands[0], to, value)
        rounding = next(TO_INTEGRAL[part] for part in one.parts if part in TO_INTEGRAL)
        wide = SIZES[to] == 8 or of == "f64"
        of_nan = f"({c_type(to)})((uint64_t)1 << {8 * SIZES[to] - 1})" if wide else "0"
        return self.write(one.operands[0], to, f"integer_{to}({rounding}({value}), {of_nan})")

    def _convert_to_float(self, one: Instruction, value: str, to: str, of: str) -> str:
        mode = next((ROUNDING[part] for part in one.parts if part in ROUNDING), ROUNDING["rn"])
        integral = next((TO_INTEGRAL[part] for part in one.parts if part in TO_INTEGRAL), None)
        if integral:
            value = f"{integral}({value})"
        if one.has("sat"):
            value = f"sat_f64({value})"
        if to in FORMATS:
            finite = int(one.has("satfinite"))
            value = f"narrow({value}, &{to}, {mode}, {finite})"
            return self.write(one.operands[0], f"b{8 * SIZES[to]}", value)
        c = "float" if to == "f32" else "double"
        if mode != ROUNDING["rn"]:
            source = c_type(of) if not is_float(of) else "double"
            value = f"ROUNDED({mode}, {c}, {source}, {value}, 0, 0, x)"
        value = f"canonical_{to}(({c}){value})"
        if one.has("ftz") and to == "f32":
            value = f"ftz({value})"
        return self.write(one.operands[0], to, value)

    def _convert_pair(self, one: Instruction, to: str, of: str) -> str:
        """Convert two floats, the first of which becomes the upper half, or a pair of floats."""
        mode = next((ROUNDING[part] for part in one.parts if part in ROUNDING), ROUNDING["rn"])
        if of.endswith("x2"):
            half, bits = of.removesuffix("x2"), 4 * SIZES[of]
            source = self.read(one.operands[1], bits_type(of))
            values = [f"widen({source} >> {s} & {(1 << bits) - 1}, &{half})" for s in (bits, 0)]
        else:
            values = [self.read(operand, of) for operand in one.operands[1:3]]
        if one.has("ftz") and of == "f32":
            values = [f"ftz({value})" for value in values]
        if one.has("relu"):
            values = [f"({value} < 0 ? 0 : {value})" for value in values]
        finite = int(one.has("satfinite"))
        high, low = (f"narrow({value}, &{to}, {mode}, {finite})" for value in values)
        bits = 4 * SIZES[f"{to}x2"]
        return self.write(one.operands[0], f"b{2 * bits}", f"{high} << {bits} | {low}")

    # ---- Memory ----

    def _access(self, one: Instruction, operand: str, nbytes: int) -> tuple[str, str]:
        """Return the checks of an access, and its address on the host."""
        found = re.fullmatch(r"\[\s*(.+?)\s*\]", operand, re.S)
        if found is None:
            raise UnsupportedError(f"address: {operand}")
        text = quoted(one.text)
        checks = f"const uint64_t address = {self.read(found[1], 'u64')}; "
        checks += f"CHECK_ALIGNED(address, {nbytes}, {text}) "
        if one.has("shared", "shared::cta"):
            checks += f"CHECK_SHARED(address, {nbytes}, {text}) "
            return checks, "(block->shared + address)"
        return checks, "address"

    def _order(self, one: Instruction) -> str | None:
        return next((ORDERS[part] for part in one.parts if part in ORDERS), None)

    def _poll(self, one: Instruction) -> str:
        """Let other threads run if the access repeats: the thread may wait for their writes."""
        if not self.in_loop:
            return ""
        if not one.has("shared", "shared::cta"):
            self.flags |= 2
        return self._suspend("YIELDED", poll=True) + " "

    @instruction(
        "ld", "ldu", allows=MEMORY | CACHING | SCOPES | {"volatile", "relaxed", "acquire", "mmio"}
    )
    def ld(self, one: Instruction) -> str:
        type, order = bits_type(one.type), self._order(one)
        destination = one.operands[0]
        parts = split_operands(destination[1:-1]) if destination[0] == "{" else [destination]
        checks, address = self._access(one, one.operands[1], SIZES[type] * len(parts))
        code = self._poll(one) if order else ""
        code += f"{{ {checks}const {c_type(type)} *const from = (const {c_type(type)} *){address}; "
        for i, part in enumerate(parts):
            value = f"__atomic_load_n(from + {i}, {order})" if order else f"from[{i}]"
            code += self.write(part, type, value) + " "
        return code + "}"

    @instruction(
        "st", allows=MEMORY | CACHING | SCOPES | {"volatile", "relaxed", "release", "mmio"}
    )
    def st(self, one: Instruction) -> str:
        type, order = bits_type(one.type), self._order(one)
        source = one.operands[1]
        parts = split_operands(source[1:-1]) if source[0] == "{" else [source]
        checks, address = self._access(one, one.operands[0], SIZES[type] * len(parts))
        code = f"{{ {checks}{c_type(type)} *const into = ({c_type(type)} *){address}; "
        for i, part in enumerate(parts):
            value = self.read(part, type)
            store = f"__atomic_store_n(into + {i}, {value}, {order});"
            code += store if order else f"into[{i}] = {value}; "
        return code + "}"

    @instruction("atom", "red", allows=ATOMIC_MODIFIERS)
    def atom(self, one: Instruction) -> str:
        destination, place, *sources = ["_"] * (one.opcode == "red") + one.operands
        operation = next(part for part in one.parts if part in ATOMIC_OPERATIONS)
        order, type = self._order(one) or ORDERS["relaxed"], one.type
        checks, address = self._access(one, place, SIZES[type])
        code = self._poll(one) if one.has("acquire", "acq_rel") else ""
        bits = bits_type(type)
        if operation == "cas":
            expected, value = (self.read(source, bits) for source in sources)
            old = f"COMPARE_AND_SWAP({c_type(bits)}, {address}, {order}, {expected}, {value})"
        else:
            value = self._updated(one, operation, sources[0])
            old = f"ATOMIC({c_type(bits)}, {address}, {order}, {value})"
        return f"{code}{{ {checks}{self.write(destination, bits, old)} }}"

    def _updated(self, one: Instruction, operation: str, source: str) -> str:
        """Return the new bits of memory as an expression of the variable `old`."""
        type = one.type
        half = type.removesuffix("x2")
        if half in FORMATS and operation == "add":
            bits, parts = self.read(source, bits_type(type)), []
            for shift in (0, 16) if half != type else (0,):
                x, y = (f"widen({each} >> {shift} & 0xffff, &{half})" for each in ("old", bits))
                sum = f"narrow(sum_to_odd({x}, {y}), &{half}, FE_TONEAREST, 0)"
                parts.append(f"{sum} << {shift}")
            return " | ".join(parts)
        value = self.read(source, type)
        if is_float(type):
            if operation != "add":
                raise UnsupportedError(f"instruction: {one.text}")
            # GPUs flush subnormal numbers here, except in shared memory.
            flush = type == "f32" and not one.has("shared", "shared::cta")
            ftz = "ftz" if flush else ""
            sum = f"{ftz}(to_{type}(old)) + {ftz}({value})"
            return f"from_{type}({ftz}(canonical_{type}({sum})))"
        return {
            "add": f"old + {value}", "min": f"old < {value} ? old : {value}",
            "max": f"old > {value} ? old : {value}", "and": f"old & {value}",
            "or": f"old | {value}", "xor": f"old ^ {value}", "exch": value,
            "inc": f"old >= {value} ? 0 : old + 1",
            "dec": f"old == 0 || old > {value} ? {value} : old - 1",
        }[operation]  # fmt: skip

    @instruction("membar", "fence", allows={*SCOPES, *ORDERS, "proxy", "alias"})
    def fence(self, one: Instruction) -> str:
        return f"__atomic_thread_fence({self._order(one) or ORDERS['sc']});"

    @instruction("prefetch", "prefetchu", "griddepcontrol", allows={
        "global", "local", "L1", "L2", "L2::evict_last", "wait", "launch_dependents",
    })  # fmt: skip
    def hint(self, one: Instruction) -> str:
        return ""

    # ---- Other threads ----

    @instruction("bar", "barrier", allows={
        "cta", "sync", "arrive", "red", "aligned", "and", "or", "popc", "warp",
    })  # fmt: skip
    def bar(self, one: Instruction) -> str:
        operands = list(one.operands)
        if one.has("warp"):
            return self._warp(one, "WARP_SYNC", operands[0])
        operation, code, result = "SYNC", "", ""
        if one.has("red"):
            operation = next(part for part in one.parts if part in ("and", "or", "popc")).upper()
            result = operands.pop(0)
            code = f"thread->predicate = {self.read(operands.pop(), 'pred')}; "
        elif one.has("arrive"):
            operation = "ARRIVE"
        expected = self.read(operands[1], "u32") if len(operands) > 1 else "0"
        code += (
            f"thread->operation = BARRIER_{operation}; thread->expected = {expected}; "
            f"thread->barrier = {self.read(operands[0], 'u32')}; {self._suspend('AT_BARRIER')} "
        )
        if not result:
            return code
        return code + self.write(result, "u32" if one.has("popc") else "pred", "thread->result")

    def _warp(self, one: Instruction, operation: str, mask: str, operand: str = "0") -> str:
        if not one.has("sync", "warp"):  # the old forms have no mask
            raise UnsupportedError(f"instruction: {one.text}")
        return (
            f"thread->operation = {operation}; thread->mask = {self.read(mask, 'b32')}; "
            f"thread->operand = {operand}; {self._suspend('AT_WARP')} "
        )

    def _warp_results(self, one: Instruction, type: str) -> str:
        value, _, predicate = one.operands[0].partition("|")
        code = self.write(value, type, "thread->result")
        return code + (self.write(predicate, "pred", "thread->predicate") if predicate else "")

    @instruction("shfl", allows={"sync", "up", "down", "bfly", "idx"})
    def shfl(self, one: Instruction) -> str:
        _, value, lane, clamp, mask = one.operands
        code = (
            f"thread->lane = {self.read(lane, 'b32')}; thread->clamp = {self.read(clamp, 'b32')}; "
        )
        code += self._warp(one, f"SHFL_{one.parts[2].upper()}", mask, self.read(value, "b32"))
        return code + self._warp_results(one, "b32")

    @instruction("vote", allows={"sync", "all", "any", "uni", "ballot"})
    def vote(self, one: Instruction) -> str:
        result, value, mask = one.operands
        code = self._warp(one, f"VOTE_{one.parts[2].upper()}", mask, self.read(value, "pred"))
        return code + self.write(result, one.type, "thread->result")

    @instruction("match", allows={"sync", "any", "all"})
    def match(self, one: Instruction) -> str:
        code = self._warp(
            one,
            f"MATCH_{one.parts[1].upper()}",
            one.operands[2],
            self.read(one.operands[1], one.type),
        )
        return code + self._warp_results(one, "b32")

    @instruction("redux", allows={"sync", "add", "min", "max", "and", "or", "xor"})
    def redux(self, one: Instruction) -> str:
        operation = f"REDUX_{one.parts[2].upper()}"
        if one.has("min", "max"):
            operation += f"_{one.type[0].upper()}"
        code = self._warp(one, operation, one.operands[2], self.read(one.operands[1], "b32"))
        return code + self.write(one.operands[0], "b32", "thread->result")

    @instruction("elect", allows={"sync"})
    def elect(self, one: Instruction) -> str:
        return self._warp(one, "ELECT", one.operands[1]) + self._warp_results(one, "b32")

    @instruction("activemask")
    def activemask(self, one: Instruction) -> str:
        """Return only this thread: CUDA does not promise that other threads are with it."""
        return self.write(one.operands[0], "b32", SPECIAL["%lanemask_eq"])

    @instruction("nanosleep")
    def nanosleep(self, one: Instruction) -> str:
        return self._suspend("YIELDED") if self.function.is_kernel else ""

    # ---- Control ----

    @instruction("bra", allows={"uni"})
    def bra(self, one: Instruction) -> str:
        return f"goto {self.scope[one.operands[0]].c_name};"

    @instruction("brx", allows={"idx", "uni"})
    def brx(self, one: Instruction) -> str:
        labels = self.scope[f"{one.operands[1]} table"].type.split(",")
        gotos = [f"case {i}: goto {self.scope[name].c_name};" for i, name in enumerate(labels)]
        return f"switch ({self.read(one.operands[0], 'u32')}) {{ {' '.join(gotos)} }}"

    @instruction("ret", "exit", allows={"uni"})
    def ret(self, one: Instruction) -> str:
        if one.opcode == "exit" and not self.function.is_kernel:
            raise UnsupportedError("exit in a function that is not inlined")
        return "return EXITED;"

    @instruction("trap", "brkpt")
    def trap(self, one: Instruction) -> str:
        return f"FAULT(LAUNCH_FAILURE, 0, {quoted(one.text)})"

    @instruction("call", allows={"uni"})
    def call(self, one: Instruction) -> str:
        groups = [each for each in one.operands if each.startswith("(")]
        name = next(each for each in one.operands if not each.startswith("("))
        if name == "__assertfail":
            return f"FAULT(ASSERTION, 0, {quoted(one.text)})"
        if name not in {each.name for each in self.module.functions}:
            raise UnsupportedError(f"function: {name}")
        places = [one for group in groups for one in split_operands(group[1:-1])]
        arguments = "".join(f", (char *){self.read(each, 'u64')}" for each in places)
        call = f"call_{re.sub(r'[^0-9A-Za-z_]', '_', name)}(thread, block{arguments})"
        return f"if ({call} == FAULTED) return FAULTED;"
