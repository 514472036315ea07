"""Holds the machine code of every CUDA kernel to its row of sass_budgets.py.

check_sass.py BUILD_DIR           the objects that the build made, read by cuobjdump
check_sass.py --ptxas-log FILE    what `nvcc -Xptxas -v` wrote, without opcodes

A kernel without a row, one with two, and a row without a kernel are errors. Where there is no
cuobjdump (pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm), nvcc compiles the kernels once
more for sm_80 and says what they use; their opcodes are then reported as not checked.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from sass_budgets import BUDGETS, FORBIDDEN, PINNED, STACK_ELSEWHERE, Budget
from sass_wgmma import find_touches, instructions_of

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "csrc" / "cuda"

# Of a multiprocessor; shared memory by architecture, in KiB.
REGISTERS, THREADS, BLOCKS, PARTITIONS, WARP = 65536, 2048, 32, 4, 32
SHARED_KIB = {"sm_80": 164, "sm_86": 100, "sm_87": 164, "sm_89": 100, "sm_90": 228}
SHARED_KIB |= {"sm_100": 228, "sm_103": 228, "sm_120": 100, "sm_121": 100}
HOPPER = "sm_90a"
SHARED_OF_A_BLOCK = 1024  # that the system takes beside a block's own

PRODUCT, WAIT = "HGMMA", "WARPGROUP.DEPBAR"  # of wgmma


@dataclass
class Kernel:
    """What one kernel uses on one architecture. Opcodes are None where nobody looked."""

    name: str
    arch: str
    threads: int
    shared: int
    registers: int
    stack: int = 0
    spills: int = 0
    opcodes: Counter[str] | None = field(default=None, repr=False)  # how often each occurs
    touches: tuple[str, ...] = field(default=(), repr=False)  # of wgmma under way

    def blocks(self) -> int:
        """How many of its blocks a multiprocessor holds at once."""
        warps = -(-self.threads // WARP)
        # Registers go to warps, 256 at a time, in each of the four partitions.
        warp_registers = -(-self.registers * WARP // 256) * 256
        held = REGISTERS // PARTITIONS // max(warp_registers, 256) * PARTITIONS
        block_shared = -(-(self.shared + SHARED_OF_A_BLOCK) // 128) * 128
        shared = SHARED_KIB[self.arch.rstrip("af")] * 1024
        return min(held // warps, THREADS // (warps * WARP), shared // block_shared, BLOCKS)


def split_arguments(text: str) -> list[str]:
    """The parts between the commas of a template's argument list that are in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "<({") - (letter in ">)}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def parse_name(demangled: str) -> tuple[str, int, int] | None:
    """Kernel, threads and shared bytes of an entry<Kernel, threads, shared> (csrc/cuda/entry.h)."""
    start = demangled.find("entry<")
    if start < 0:
        return None
    start, depth = start + len("entry<"), 1
    for end in range(start, len(demangled)):  # noqa: B007
        depth += (demangled[end] == "<") - (demangled[end] == ">")
        if depth == 0:
            break
    arguments = split_arguments(demangled[start:end])
    if len(arguments) != 3:
        return None
    kernel, threads, shared = arguments
    # Casts of enumerators and small integers, and who knows the namespaces.
    kernel = re.sub(r"\((?:[a-z_]+::)*[A-Z]\w*\)|\((?:un)?signed char\)|(?:\w+::)+", "", kernel)
    return kernel.replace(" >", ">"), int(threads.rstrip("ul")), int(shared.rstrip("ul"))


def demangle(names: Iterable[str]) -> dict[str, str]:
    unique = sorted(set(names))
    done = subprocess.run(
        ["c++filt"], input="\n".join(unique), capture_output=True, text=True, check=True
    )
    return dict(zip(unique, done.stdout.splitlines(), strict=True))


