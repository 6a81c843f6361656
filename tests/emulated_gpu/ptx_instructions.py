"""The C code of PTX instructions: those that NVRTC emits for CuPy's and mpicoll's kernels.

Each instruction has a method of InstructionWriter, registered with its modifiers. Any other
modifier is an error, because ignoring it could change results.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ptx_functions import FunctionWriter, bits_type, c_type, is_float, quoted
from ptx_parser import SIZES, Instruction, UnsupportedError, split_operands

SPACES = {"const", "global", "local", "param", "shared"}
ORDERS = {
    "relaxed": "__ATOMIC_RELAXED", "volatile": "__ATOMIC_RELAXED", "acquire": "__ATOMIC_ACQUIRE",
    "release": "__ATOMIC_RELEASE", "acq_rel": "__ATOMIC_ACQ_REL", "sc": "__ATOMIC_SEQ_CST",
}  # fmt: skip
TO_INTEGRAL = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
SCOPES = {"cta", "gpu", "sys", "gl"}
MEMORY = {*SPACES, *SCOPES, "v2", "v4", "nc", "ca", "cg", "cs", "cv", "wt"}
FLOAT = {"rn", "ftz", "sat"}
COMPARISONS = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=",
    "hi": ">", "hs": ">=",
}  # fmt: skip
UNORDERED = {f"{one}u" for one in ("eq", "ne", "lt", "le", "gt", "ge")}
#: C expressions of operands.
FLOAT_EXPRESSIONS = {
    "add": "({0} + {1})", "sub": "({0} - {1})", "mul": "({0} * {1})", "div": "({0} / {1})",
    "fma": "fma{f}({0}, {1}, {2})", "mad": "fma{f}({0}, {1}, {2})", "sqrt": "sqrt{f}({0})",
    "rcp": "(1 / {0})",
}  # fmt: skip
INTEGER_EXPRESSIONS = {
    "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "neg": "0 - ({c}){0}",
    "abs": "{0} < 0 ? 0 - ({c}){0} : {0}", "min": "{0} < {1} ? {0} : {1}",
    "max": "{0} > {1} ? {0} : {1}", "div": "div_{type}({0}, {1})", "rem": "rem_{type}({0}, {1})",
    "not": "~{0}", "prmt": "permute({0}, {1}, {2})",
    "popc": "__builtin_popcountll({0})",
    "clz": "{0} ? __builtin_clzll({0}) - (64 - {bits}) : {bits}",
}  # fmt: skip
#: The new value of memory as an expression of the variable `old`.
ATOMIC_OPERATIONS = {
    "add": "old + {0}", "min": "old < {0} ? old : {0}", "max": "old > {0} ? old : {0}",
    "and": "old & {0}", "or": "old | {0}", "xor": "old ^ {0}", "exch": "{0}", "cas": "",
}  # fmt: skip
Handler = Callable[["InstructionWriter", Instruction], str]
HANDLERS: dict[str, tuple[Handler, set[str]]] = {}


def instruction(*opcodes: str, allows: set[str] = frozenset()) -> Callable[[Handler], Handler]:
    """Register a method for opcodes, with the modifiers that it supports besides types."""

    def register(handler: Handler) -> Handler:
        for opcode in opcodes:
            HANDLERS[opcode] = handler, {*allows}
        return handler

    return register


def unsupported(one: Instruction) -> UnsupportedError:
    return UnsupportedError(f"instruction: {one.text}")


class InstructionWriter(FunctionWriter):
    """The C code of a function with its instructions."""

    def _statement(self, one: Instruction, in_loop: bool) -> str:
        handler, allowed = HANDLERS.get(one.opcode, (None, set()))
        unknown = [part for part in one.parts[1:] if part not in allowed and part not in SIZES]
        if handler is None or unknown:
            raise unsupported(one)
        self.in_loop = in_loop
        try:
            code = handler(self, one)
        except (IndexError, KeyError) as error:
            raise UnsupportedError(f"instruction: {one.text} ({error!r})") from error
        return f"if ({self.read(one.guard, 'pred')}) {{ {code} }}" if one.guard else code

    # ---- Arithmetic ----

    def _float(self, one: Instruction) -> str:
        """Return a float expression, rounded to nearest."""
        if one.type not in ("f32", "f64"):
            raise unsupported(one)
        is_single = one.type == "f32"
        template = FLOAT_EXPRESSIONS[one.opcode].replace("{f}", "f" if is_single else "")
        values = self._reads(one)
        flushes = one.has("ftz") and is_single
        if flushes:
            values = [f"ftz({value})" for value in values]
        result = template.format(*values)
        result = f"canonical({result})" if is_single else result
        result = f"ftz({result})" if flushes else result
        return f"sat({result})" if one.has("sat") else result

    @instruction("sqrt", "rcp", allows=FLOAT)
    def function_of_float(self, one: Instruction) -> str:
        return self.write(one.operands[0], one.type, self._float(one))

    @instruction("and", "or", "xor", "prmt", "popc", "clz", "rem", "div", allows=FLOAT)
    def integer(self, one: Instruction) -> str:
        if is_float(one.type):
            return self.write(one.operands[0], one.type, self._float(one))
        value = INTEGER_EXPRESSIONS[one.opcode].format(
            *self._reads(one), c=c_type(one.type), type=one.type, bits=8 * SIZES[one.type]
        )
        return self.write(
            one.operands[0], "u32" if one.opcode in ("popc", "clz") else one.type, value
        )

    @instruction("not")
    def not_(self, one: Instruction) -> str:
        (x,) = self._reads(one)
        return self.write(one.operands[0], one.type, f"{'!' if one.type == 'pred' else '~'}{x}")

    @instruction("min", "max", "neg", "abs", allows={"ftz"})
    def extremum_or_sign(self, one: Instruction) -> str:
        if not is_float(one.type):
            return self.integer(one)
        if one.type == "f16":
            raise unsupported(one)
        values = self._reads(one)
        values = [f"ftz({value})" for value in values] if one.has("ftz") else values
        if one.opcode in ("neg", "abs"):
            value = f"-{values[0]}" if one.opcode == "neg" else f"fabs({values[0]})"
        else:
            value = f"{one.opcode}_{one.type}({', '.join(values)})"
            value = f"canonical({value})" if one.type == "f32" else value
        return self.write(one.operands[0], one.type, value)

    @instruction("add", "sub", "mul", "mad", "fma", allows=FLOAT | {"lo", "hi", "wide"})
    def add(self, one: Instruction) -> str:
        if is_float(one.type):
            return self.write(one.operands[0], one.type, self._float(one))
        if one.has("sat"):
            raise unsupported(one)
        # Signed integers wrap around like unsigned ones.
        if one.opcode in ("add", "sub"):
            x, y = self._reads(one, f"u{8 * SIZES[one.type]}")
            return self.write(one.operands[0], one.type, f"{x} {'+-'[one.opcode == 'sub']} {y}")
        value, type = self._product(one)
        if len(one.operands) > 3:
            value = f"({c_type(type)}){value} + {self.read(one.operands[3], type)}"
        return self.write(one.operands[0], type, value)

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

    # ---- Bits ----

    @instruction("shl", "shr")
    def shift(self, one: Instruction) -> str:
        x, n = self.read(one.operands[1], one.type), self.read(one.operands[2], "u32")
        beyond = f"({x} < 0 ? -1 : 0)" if one.type[0] == "s" and one.opcode == "shr" else "0"
        sign = "<<" if one.opcode == "shl" else ">>"
        value = f"{n} >= {8 * SIZES[one.type]} ? {beyond} : {x} {sign} {n}"
        return self.write(one.operands[0], one.type, value)

    @instruction("bfi")
    def bfi(self, one: Instruction) -> str:
        bits = 8 * SIZES[one.type]
        a, b = (self.read(each, one.type) for each in one.operands[1:3])
        start, length = (self.read(each, "u32") for each in one.operands[3:])
        value = f"insert_bits({a}, {b}, {start}, {length}, {bits})"
        return self.write(one.operands[0], one.type, value)

    # ---- Comparisons ----

    @instruction("setp", allows={*COMPARISONS, *UNORDERED, "num", "nan", "ftz"})
    def setp(self, one: Instruction) -> str:
        _, name, *_ = one.parts
        x, y = self._reads(one)
        if one.has("ftz"):
            x, y = f"ftz({x})", f"ftz({y})"
        unordered = f"__builtin_isunordered({x}, {y})"
        if not is_float(one.type):
            test = f"({x} {COMPARISONS[name]} {y})"
        elif name in ("num", "nan"):
            test = unordered if name == "nan" else f"!{unordered}"
        elif name in UNORDERED:
            test = f"({unordered} || {x} {COMPARISONS[name[:-1]]} {y})"
        else:
            test = f"(!{unordered} && {x} {COMPARISONS[name]} {y})"
        return self.write(one.operands[0], "pred", test)

    @instruction("selp")
    def selp(self, one: Instruction) -> str:
        type = bits_type(one.type)
        x, y = (self.read(operand, type) for operand in one.operands[1:3])
        return self.write(
            one.operands[0], type, f"{self.read(one.operands[3], 'pred')} ? {x} : {y}"
        )

    # ---- Moves and conversions ----

    @instruction("mov")
    def mov(self, one: Instruction) -> str:
        destination, source = one.operands
        type = bits_type(one.type) if one.type != "pred" else "pred"
        vector = next((each for each in (source, destination) if each.startswith("{")), "")
        if not vector:
            return self.write(destination, type, self.read(source, type))
        parts = split_operands(vector[1:-1])
        bits = 8 * SIZES[type] // len(parts)
        if vector == source:
            values = [
                f"({c_type(type)}){self.read(part, f'b{bits}')} << {bits * i}"
                for i, part in enumerate(parts)
            ]
            return self.write(destination, type, " | ".join(values))
        writes = [
            self.write(part, f"b{bits}", f"whole >> {bits * i}") for i, part in enumerate(parts)
        ]
        return f"{{ const uint64_t whole = {self.read(source, type)}; {' '.join(writes)} }}"

    @instruction("cvta", allows={*SPACES, "to"})
    def cvta(self, one: Instruction) -> str:
        value = self.read(one.operands[1], "u64")
        if one.has("shared"):
            value += " - (uint64_t)block->shared" if one.has("to") else " + (uint64_t)block->shared"
        return self.write(one.operands[0], "u64", value)

    @instruction("cvt", allows={*TO_INTEGRAL, "rn", "ftz", "sat"})
    def cvt(self, one: Instruction) -> str:
        to, of = one.parts[-2:]
        value = self.read(one.operands[1], of)
        if one.has("ftz") and of == "f32":
            value = f"ftz({value})"
        integral = next((TO_INTEGRAL[part] for part in one.parts if part in TO_INTEGRAL), "")
        value = f"{integral}({value})" if integral else value
        if not is_float(to):
            if one.has("sat"):
                raise unsupported(one)
            if is_float(of):
                wide = SIZES[to] == 8 or of == "f64"
                of_nan = f"({c_type(to)})((uint64_t)1 << {8 * SIZES[to] - 1})" if wide else "0"
                value = f"integer_{to}({value}, {of_nan})"
            return self.write(one.operands[0], to, value)
        value = f"sat({value})" if one.has("sat") else value
        if to == "f32":
            value = f"canonical((float){value})"
            value = f"ftz({value})" if one.has("ftz") else value
        return self.write(one.operands[0], to, value)

    # ---- Memory ----

    def _access(self, one: Instruction, operand: str, nbytes: int) -> tuple[str, str]:
        """Return the checks of an access, and its address on the host."""
        found = re.fullmatch(r"\[\s*(.+?)\s*\]", operand, re.S)
        if found is None:
            raise UnsupportedError(f"address: {operand}")
        text = quoted(one.text)
        checks = f"const uint64_t address = {self.read(found[1], 'u64')}; "
        checks += f"CHECK_ALIGNED(address, {nbytes}, {text}) "
        if one.has("shared"):
            checks += f"CHECK_SHARED(address, {nbytes}, {text}) "
            return checks, "(block->shared + address)"
        return checks, "address"

    def _order(self, one: Instruction) -> str | None:
        return next((ORDERS[part] for part in one.parts if part in ORDERS), None)

    def _poll(self, one: Instruction) -> str:
        """Let other threads run if the access repeats: the thread may wait for their writes."""
        if not self.in_loop:
            return ""
        if not one.has("shared"):
            self.flags |= 2
        return self._suspend("YIELDED", poll=True) + " "

    @instruction("ld", "st", allows=MEMORY | {"volatile", "relaxed", "acquire", "release"})
    def access(self, one: Instruction) -> str:
        type, order, is_load = bits_type(one.type), self._order(one), one.opcode == "ld"
        place, values = one.operands[::-1] if is_load else one.operands
        parts = split_operands(values[1:-1]) if values[0] == "{" else [values]
        checks, address = self._access(one, place, SIZES[type] * len(parts))
        c = f"{'const ' if is_load else ''}{c_type(type)}"
        code = self._poll(one) if order and is_load else ""
        code += f"{{ {checks}{c} *const at = ({c} *){address}; "
        for i, part in enumerate(parts):
            if is_load:
                value = f"__atomic_load_n(at + {i}, {order})" if order else f"at[{i}]"
                code += self.write(part, type, value) + " "
            elif order:
                code += f"__atomic_store_n(at + {i}, {self.read(part, type)}, {order}); "
            else:
                code += f"at[{i}] = {self.read(part, type)}; "
        return code + "}"

    @instruction("atom", "red", allows={*ATOMIC_OPERATIONS, *ORDERS, *MEMORY})
    def atom(self, one: Instruction) -> str:
        destination, place, *sources = ["_"] * (one.opcode == "red") + one.operands
        operation = next(part for part in one.parts if part in ATOMIC_OPERATIONS)
        order, type, bits = self._order(one) or ORDERS["relaxed"], one.type, bits_type(one.type)
        checks, address = self._access(one, place, SIZES[type])
        code = self._poll(one) if one.has("acquire", "acq_rel") else ""
        if operation == "cas":
            expected, value = (self.read(source, bits) for source in sources)
            old = f"COMPARE_AND_SWAP({c_type(bits)}, {address}, {order}, {expected}, {value})"
            return f"{code}{{ {checks}{self.write(destination, bits, old)} }}"
        value = self.read(sources[0], type)
        if not is_float(type):
            value = ATOMIC_OPERATIONS[operation].format(value)
        elif operation != "add" or type == "f16":
            raise unsupported(one)
        elif type == "f64":
            value = f"from_f64(to_f64(old) + {value})"
        else:  # GPUs flush subnormal numbers here, except in shared memory.
            ftz = "" if one.has("shared") else "ftz"
            value = f"from_f32({ftz}(canonical({ftz}(to_f32(old)) + {ftz}({value}))))"
        old = f"ATOMIC({c_type(bits)}, {address}, {order}, {value})"
        return f"{code}{{ {checks}{self.write(destination, bits, old)} }}"

    # ---- Other threads ----

    @instruction("bar", "barrier", allows={"sync", "aligned", "red", "or", "warp"})
    def bar(self, one: Instruction) -> str:
        if one.has("warp"):
            if one.operands[0] not in ("-1", "0xffffffff"):
                raise unsupported(one)
            return self._suspend("AT_WARP_BARRIER")
        if one.has("red"):
            result, barrier, value = one.operands
            code = f"thread->predicate = {self.read(value, 'pred')}; "
        else:
            barrier, code, result = one.operands[0], "", "_"
        if barrier != "0" or len(one.operands) > 1 + 2 * one.has("red"):
            raise unsupported(one)
        code += f"{self._suspend('AT_BARRIER')} "
        return code + self.write(result, "pred", "thread->result")

    @instruction("shfl", allows={"sync", "up", "down", "bfly", "idx"})
    def shfl(self, one: Instruction) -> str:
        results, value, step, clamp, mask = one.operands
        if not one.has("sync"):
            raise unsupported(one)
        result, _, predicate = results.partition("|")
        return (
            f"if ({self.read(mask, 'b32')} != 0xffffffffu) "
            f"FAULT(LAUNCH_FAILURE, 0, {quoted(one.text)}) "
            f"thread->shuffle = {one.parts[2].upper()}; "
            f"thread->operand = {self.read(value, 'b32')}; "
            f"thread->step = {self.read(step, 'b32')}; "
            f"thread->clamp = {self.read(clamp, 'b32')}; {self._suspend('AT_WARP_BARRIER')} "
            + self.write(result, "b32", "thread->result")
            + (self.write(predicate, "pred", "thread->predicate") if predicate else "")
        )

    @instruction("nanosleep")
    def nanosleep(self, one: Instruction) -> str:
        return self._suspend("YIELDED") if self.function.is_kernel else ""

    # ---- Control ----

    @instruction("bra", allows={"uni"})
    def bra(self, one: Instruction) -> str:
        return f"goto {self.scope[one.operands[0]].c_name};"

    @instruction("ret", "exit", allows={"uni"})
    def ret(self, one: Instruction) -> str:
        if one.opcode == "exit" and not self.function.is_kernel:
            raise UnsupportedError("exit in a function that is not inlined")
        return "return EXITED;"

    @instruction("trap")
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
