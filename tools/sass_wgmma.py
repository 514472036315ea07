"""What touches the registers of wgmma while it is under way, in machine code for 9.0a.

A product (HGMMA) reads and writes registers until a wait (WARPGROUP.DEPBAR) says that it is done.
Which ones these are decides ptxas, who may touch them in between the source (csrc/cuda/unit.h):
where ptxas takes a register for something else too early, sums are wrong now and then. Nothing
tells of it, and the emulator has no registers. So all ways through a kernel are gone, with the
groups of products that are under way on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

Instruction = tuple[int, str]  # its address and text

CODE_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
LABEL = re.compile(r"^(\S+):\s*$")
LABEL_NAMED = re.compile(r"`\((\S+)\)")
PREDICATED = re.compile(r"^@!?U?P\w+\s+")
REGISTER = re.compile(r"(?<![A-Z])R(\d+)(\.64)?")
PRODUCT = re.compile(r"^HGMMA\.64x(\d+)x16\S* R(\d+), (?:R(\d+)|gdesc\[\w+\])[\w.]*,")
WAIT = re.compile(r"^WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)")
TARGET = re.compile(r"^(?:BRA|CALL)\S*\s+((?:!?U?P\w+, |UR\w+, )*)0x([0-9a-f]+)$")
# Which have no register for a result.
STORES = re.compile(r"^(?:ST|RED[.G]|ATOMS|SYNCS|BAR|UBLKCP|UTMA|ISETP|FSETP|DSETP|PLOP3)")
PREDICATES = re.compile(r"^!?U?P(?:\d|T)$")

MOST_GROUPS = 4


@dataclass(frozen=True)
class Group:
    """Products that are waited for together."""

    sums: frozenset[int]
    operands: frozenset[int]
    ended: bool


Groups = tuple[Group, ...]  # the oldest first


def instructions_of(code: str) -> list[Instruction]:
    """Of a function as nvdisasm prints it, with addresses in place of labels."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    unplaced: list[str] = []
    for line in code.splitlines():
        if match := CODE_LINE.match(line):
            address = int(match[1], 16)
            labels.update(dict.fromkeys(unplaced, address))
            unplaced.clear()
            found.append((address, match[2]))
        elif match := LABEL.match(line):
            unplaced.append(match[1])

    def address_of(match: re.Match[str]) -> str:
        return f"{labels[match[1]]:#x}" if match[1] in labels else match[0]

    return [(address, LABEL_NAMED.sub(address_of, text)) for address, text in found]


def width(opcode: str) -> int:
    """Registers of a result, or of what is stored."""
    modifiers = opcode.split(".")
    if "128" in modifiers or opcode.startswith(("LDSM", "HMMA", "IMMA")):
        return 4
    pairs = ("DADD", "DMUL", "DFMA", "I2F.F64", "F2F.F64", "CS2R")
    return 2 if {"64", "WIDE"} & set(modifiers) or opcode.startswith(pairs) else 1


def registers(text: str) -> tuple[set[int], set[int]]:
    """Those that an instruction writes, and all that it names."""
    opcode, _, rest = text.partition(" ")
    operands = [operand.strip() for operand in rest.split(",")]
    while operands and PREDICATES.match(operands[0]):
        operands.pop(0)
    is_store = STORES.match(opcode) is not None
    written: set[int] = set()
    named: set[int] = set()
    for index, operand in enumerate(operands):
        is_result = index == 0 and "[" not in operand and not is_store
        # A sum that products are added to is as wide as the result.
        is_wide = is_result or (is_store and "[" not in operand)
        is_wide |= "WIDE" in opcode and index == 3
        for match in REGISTER.finditer(operand):
            first = int(match[1])
            size = 2 if match[2] else width(opcode) if is_wide else 1
            some = range(first, first + size)
            named.update(some)
            if is_result:
                written.update(some)
    return written, named


def product_of(text: str) -> Group | None:
    if not text.startswith("HGMMA"):
        return None
    if not (match := PRODUCT.match(text)):
        raise ValueError(f"expected a product of 64 rows, got {text}")
    sums = frozenset(range(int(match[2]), int(match[2]) + int(match[1]) // 2))
    operands = frozenset(range(int(match[3]), int(match[3]) + 4)) if match[3] else frozenset()
    return Group(sums, operands, "gsb0" in text)


def join(first: Group, second: Group) -> Group:
    return Group(first.sums | second.sums, first.operands | second.operands, second.ended)


def step(groups: Groups, text: str) -> Groups:
    """Those that are under way behind an instruction."""
    if product := product_of(text):
        if groups and not groups[-1].ended:
            return (*groups[:-1], join(groups[-1], product))
        groups = (*groups, product)
        return groups if len(groups) <= MOST_GROUPS else (join(*groups[:2]), *groups[2:])
    if match := WAIT.match(text):
        newest = int(match[1], 16)
        return groups[-newest:] if newest else ()
    return groups


def touches(groups: Groups, text: str) -> bool:
    if not groups or text.startswith("HGMMA"):
        return False
    written, named = registers(text)
    return any(named & group.sums or written & group.operands for group in groups)


def followers(code: list[Instruction], places: dict[int, int], index: int) -> Iterator[int]:
    """Where a thread goes on."""
    text = PREDICATED.sub("", code[index][1])
    ends = re.match(r"(?:EXIT|RET)\b", text) is not None
    if match := TARGET.match(text):
        if int(match[2], 16) in places:
            yield places[int(match[2], 16)]
        ends = text.startswith("BRA") and not match[1]
    elif re.match(r"(?:BRX|JMP|JMX)\b", text):
        raise ValueError(f"jumps to an address that is not said: {text}")
    if (not ends or text != code[index][1]) and index + 1 < len(code):
        yield index + 1


def find_touches(code: list[Instruction]) -> list[str]:
    """The instructions that touch what products under way read or write."""
    places = {address: index for index, (address, _) in enumerate(code)}
    found: set[int] = set()
    seen: set[tuple[int, Groups]] = set()
    left: list[tuple[int, Groups]] = [(0, ())]
    while left:
        here = left.pop()
        if here in seen:
            continue
        seen.add(here)
        index, groups = here
        text = PREDICATED.sub("", code[index][1])
        if touches(groups, text):
            found.add(index)
        behind = step(groups, text)
        left += [(follower, behind) for follower in followers(code, places, index)]
    return [f"{code[index][0]:#x} {code[index][1]}" for index in sorted(found)]