RawUsage = tuple[str, str, dict[str, int]]  # architecture, mangled name, numbers
PTXAS_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\w+)'")
PTXAS_STACK = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
PTXAS_USED = re.compile(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?")


def parse_ptxas(log: str) -> list[RawUsage]:
    """What `nvcc -Xptxas -v` says of each kernel."""
    found: list[RawUsage] = []
    for line in log.splitlines():
        if match := PTXAS_ENTRY.search(line):
            found.append((match[2], match[1], {}))
        elif found and (match := PTXAS_STACK.search(line)) and "stack" not in found[-1][2]:
            found[-1][2].update(stack=int(match[1]), spills=int(match[2]) + int(match[3]))
        elif found and (match := PTXAS_USED.search(line)):
            found[-1][2].update(registers=int(match[1]), shared=int(match[2] or 0))
    return found


def capability(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("af"))


USAGE_FUNCTION = re.compile(r"^ Function (\w+):$")
USAGE_NUMBERS = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def parse_usage(dump: str) -> list[RawUsage]:
    """`cuobjdump --dump-resource-usage` of an object."""
    found: list[RawUsage] = []
    arch, name = "", ""
    for line in dump.splitlines():
        if line.startswith("arch = "):
            arch = line.removeprefix("arch = ")
        elif match := USAGE_FUNCTION.match(line):
            name = match[1]
        elif name and (match := USAGE_NUMBERS.search(line)):
            registers, stack, shared, local = (int(number) for number in match.groups())
            # From Hopper on it counts what the system takes.
            if shared >= SHARED_OF_A_BLOCK and capability(arch) >= 90:
                shared -= SHARED_OF_A_BLOCK
            numbers = {"registers": registers, "stack": stack, "shared": shared, "spills": local}
            found.append((arch, name, numbers))
            name = ""
    return found


RawKey = tuple[str, str]  # architecture and mangled name

CODE_OF = re.compile(r"^\s*\.target\s+(sm_\w+)", re.MULTILINE)
CODE_FUNCTION = re.compile(r"^\s*\.section\s+\.text\.(\w+)", re.MULTILINE)
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


def functions_of(dump: str) -> dict[RawKey, str]:
    """The code of each function that `nvdisasm -c` prints of a cubin."""
    arch = CODE_OF.search(dump)
    if arch is None:
        return {}
    _, *parts = CODE_FUNCTION.split(dump)  # names, each before its code
    return {(arch[1], name): code for name, code in zip(parts[::2], parts[1::2], strict=True)}


def count_opcodes(code: str) -> Counter[str]:
    return Counter(INSTRUCTION.findall(code))


def has_opcode(opcodes: Iterable[str], wanted: str) -> bool:
    """Whether one is the wanted one; it may have modifiers beside those wanted, in any order."""
    return count_opcode(Counter(opcodes), wanted) > 0


def count_opcode(opcodes: Counter[str], wanted: str) -> int:
    """How often it occurs, with whatever modifiers beside those wanted."""
    base, *modifiers = wanted.split(".")
    count = 0
    for opcode, times in opcodes.items():
        found, *others = opcode.split(".")
        if found == base and set(modifiers) <= set(others):
            count += times
    return count


def kernels_of(
    usages: Iterable[RawUsage],
    opcodes: dict[RawKey, Counter[str]] | None,
    touches: dict[RawKey, list[str]] | None = None,
) -> list[Kernel]:
    usages = list(usages)
    names = demangle(name for _, name, _ in usages)
    kernels = []
    for arch, mangled, numbers in usages:
        parsed = parse_name(names[mangled])
        name, threads, shared = parsed or (names[mangled], 0, 0)
        kernels.append(
            Kernel(
                name=name,
                arch=arch,
                threads=threads,
                shared=shared + numbers["shared"],
                registers=numbers["registers"],
                stack=numbers["stack"],
                spills=numbers["spills"],
                # A disassembler names code of a family as that of its first member.
                opcodes=None
                if opcodes is None
                else opcodes.get((arch.rstrip("f"), mangled), Counter()),
                touches=tuple((touches or {}).get((arch, mangled), ())),
            )
        )
    return kernels


def check_registers(kernel: Kernel, budget: Budget) -> list[str]:
    problems = []
    if kernel.registers > budget.registers:
        problems.append(f"{kernel.registers} registers, at most {budget.registers}")
    if kernel.stack > 0:
        problems.append(f"{kernel.stack} bytes of stack, none allowed")
    if kernel.spills > 0:
        problems.append(f"{kernel.spills} bytes of spills, none allowed")
    if kernel.blocks() < budget.blocks:
        problems.append(f"{kernel.blocks()} blocks an SM, at least {budget.blocks}")
    problems += [
        f"{opcode} in its code" for opcode in FORBIDDEN if has_opcode(kernel.opcodes or (), opcode)
    ]
    return problems


def check_waits(opcodes: Counter[str], budget: Budget) -> list[str]:
    waits = count_opcode(opcodes, WAIT)
    if budget.waits is None:
        return ["waits of wgmma in its code, and no number in its row"] if waits > 0 else []
    if waits <= budget.waits:
        return []
    products = count_opcode(opcodes, PRODUCT)
    return [f"{waits} waits for {products} wgmma, at most {budget.waits}"]


def check_kernel(kernel: Kernel, budget: Budget) -> list[str]:
    problems: list[str] = []
    if not fnmatchcase(kernel.arch, budget.arch):
        return problems
    if kernel.shared > budget.shared:
        problems.append(f"{kernel.shared} bytes of shared memory, at most {budget.shared}")
    if kernel.arch in PINNED:
        problems += check_registers(kernel, budget)
    elif kernel.stack > STACK_ELSEWHERE:
        problems.append(f"{kernel.stack} bytes of stack, at most {STACK_ELSEWHERE}")
    if kernel.opcodes is not None:
        problems += [
            f"no {opcode} in its code"
            for opcode in (budget.hopper if kernel.arch == HOPPER else None) or budget.opcodes
            if not has_opcode(kernel.opcodes, opcode)
        ]
        problems += check_waits(kernel.opcodes, budget)
    problems += [f"while wgmma has its registers: {touch}" for touch in kernel.touches]
    return [f"{kernel.name} ({kernel.arch}): {problem}" for problem in problems]


def check(kernels: list[Kernel], budgets: tuple[Budget, ...] = BUDGETS) -> list[str]:
    """What is wrong."""
    problems = [] if kernels else ["no kernels found"]
    used: set[str] = set()
    for kernel in kernels:
        if kernel.threads == 0:
            problems.append(f"{kernel.name} ({kernel.arch}): expected an entry<> of entry.h")
            continue
        rows = [budget for budget in budgets if fnmatchcase(kernel.name, budget.kernel)]
        used.update(budget.kernel for budget in rows)
        if len(rows) == 1:
            problems += check_kernel(kernel, rows[0])
        else:
            said = "no row" if not rows else "rows " + ", ".join(row.kernel for row in rows)
            problems.append(
                f"{kernel.name} ({kernel.arch}): expected one row in sass_budgets.py, got {said}"
            )
    problems += [
        f"{budget.kernel}: a row without a kernel"
        for budget in budgets
        if budget.kernel not in used
    ]
    return problems


def find_tool(name: str) -> str | None:
    """On the PATH, beside nvcc, or in NVIDIA's packages of this Python."""
    if found := shutil.which(name):
        return found
    places = []
    if nvcc := shutil.which("nvcc"):
        places.append(Path(nvcc).resolve().parent)
    try:
        roots = [Path(root) for root in importlib.import_module("nvidia").__path__]
    except ImportError:
        roots = []
    places += [folder for root in roots for folder in sorted(root.glob("*/bin"))]
    for place in places:
        if os.access(place / name, os.X_OK):
            return str(place / name)
    return None


def run(*command: str | Path, cwd: str | None = None) -> str:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout


def disassemble(file: Path, cuobjdump: str, disassembler: str) -> list[str]:
    """The machine code of each architecture in an object, without what no budget is about: what
    cuobjdump -sass prints has eight times as much text, which takes as long as the rest.
    """
    with tempfile.TemporaryDirectory() as folder:
        run(cuobjdump, "-xelf", "all", file.resolve(), cwd=folder)
        return [
            run(disassembler, "-c", "-ndf", cubin) for cubin in sorted(Path(folder).glob("*.cubin"))
        ]


def read_objects(objects: list[Path], cuobjdump: str) -> list[Kernel]:
    disassembler = find_tool("nvdisasm")

    usages: list[RawUsage] = []
    opcodes: dict[RawKey, Counter[str]] = {}
    touches: dict[RawKey, list[str]] = {}

    def read(file: Path) -> None:
        usages.extend(parse_usage(run(cuobjdump, "--dump-resource-usage", file)))
        for dump in disassemble(file, cuobjdump, disassembler) if disassembler else ():
            for key, code in functions_of(dump).items():
                opcodes[key] = count_opcodes(code)
                if "HGMMA" in code:
                    touches[key] = find_touches(instructions_of(code))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, objects))
    return kernels_of(usages, opcodes if disassembler else None, touches)


