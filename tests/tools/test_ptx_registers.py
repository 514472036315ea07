"""tools/ptx_registers.py: programs whose registers have other names compute what they did."""

import importlib
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAD = ".version 9.0\n.target sm_80\n.address_size 64\n"


@pytest.fixture
def reuse_registers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("ptx_registers").reuse_registers


def random_program(rng: random.Random) -> str:
    """A function of blocks that jump forth and back: registers that all blocks may read, others
    that live in one block, predicates, guards, vectors and stores."""
    shared = [f"%r{i}" for i in range(1, rng.randint(3, 7))]
    local = (f"%r{i}" for i in range(100, 10_000))
    predicate = (f"%p{i}" for i in range(1, 1000))
    lines = [f"\tmov.u32 \t{name}, {rng.randint(0, 99)};" for name in shared]
    num_blocks = rng.randint(2, 6)
    for block in range(num_blocks):
        lines.append(f"$L__BB0_{block}:")
        known = [*shared]
        for _ in range(rng.randint(1, 8)):
            a, b = rng.choice(known), rng.choice(known)
            match rng.randint(0, 5):
                case 0:
                    new = next(local)
                    lines.append(f"\tadd.s32 \t{new}, {a}, {b};")
                    known.append(new)
                case 1:
                    lines.append(f"\txor.b32  \t{rng.choice(shared)}, {a}, {b};")
                case 2:
                    first, second = rng.sample([next(local), next(local), rng.choice(known)], 2)
                    lines.append(f"\tld.global.v2.u32 \t{{{first}, {second}}}, [{a}+{b}];")
                    known += [first, second]
                case 3:
                    p = next(predicate)
                    lines.append(f"\tsetp.lt.s32 \t{p}, {a}, {b};")
                    lines.append(f"\t@{p} mul.lo.s32 \t{rng.choice(known)}, {a}, {b};")
                case 4:
                    lines.append(f"\tst.global.v2.u32 \t[{a}], {{{a}, {b}}};")
                case 5:  # an unknown instruction, which reads what it writes
                    lines.append(f"\tdp4a.s32 \t{rng.choice(known)}, {a}, {b};")
        p = next(predicate)
        lines.append(f"\tsetp.lt.s32 \t{p}, {rng.choice(known)}, {rng.choice(known)};")
        lines.append(f"\t@!{p} bra \t$L__BB0_{rng.randrange(num_blocks)};")
    last = rng.choice(["ret", f"bra.uni \t$L__BB0_{rng.randrange(num_blocks)}"])
    lines.append(f"\t{last};")
    declared = "\t.reg .pred \t%p<1000>;\n\t.reg .b32 \t%r<10000>;\n"
    body = "\n".join(lines)
    return f"{HEAD}\n.visible .entry f()\n{{\n{declared}\n{body}\n\n}}\n"


def trace(ptx: str, steps: int = 400) -> list[tuple[int, ...]]:
    """What `steps` instructions of a random program store."""
    code = [" ".join(line.split()) for line in ptx.split("{\n", 1)[1].splitlines()]
    code = [line for line in code if line and not line.startswith((".reg", "}"))]
    labels = {line.rstrip(":"): at for at, line in enumerate(code) if line.endswith(":")}
    values: dict[str, int] = {}
    stored = []
    at = 0

    def value(text: str) -> int:
        return int(text) if text.isdigit() else values[text]

    for _ in range(steps):
        if at >= len(code):
            break
        line = code[at].rstrip(";")
        at += 1
        if line.endswith(":"):
            continue
        guard = re.match(r"@(!?)(%p\d+) ", line)
        if guard:
            line = line[guard.end() :]
            if bool(value(guard[2])) == (guard[1] == "!"):
                continue
        opcode, _, operands = line.partition(" ")
        names = re.findall(r"%\w+|\b\d+\b", operands)
        match opcode.split(".")[0]:
            case "ret":
                break
            case "bra":
                at = labels[operands]
            case "mov":
                values[names[0]] = value(names[1])
            case "add":
                values[names[0]] = (value(names[1]) + value(names[2])) % 2**32
            case "xor":
                values[names[0]] = value(names[1]) ^ value(names[2])
            case "mul":
                values[names[0]] = value(names[1]) * value(names[2]) % 2**32
            case "dp4a":
                values[names[0]] = (value(names[0]) * 3 + value(names[1]) ^ value(names[2])) % 2**32
            case "setp":
                values[names[0]] = int(value(names[1]) < value(names[2]))
            case "ld":
                address = value(names[2]) + value(names[3])
                values[names[0]], values[names[1]] = address * 7 % 2**32, address * 13 % 2**32
            case "st":
                stored.append(tuple(map(value, names)))
            case _:
                raise AssertionError(line)
    return stored


