"""Gives registers of PTX few names, again and again.

nvcc writes PTX in which nearly every value has a register of its own: `%r1` to `%r4437` in a
kernel. Numbers that come once are most of what a compressor must keep of it. Here a value gets the
lowest number that no live value of its type has, as in a register allocator without limits; what is
unrolled then repeats itself, and PTX compresses to a third of its size. ptxas makes its own single
assignments first, so that machine code stays what it was but for the order of some instructions.
"""

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

DECLARATION = re.compile(r"\.reg\s+\.(\w+)\s+%([a-z]+)<\d+>;")
REGISTER = re.compile(r"%([a-z]+)(\d+)\b")
LABEL = re.compile(r"([$\w]+):$")
GUARD = re.compile(r"@!?(%[a-z]+\d+)\s+")
TARGET = re.compile(r"bra(?:\.uni)?\s+([$\w]+)")
SPACES = re.compile(r"\s+")
# nvcc opens and closes scopes for a `%tmp` at the first and the last of their statements.
SCOPE_IN_LINE = re.compile(r"(?<=^\{)\s+(?=\.reg)|(?<=;)\s+(?=\}$)")
# They write their first operand and do not read it. Of any other instruction that operand counts as
# read, too, which keeps a name for longer than need be, and is never wrong.
WRITERS = frozenset(
    re.findall(
        r"\w+",
        """
        abs add and bfe bfi cnot copysign cos cvt cvta div ex2 fma ld ldmatrix lg2 lop3 mad max min
        mma mov mul neg not or popc prmt rcp rem rsqrt selp set setp shf shfl shl shr sin sqrt sub
        tanh vote xor
        """,
    )
)
# Their registers are read and written after the instruction, until a wait: no name is free then.
ASYNCHRONOUS = ("wgmma.", "tcgen05.")

Register = tuple[str, str]


@dataclass
class Statement:
    text: str
    reads: int = 0  # a set of registers, a bit each
    writes: int = 0


@dataclass
class Block:
    first: int
    end: int
    follows: list[int] = field(default_factory=list)  # blocks that may come next
    live_in: int = 0
    live_out: int = 0


def reuse_registers(ptx: str) -> str:
    """`ptx` with few names of registers, without comments and indentation."""
    lines = ptx.split("\n")
    result: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at].strip()
        at += 1
        if line and not line.startswith("//"):
            result.append(line)
        if line == "{":  # of a function
            end = end_of_scope(lines, at)
            result += rename(split_statements(lines[at:end]))
            at = end
    return "\n".join(result) + "\n"


def end_of_scope(lines: list[str], at: int) -> int:
    """Where the scope closes that was opened before line `at`: assembler has scopes of its own."""
    depth = 1
    for end in range(at, len(lines)):
        line = lines[end].strip()
        depth += (line == "{") - (line == "}")
        if depth == 0:
            return end
    raise ValueError("expected a function's end")


def split_statements(lines: list[str]) -> list[str]:
    statements = []
    part = ""
    for line in lines:
        for piece in SCOPE_IN_LINE.split(line.split("//")[0].strip()):
            part = f"{part} {piece}".strip()
            if part.endswith((";", ":")) or part in ("{", "}"):
                statements.append(SPACES.sub(" ", part))
                part = ""
    if part:
        raise ValueError(f"expected a statement's end, got {part!r}")
    return statements


def rename(texts: list[str]) -> list[str]:
    """The statements of one function, registers named again."""
    declared = {m[2]: m[1] for m in map(DECLARATION.match, texts) if m}
    if any(name in text for text in texts for name in ASYNCHRONOUS):
        return texts
    numbers: dict[Register, int] = {}
    statements = [read_statement(text, declared, numbers) for text in texts]
    blocks = divide(statements)
    find_live(statements, blocks)
    names, used = choose_names(
        statements, list(numbers), live_ranges(statements, blocks, len(numbers))
    )

    def new_name(match: re.Match[str]) -> str:
        number = numbers.get((match[1], match[2]))
        return match[0] if number is None else f"%{match[1]}{names[number]}"

    def render(text: str) -> str:
        declaration = DECLARATION.match(text)
        if declaration:
            kind, prefix = declaration.groups()
            return f".reg .{kind} %{prefix}<{used.get(prefix, 0)}>;"
        return REGISTER.sub(new_name, text)

    return [render(text) for text in texts]