def compile_once_more(nvcc: str) -> list[Kernel]:
    """What ptxas says of each source's kernels, on the smallest architecture alone."""

    def compile_one(source: Path) -> str:
        with tempfile.TemporaryDirectory() as folder:
            command = [nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas=-v"]
            command += ["-arch=sm_80", "-cubin", f"-I{ROOT}/csrc", f"-I{ROOT}/csrc/include"]
            command += [str(source), "-o", f"{folder}/kernels.cubin"]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"failed: {' '.join(command)}\n{done.stderr}")
        return done.stderr

    with ThreadPoolExecutor(2) as pool:
        logs = list(pool.map(compile_one, sorted(KERNELS.glob("*.cu"))))
    return kernels_of(parse_ptxas("\n".join(logs)), None)


def find_objects(build: Path) -> list[Path]:
    """What the library is made of: a build folder may hold objects of sources that are gone."""
    listed = build / "cuda_objects.txt"  # cmake/effinferCuda.cmake writes it
    if not listed.exists():
        return []
    return [build / line for line in listed.read_text().splitlines() if line.endswith(".cu.o")]


def read_build(build: Path) -> list[Kernel]:
    objects = find_objects(build)
    if not objects:
        sys.exit(f"sass: no CUDA backend was built in {build}")
    if cuobjdump := find_tool("cuobjdump"):
        return read_objects(objects, cuobjdump)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        sys.exit("sass: expected cuobjdump or nvcc, found neither")
    return compile_once_more(nvcc)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("build", nargs="?", type=Path)
    parser.add_argument("--ptxas-log", type=Path)
    parser.add_argument("--list", action="store_true", help="what each kernel uses, too")
    arguments = parser.parse_args()
    if arguments.ptxas_log:
        kernels = kernels_of(parse_ptxas(arguments.ptxas_log.read_text()), None)
    elif arguments.build:
        kernels = read_build(arguments.build)
    else:
        parser.error("expected BUILD_DIR or --ptxas-log FILE")
    if arguments.list:
        for kernel in sorted(kernels, key=lambda kernel: (kernel.name, kernel.arch)):
            waits = count_opcode(kernel.opcodes or Counter(), WAIT)
            blocks = kernel.blocks() if kernel.threads else "?"
            print(f"{kernel} blocks={blocks}" + (f" waits={waits}" if waits else ""))
    problems = check(kernels)
    if problems:
        print("\n".join(problems))
        sys.exit(1)
    archs = ", ".join(sorted({kernel.arch for kernel in kernels}))
    names = {kernel.name for kernel in kernels}
    seen = all(kernel.opcodes is not None for kernel in kernels)
    opcodes = "opcodes in order" if seen else "opcodes NOT checked: no cuobjdump and nvdisasm"
    print(f"sass: {len(names)} kernels for {archs} within {len(BUDGETS)} budgets, {opcodes}")


if __name__ == "__main__":
    main()
