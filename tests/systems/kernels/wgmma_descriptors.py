"""Check the addresses of tiles in the machine code (SASS) of kernels with WGMMA.

WGMMA instructions read tiles in shared memory through descriptors, which are in uniform registers
(UR). The instructions of one matmul read parts of the same tiles. Their descriptors must therefore
differ by constants.

ptxas 12.8 has compiled a kernel wrongly in this respect. Both branches of a condition had the same
matmul. In one branch, ptxas used a register for descriptors that it sets only in the other one. The
kernel returned wrong results, and neither its source nor its PTX contains the error.

`wrong_matmuls` finds such errors by symbolic execution. A value is a symbol plus a constant. Equal
symbols are equal values. An unknown instruction gives its result a new symbol. It cannot hide an
error, unless it writes more registers than `width_of` knows, but it can lead to an error that does
not exist.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from typing import Any, NamedTuple

# A symbol and a constant that is added to it. The symbol of a constant is "", and that of an
# exclusive or is the tuple of its operands.
Value = tuple[str | tuple[Any, ...], int]

LINE = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:(@!?U?P[0-9T]) +)?([A-Z][\w.]*) *(.*?) *;")
REGISTER = re.compile(r"(UR|R)(\d+|Z)")
PREDICATE = re.compile(r"!?U?P[0-9T]")
CONSTANT = re.compile(r"-?0x[0-9a-f]+")
STACK = re.compile(r"\[R1(?:\+0x([0-9a-f]+))?\]")  # where ptxas stores registers that it spills
MASK = 0xFFFFFFFF
ZERO: Value = "", 0
OR, XOR = "0xfc", "0x3c"  # tables of truth of LOP3 for a | b and a ^ b
# Instructions whose first operand is not a result
WITHOUT_RESULT = (
    "BAR", "BRA", "BREAK", "BRX", "BSSY", "BSYNC", "CCTL", "CGAERRBAR", "DEPBAR", "ERRBAR", "EXIT",
    "FENCE", "MEMBAR", "NOP", "RED", "RET", "ST", "SYNCS", "UBLK", "USETMAXREG", "UTMA",
    "WARPGROUP", "WARPSYNC",
)  # fmt: skip
# Instructions whose result depends only on their operands
PURE = {
    "CS2R", "IABS", "IADD3", "IMAD", "LDC", "LEA", "LOP3", "MOV", "R2UR", "SEL", "SGXT", "SHF",
    "UIADD3", "UIMAD", "ULDC", "ULEA", "ULOP3", "UMOV", "USEL", "USGXT", "USHF", "VIADD",
}  # fmt: skip


class Instruction(NamedTuple):
    address: int
    predicate: str | None
    name: str  # with modifiers, such as IMAD.WIDE
    operands: list[str]

    @property
    def base(self) -> str:
        return self.name.split(".")[0]

    def targets(self) -> list[int]:
        return [int(x, 16) for x in self.operands if CONSTANT.fullmatch(x)]


class Block(NamedTuple):
    """Instructions that are always executed one after the other, and the blocks that may follow."""

    instructions: list[Instruction]
    next: list[int]


class State(dict[str, Value]):
    """Values of registers. A register that was not written has a symbol of its own."""

    def __init__(self, block: int, values: dict[str, Value] | None = None):
        super().__init__(values or {})
        self.block = block

    def __missing__(self, name: str) -> Value:
        return f"{name} at {self.block:x}", 0

    def value(self, operand: str) -> Value:
        """Return the value of an operand: a constant, a register or, as a symbol, any other."""
        if CONSTANT.fullmatch(operand):
            return "", int(operand, 16) & MASK
        if operand.split(".")[0] in ("RZ", "URZ"):
            return ZERO
        found = REGISTER.search(operand)
        if found is None:
            return operand, 0
        symbol, constant = self[found[0]]
        if operand == found[0]:
            return symbol, constant
        if operand == f"-{found[0]}" and not symbol:
            return "", -constant & MASK
        return operand.replace(found[0], str((symbol, constant))), 0  # such as -R1 or |R1|


def parse(sass: str) -> list[Instruction]:
    """Return the instructions of a kernel."""
    found = []
    for line in map(LINE.search, sass.splitlines()):
        if line:
            # Commas in brackets do not separate operands.
            operands = re.split(r", *(?![^\[]*\])", line[4].replace(".reuse", ""))
            found.append(Instruction(int(line[1], 16), line[2], line[3], operands))
    return found


def divide(instructions: list[Instruction]) -> dict[int, Block]:
    """Return the blocks of a kernel by the address of their first instruction."""
    index = {x.address: i for i, x in enumerate(instructions)}
    starts = {0}
    for i, instruction in enumerate(instructions):
        if instruction.base in ("BRA", "BRX", "EXIT", "RET", "BREAK", "BSYNC"):
            starts |= {i + 1, *(index[x] for x in instruction.targets() if x in index)}
    ordered = sorted(starts - {len(instructions)})
    blocks = {}
    for start, end in zip(ordered, [*ordered[1:], len(instructions)], strict=True):
        last = instructions[end - 1]
        following = [instructions[end].address] if end < len(instructions) else []
        is_conditional = last.predicate is not None or any(map(PREDICATE.fullmatch, last.operands))
        if last.base == "BRA":
            following = last.targets() + (following if is_conditional else [])
        elif last.base in ("EXIT", "BRX", "RET") and not is_conditional:
            following = []
        blocks[instructions[start].address] = Block(instructions[start:end], following)
    return blocks


def exclusive_or(a: Value, b: Value) -> Value:
    """Return a ^ b. ptxas exchanges two registers by three of these instructions."""

    def parts(x: Value) -> set[Value]:
        return set(x[0]) if isinstance(x[0], tuple) and x[1] == 0 else {x} - {ZERO}

    found = sorted(parts(a) ^ parts(b), key=str)
    return found[0] if len(found) == 1 else (tuple(found), 0) if found else ZERO


def result_of(instruction: Instruction, operands: list[str], state: State) -> Value:
    """Return the result of an instruction with these operands, without that for the result.

    In the code for descriptors, an OR sets bits that are zero, so it is an addition.
    """
    given = [state.value(x) for x in operands if not PREDICATE.fullmatch(x)]
    base, name = instruction.base, instruction.name
    if base in ("MOV", "UMOV", "R2UR") or name in ("IMAD.MOV.U32", "IMAD.U32", "IMAD.MOV"):
        return given[-1] if base in ("IMAD", "R2UR") else given[0]
    if base in ("LOP3", "ULOP3") and XOR in operands:
        return exclusive_or(given[0], given[1])
    is_or = base in ("LOP3", "ULOP3") and OR in operands
    if is_or or (base in ("IADD3", "UIADD3", "VIADD") and ".X" not in name):
        terms = given[:2] if is_or else given
        symbols = [symbol for symbol, _ in terms if symbol]
        if len(symbols) <= 1:
            return symbols[0] if symbols else "", sum(constant for _, constant in terms) & MASK
    if base not in PURE:
        return f"{name} at {instruction.address:x}", 0
    text = f"{name}({', '.join(map(str, given))})"
    return text if len(text) < 200 else hashlib.sha256(text.encode()).hexdigest(), 0


def width_of(instruction: Instruction) -> int:
    """Return how many consecutive registers an instruction reads or writes as one operand."""
    base, name = instruction.base, instruction.name
    if base == "HGMMA":
        return int(name.split("x")[1]) // 2
    if base == "LDSM":
        return int(name.rsplit(".", 1)[1])
    if ".128" in name:
        return 4
    return 2 if ".64" in name or ".WIDE" in name or name == "CS2R" else 1


def execute(instruction: Instruction, state: State) -> None:
    """Change the values of the registers that an instruction writes."""
    base, name, operands = instruction.base, instruction.name, instruction.operands
    width = width_of(instruction)

    def write(register: str, value: Value, i: int) -> None:
        if instruction.predicate and state[register] != value:
            value = f"{name} at {instruction.address:x}[{i}]", 0
        state[register] = value

    if base in ("STL", "LDL"):
        place, register = operands if base == "STL" else operands[::-1]
        where, number = STACK.fullmatch(place), register.removeprefix("R")
        if where and number != "Z":
            for i in range(width):
                stack, kept = f"stack {int(where[1] or '0', 16) + 4 * i}", f"R{int(number) + i}"
                written, read = (stack, kept) if base == "STL" else (kept, stack)
                write(written, state[read], i)
            return
    if base.startswith(WITHOUT_RESULT):
        return
    of_result = next((i for i, x in enumerate(operands[:3]) if REGISTER.fullmatch(x)), None)
    if of_result is None:
        return
    kind, number = REGISTER.fullmatch(operands[of_result]).groups()  # type: ignore[union-attr]
    if number == "Z":
        return
    new = result_of(instruction, operands[of_result + 1 :], state)
    for i in range(width):
        write(f"{kind}{int(number) + i}", new if i == 0 else (f"{new}[{i}]", 0), i)


def joined(block: int, before: list[State]) -> State:
    """Return the values at the start of a block, from those at the end of the blocks before.

    Where values differ, the result is a new symbol. Registers that differ by a constant in all
    blocks before get the same symbol and this constant.
    """
    state = State(block)
    symbols: dict[tuple[Value, ...], tuple[str, int]] = {}
    for register in sorted(set().union(*before)):
        values = [x[register] for x in before]
        if len(set(values)) == 1:
            state[register] = values[0]
        else:
            first = values[0][1]
            relative = tuple((symbol, (constant - first) & MASK) for symbol, constant in values)
            name, base = symbols.setdefault(relative, (register, first))
            state[register] = f"{name} at {block:x}", (first - base) & MASK
    return state


def states_at_starts(blocks: dict[int, Block]) -> dict[int, State]:
    """Return the values of registers at the start of each block."""
    before = defaultdict(list)
    for address, block in blocks.items():
        for following in block.next:
            before[following].append(address)
    starts: dict[int, State] = {}
    ends: dict[int, State] = {}
    changed = True
    while changed:
        changed = False
        for address, block in blocks.items():
            state = joined(address, [ends[x] for x in before[address] if x in ends])
            if starts.get(address) == state:
                continue
            changed = True
            starts[address] = State(address, dict(state))
            for instruction in block.instructions:
                execute(instruction, state)
            ends[address] = state
    return starts


def wrong_matmuls(sass: str) -> tuple[int, list[str]]:
    """Return the number of matmuls, and those whose descriptors do not differ by constants.

    A matmul is a sequence of HGMMA instructions in one block, up to one with the operand gsb0. The
    descriptor of the first operand is in the registers UR(n) and UR(n + 1), unless this operand is
    in registers, and that of the second one in UR(n + 2) and UR(n + 3).
    """
    blocks = divide(parse(sass))
    n_matmuls, wrong = 0, []
    for start, state in states_at_starts(blocks).items():
        expected = None
        for instruction in blocks[start].instructions:
            if instruction.base == "HGMMA":
                place = next(x for x in instruction.operands if x.startswith("gdesc"))
                number = re.search(r"UR(\d+)", place)
                if number is None:  # gdesc[URZ]: an instruction without effect, only for gsb0
                    continue
                n = int(number[1])
                in_registers = REGISTER.fullmatch(instruction.operands[1])
                symbols = None if in_registers else state[f"UR{n}"][0], state[f"UR{n + 2}"][0]
                if expected is None:
                    expected = symbols
                    n_matmuls += 1
                elif symbols != expected:
                    wrong.append(f"{instruction.address:x}: {symbols}, not {expected}")
                if "gsb0" in instruction.operands:
                    expected = None
            execute(instruction, state)
    return n_matmuls, wrong