def read_statement(text: str, declared: dict[str, str], numbers: dict[Register, int]) -> Statement:
    """What `text` reads and writes; `numbers` learns of registers that are new."""
    statement = Statement(text)
    if text.startswith(".") or LABEL.match(text):
        return statement

    def registers(part: str) -> list[int]:
        found = [(m[1], m[2]) for m in REGISTER.finditer(part) if m[1] in declared]
        return [numbers.setdefault(register, len(numbers)) for register in found]

    guard = GUARD.match(text)
    opcode, _, operands = text[guard.end() if guard else 0 :].partition(" ")
    first, others = split_first(operands)
    for number in registers(others) + (registers(guard[1]) if guard else []):
        statement.reads |= 1 << number
    for number in registers(first):
        if first.startswith("["):  # an address
            statement.reads |= 1 << number
            continue
        statement.writes |= 1 << number
        if guard or opcode.split(".")[0] not in WRITERS:
            statement.reads |= 1 << number
    return statement


def split_first(operands: str) -> tuple[str, str]:
    """The first operand, which braces may enclose, and the others."""
    end = operands.find("}") + 1 if operands.startswith("{") else operands.find(",")
    return (operands, "") if end < 0 else (operands[:end], operands[end:])


def divide(statements: list[Statement]) -> list[Block]:
    """Basic blocks, and which ones may follow."""
    starts = {0}
    labels = {}
    for at, statement in enumerate(statements):
        label = LABEL.match(statement.text)
        if label:
            labels[label[1]] = at
            starts.add(at)
        elif re.search(r"\b(bra|brx|ret|exit)\b", statement.text):
            starts.add(at + 1)
    starts.discard(len(statements))
    first = sorted(starts)
    number = {at: block for block, at in enumerate(first)}
    blocks = [Block(at, end) for at, end in zip(first, [*first[1:], len(statements)], strict=True)]
    for block, after in zip(blocks, [*range(1, len(blocks)), None], strict=True):
        last = statements[block.end - 1].text
        target = TARGET.search(last)
        if target:
            block.follows.append(number[labels[target[1]]])
        elif "brx" in last:
            block.follows += [number[at] for at in labels.values()]
        goes_on = last.startswith("@") or not re.match(r"(bra|brx|ret|exit)\b", last)
        if goes_on and after is not None:
            block.follows.append(after)
    return blocks


def find_live(statements: list[Statement], blocks: list[Block]) -> None:
    """Fills in what is live where blocks begin and end."""
    sets = []
    for block in blocks:
        reads = writes = 0
        for statement in statements[block.first : block.end]:
            reads |= statement.reads & ~writes
            writes |= statement.writes
        sets.append((reads, writes))
    changed = True
    while changed:
        changed = False
        for block, (reads, writes) in zip(reversed(blocks), reversed(sets), strict=True):
            live_out = 0
            for after in block.follows:
                live_out |= blocks[after].live_in
            live_in = reads | live_out & ~writes
            changed |= live_in != block.live_in
            block.live_in, block.live_out = live_in, live_out


def members(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def live_ranges(
    statements: list[Statement], blocks: list[Block], count: int
) -> list[tuple[int, int]]:
    """Of each register the statements from the first to the last one where it may be live. A block
    that goes elsewhere ends in a branch, which writes nothing that could take the name of what is
    live there."""
    first = [len(statements)] * count
    last = [0] * count
    for at, statement in enumerate(statements):
        for register in members(statement.reads | statement.writes):
            first[register] = min(first[register], at)
            last[register] = at
    # Each register is met once in either direction: the first block that it enters, the last one
    # that it leaves.
    seen = 0
    for block in blocks:
        for register in members(block.live_in & ~seen):
            first[register] = min(first[register], block.first)
        seen |= block.live_in
    seen = 0
    for block in reversed(blocks):
        for register in members(block.live_out & ~seen):
            last[register] = max(last[register], block.end - 1)
        seen |= block.live_out
    return list(zip(first, last, strict=True))


def choose_names(
    statements: list[Statement], registers: list[Register], ranges: list[tuple[int, int]]
) -> tuple[list[int], dict[str, int]]:
    """A number for each register, and of each prefix how many are in use."""
    begins: list[list[int]] = [[] for _ in statements]
    ends: list[list[int]] = [[] for _ in statements]
    for register, (first, last) in enumerate(ranges):
        begins[first].append(register)
        ends[last].append(register)
    names = [0] * len(registers)
    free: dict[str, list[int]] = {}
    used: dict[str, int] = {}

    def release(register: int) -> None:
        heapq.heappush(free.setdefault(registers[register][0], []), names[register])

    for at, statement in enumerate(statements):
        # What is read last here may lend its name to what is written here.
        read_only = [r for r in ends[at] if ranges[r][0] < at and not statement.writes >> r & 1]
        for register in read_only:
            release(register)
        for register in begins[at]:
            prefix = registers[register][0]
            if free.get(prefix):
                names[register] = heapq.heappop(free[prefix])
            else:
                names[register] = used.get(prefix, 0)
                used[prefix] = names[register] + 1
        for register in ends[at]:
            if register not in read_only:
                release(register)
    return names, used