def num_names(ptx: str) -> int:
    return len(set(re.findall(r"%r\d+", ptx)))


def test_programs_compute_what_they_did(reuse_registers):
    num_stored = before = after = 0
    for seed in range(400):
        program = random_program(random.Random(seed))
        renamed = reuse_registers(program)
        assert trace(renamed) == trace(program), f"seed {seed}"
        num_stored += len(trace(program))
        before += num_names(program)
        after += num_names(renamed)
    assert num_stored > 1000
    assert after < 0.7 * before


def test_a_name_is_kept_around_a_loop(reuse_registers):
    """%r1 is read where the loop begins again: what the loop's end writes has another name."""
    renamed = reuse_registers(
        HEAD + ".visible .entry f()\n{\n\t.reg .pred %p<9>;\n\t.reg .b32 %r<99>;\n"
        "\tmov.u32 %r1, 5;\n$L:\n\tst.global.u32 [0], %r1;\n\tmov.u32 %r40, 7;\n"
        "\tst.global.u32 [4], %r40;\n\tsetp.eq.s32 %p7, %r40, 0;\n\t@%p7 bra $L;\n\tret;\n}\n"
    )
    assert "mov.u32 %r0, 5;" in renamed
    assert "mov.u32 %r1, 7;" in renamed
    assert ".reg .b32 %r<2>;" in renamed


def test_registers_of_inline_assembly_and_the_machine_keep_their_names(reuse_registers):
    source = (
        HEAD + ".visible .entry f()\n{\n\t.reg .b32 \t%r<99>;\n\tmov.u32 \t%r9, %tid.x;\n"
        "\tmov.u32 \t%r8, %envreg3;\n\t// begin inline asm\n\t{ .reg .pred q; \n"
        "\tsetp.eq.u32 q, %r9, %r8; }\n\t// end inline asm\n\tret;\n\n}\n"
    )
    renamed = reuse_registers(source)
    assert "mov.u32 %r0, %tid.x;" in renamed
    assert "mov.u32 %r1, %envreg3;" in renamed
    assert "setp.eq.u32 q, %r0, %r1;\n}" in renamed


def test_a_scope_of_inline_assembly_ends_no_function(reuse_registers):
    source = (
        HEAD + ".visible .entry f()\n{\n\t.reg .b32 \t%r<99>;\n\tmov.u32 \t%r9, %tid.x;\n"
        "\t// begin inline asm\n\t{\n.reg .pred q;\nsetp.eq.u32 q, %r9, 0;\n}\n"
        "\t// end inline asm\n\tst.global.u32 \t[%r9], %r9;\n\tret;\n\n}\n"
    )
    renamed = reuse_registers(source)
    assert "setp.eq.u32 q, %r0, 0;" in renamed
    assert "st.global.u32 [%r0], %r0;" in renamed
    with pytest.raises(ValueError, match="expected a function's end"):
        reuse_registers(f"{HEAD}.entry f()\n{{\n{{\nret;\n}}\n")


def test_a_scope_may_open_and_close_beside_statements(reuse_registers):
    source = (
        HEAD + ".visible .entry f()\n{\n\t.reg .b32 \t%r<99>;\n\t.reg .b64 \t%rd<9>;\n"
        "\t{ .reg .b64 %tmp;\n\t  cvt.u64.u32 \t%tmp, %r9;\n\t  cvta.shared.u64 \t%rd7, %tmp; }\n"
        "\n$L__BB0_1:\n\tst.global.u32 \t[%rd7], %r9;\n\tbra.uni \t$L__BB0_1;\n\n}\n"
    )
    renamed = reuse_registers(source)
    assert "{\n.reg .b64 %tmp;\ncvt.u64.u32 %tmp, %r0;" in renamed
    assert "cvta.shared.u64 %rd0, %tmp;\n}\n$L__BB0_1:" in renamed


def test_functions_with_asynchronous_products_keep_theirs(reuse_registers):
    body = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f10, %f11}, %rd7, %rd9, 1;"
    renamed = reuse_registers(
        f"{HEAD}.entry f()\n{{\n\t.reg .f32 %f<99>;\n\t.reg .b64 %rd<9>;\n\t{body}\n\tret;\n}}\n"
    )
    assert body in renamed


def test_a_statement_without_an_end_is_refused(reuse_registers):
    with pytest.raises(ValueError, match="expected a statement's end"):
        reuse_registers(f"{HEAD}.entry f()\n{{\n\tmov.u32 %r1, 5\n}}\n")


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_an_object_has_the_same_machine_code_and_less_ptx(tmp_path):
    """A kernel by nvcc, with and without: PTX that ptxas takes, dependencies that are nvcc's."""
    kernel = '#include "sum.h"\n__global__ void total(int* x, int n) { *x = sum(x, n); }\n'
    (tmp_path / "sum.h").write_text(
        "__device__ inline int sum(const int* x, int n) {\n"
        "  int s = 0;\n#pragma unroll 16\n  for (int i = 0; i < n; ++i) s += x[i] * x[s & 7];\n"
        "  return s;\n}\n"
    )
    (tmp_path / "total.cu").write_text(kernel)
    images = "arch=compute_80,code=[sm_80,compute_80]"
    flags = ["-c", "-gencode", images, "-MD", "-MT", "total.o", "-MF"]
    tool = [sys.executable, str(ROOT / "tools" / "nvcc_small_ptx.py")]
    for name, launcher in (("plain", []), ("small", tool)):
        command = [*launcher, "nvcc", *flags, f"{name}.d", "total.cu", "-o", f"{name}.o"]
        subprocess.run(command, cwd=tmp_path, check=True)

    def needs(name: str) -> set[str]:
        return set((tmp_path / name).read_text().replace("\\\n", " ").split()) - {":"}

    assert {str(Path(p).name).rstrip(":") for p in needs("small.d")} == {
        str(Path(p).name).rstrip(":") for p in needs("plain.d")
    }
    assert (tmp_path / "small.o").stat().st_size < (tmp_path / "plain.o").stat().st_size


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_what_does_not_compile_fails_with_the_compilers_status(tmp_path):
    (tmp_path / "wrong.cu").write_text("__global__ void f() { no_such_name(); }\n")
    tool = [sys.executable, str(ROOT / "tools" / "nvcc_small_ptx.py"), "nvcc"]
    done = subprocess.run(
        [*tool, "-c", "wrong.cu", "-o", "wrong.o"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "no_such_name" in done.stderr + done.stdout


def test_an_nvcc_that_names_no_steps_compiles_as_it_does(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\n[ "$1" = --dryrun ] || touch "$4"\n')
    nvcc.chmod(0o755)
    tool = [sys.executable, str(ROOT / "tools" / "nvcc_small_ptx.py")]
    done = subprocess.run(
        [*tool, str(nvcc), "-c", "a.cu", "-o", str(tmp_path / "a.o")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "PTX stays as it is" in done.stderr
    assert (tmp_path / "a.o").exists()
