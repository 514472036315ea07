"""tools/check_sass.py reads what NVIDIA's tools print, and finds what it is for."""

import importlib
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"

ADD = "_ZN8effinfer4cuda5entryINS0_9AddKernelELi256ELm1EEEvNT_6ParamsE"
STREAM = (
    "_ZN8effinfer4cuda5entryINS0_12StreamMatmulIXtlNS_3ops12PackedFormatELNS3_9QuantBitsE0E"
    "LNS3_9ScaleKindE2ELb0ELh32ELh1EEELi1ELi96EEELi256ELm16384EEEvNT_6ParamsE"
)

# Of nvcc 13.0, with -Xptxas=-v.
PTXAS_LOG = f"""\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{ADD}' for 'sm_80'
ptxas info    : Function properties for {ADD}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 28 registers, used 0 barriers, 392 bytes cmem[0]
ptxas info    : Compile time = 8.873 ms
ptxas info    : Compiling entry function '{STREAM}' for 'sm_80'
ptxas info    : Function properties for {STREAM}
    16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 64 bytes smem, 712 bytes cmem[0]
"""

# Of cuobjdump 13.5, --dump-resource-usage.
USAGE = f"""
Fatbin ptx code:
================
arch = sm_80
code version = [9,0]
host = linux
compressed
ptxasOptions = --warn-on-spills

Fatbin elf code:
================
arch = sm_80
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function {ADD}:
  REG:28 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:392 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_90a
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function {STREAM}:
  REG:167 STACK:8 SHARED:1024 LOCAL:0 CONSTANT[2]:8 CONSTANT[0]:712 TEXTURE:0 SURFACE:0 SAMPLER:0
"""

# Of nvdisasm 13.5, -c -ndf, of two cubins.
SM80 = f"""
	.target	sm_80

	.elftype	@"ET_EXEC"

//--------------------- .text.{ADD} --------------------------
	.section	.text.{ADD},"ax",@progbits
	.align	128
        .global         {ADD}
{ADD}:
.text.{ADD}:
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
.L_x_1:
        /*0370*/              @!P0 LDG.E.128.CONSTANT R8, desc[UR4][R18.64] ;
        /*0380*/              @UP0 UIADD3 UR4, UR4, 0x1, URZ ;
"""
SM90A = f"""
	.target	sm_90a
	.section	.text.{ADD},"ax",@progbits
        /*0000*/                   EXIT ;
	.section	.text.{STREAM},"ax",@progbits
        /*1230*/                   LDG.E.EF.128 R4, desc[UR6][R2.64] ;
        /*1240*/                   STL [R1], R4 ;
        /*1250*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*1260*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
"""


@pytest.fixture(scope="module")
def sass() -> ModuleType:
    sys.path.insert(0, str(TOOLS))
    try:
        return importlib.import_module("check_sass")
    finally:
        sys.path.remove(str(TOOLS))


def kernel(sass, **changes):
    plain = {"name": "AddKernel", "arch": "sm_80", "threads": 256, "shared": 1, "registers": 28}
    if "opcodes" in changes:
        changes["opcodes"] = Counter(changes["opcodes"])
    return sass.Kernel(**{**plain, **changes})


def test_what_ptxas_says(sass):
    assert sass.parse_ptxas(PTXAS_LOG) == [
        ("sm_80", ADD, {"stack": 0, "spills": 0, "registers": 28, "shared": 0}),
        ("sm_80", STREAM, {"stack": 16, "spills": 64, "registers": 128, "shared": 64}),
    ]


def test_what_cuobjdump_says(sass):
    assert sass.parse_usage(USAGE) == [
        ("sm_80", ADD, {"stack": 0, "spills": 0, "registers": 28, "shared": 0}),
        # Without what the system takes of a Hopper's shared memory.
        ("sm_90a", STREAM, {"stack": 8, "spills": 0, "registers": 167, "shared": 0}),
    ]


def test_opcodes_by_kernel(sass):
    def opcodes_of(dump):
        return {key: sass.count_opcodes(code) for key, code in sass.functions_of(dump).items()}

    assert opcodes_of(SM80) == {
        ("sm_80", ADD): {"IMAD.MOV.U32": 1, "LDG.E.128.CONSTANT": 1, "UIADD3": 1},
    }
    assert opcodes_of(SM90A) == {
        ("sm_90a", ADD): {"EXIT": 1},
        ("sm_90a", STREAM): {"LDG.E.EF.128": 1, "STL": 1, "WARPGROUP.DEPBAR.LE": 2},
    }


@pytest.mark.parametrize(
    ("opcode", "wanted", "found"),
    [
        ("LDG.E.EF.128", "LDG.E.128", True),
        ("LDG.E.64", "LDG.E.128", False),
        ("LDGSTS.E.BYPASS.128", "LDG.E.128", False),
        ("HMMA.16816.F32.BF16", "HMMA", True),
        ("LDL.64", "LDL", True),
    ],
)
def test_modifiers_may_be_more(sass, opcode, wanted, found):
    assert sass.has_opcode({opcode}, wanted) is found


def test_names(sass):
    names = sass.demangle([ADD, STREAM])
    assert sass.parse_name(names[ADD]) == ("AddKernel", 256, 1)
    assert sass.parse_name(names[STREAM]) == (
        "StreamMatmul<PackedFormat{0, 2, false, 32, 1}, 1, 96>",
        256,
        16384,
    )
    assert sass.parse_name("void someone::else<int>(int)") is None


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({}, 8),  # of 2,048 threads
        ({"registers": 128}, 2),
        ({"registers": 129}, 1),
        ({"registers": 40}, 6),
        ({"threads": 64, "registers": 16}, 32),
        ({"shared": 80 * 1024}, 2),
        ({"shared": 82 * 1024}, 1),
        ({"shared": 82 * 1024, "arch": "sm_90a"}, 2),
        ({"shared": 165 * 1024}, 0),
    ],
)
def test_occupancy(sass, changes, blocks):
    assert kernel(sass, **changes).blocks() == blocks


def test_what_is_in_order_passes(sass):
    budget = sass.Budget("AddKernel", 32, 8, opcodes=("LDG.E.128",))
    assert sass.check([kernel(sass, opcodes={"LDG.E.128.CONSTANT"})], (budget,)) == []
    # Of opcodes that nobody looked at nothing is said.
    assert sass.check([kernel(sass)], (budget,)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"registers": 33}, "33 registers, at most 32"),
        ({"stack": 8}, "8 bytes of stack"),
        ({"spills": 4}, "4 bytes of spills"),
        ({"shared": 20}, "20 bytes of shared memory, at most 1"),
        ({"threads": 512}, "4 blocks an SM, at least 8"),
        ({"opcodes": {"LDG.E.64"}}, "no LDG.E.128 in its code"),
        ({"opcodes": {"LDG.E.128", "STL.64"}}, "STL in its code"),
        ({"threads": 0}, "expected an entry<>"),
    ],
)
def test_what_is_over_budget_is_found(sass, changes, said):
    budget = sass.Budget("AddKernel", 32, 8, opcodes=("LDG.E.128",))
    problems = sass.check([kernel(sass, **changes)], (budget,))
    assert said in problems[0]


def test_opcodes_of_one_architecture(sass):
    budget = sass.Budget("AddKernel", 32, 8, opcodes=("HGMMA",), arch="sm_90a")
    assert sass.check([kernel(sass, opcodes=set())], (budget,)) == []
    assert sass.check([kernel(sass, arch="sm_90a", opcodes=set())], (budget,)) == [
        "AddKernel (sm_90a): no HGMMA in its code"
    ]


def test_opcodes_of_hopper_in_place_of_others(sass):
    budget = sass.Budget("AddKernel", 32, 8, opcodes=("LDGSTS",), hopper=("UBLKCP",))
    assert sass.check([kernel(sass, opcodes={"LDGSTS.128"})], (budget,)) == []
    assert sass.check([kernel(sass, arch="sm_90a", opcodes={"LDGSTS.128"})], (budget,)) == [
        "AddKernel (sm_90a): no UBLKCP in its code"
    ]


def test_wgmma_is_not_waited_for_product_by_product(sass):
    budget = sass.Budget("AddKernel", 32, 8, waits=2)
    code = {"HGMMA.64x128x16.F32.BF16": 8, "WARPGROUP.DEPBAR.LE": 2}
    assert sass.check([kernel(sass, opcodes=code)], (budget,)) == []
    code["WARPGROUP.DEPBAR.LE"] = 9
    assert sass.check([kernel(sass, opcodes=code)], (budget,)) == [
        "AddKernel (sm_80): 9 waits for 8 wgmma, at most 2"
    ]
    silent = sass.Budget("AddKernel", 32, 8)
    assert "no number in its row" in sass.check([kernel(sass, opcodes=code)], (silent,))[0]


# Scores by operands in registers, while the sums of values before them are under way.
WGMMA = """
.L_x_1:
        /*0000*/                   LDS.64 R12, [R2] ;
        /*0010*/                   WARPGROUP.ARRIVE ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0040*/                   FADD R3, R56, R4 ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R56, R12, gdesc[UR8], R56, gsb0 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0070*/                   FADD R24, R24, R4 ;
        /*0080*/               @P0 BRA `(.L_x_2) ;
        /*0090*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
.L_x_2:
        /*00a0*/                   IMAD.MOV.U32 R5, RZ, RZ, R15 ;
        /*00b0*/              @!P1 BRA `(.L_x_1) ;
        /*00c0*/                   EXIT ;
"""


def test_what_touches_registers_of_products_that_are_under_way(sass):
    code = sass.instructions_of(WGMMA)
    assert code[8] == (0x80, "@P0 BRA 0xa0")
    # The operand is loaded anew where the branch has left out the wait, and the sums are added to.
    again = ["0x0 LDS.64 R12, [R2]", "0x40 FADD R3, R56, R4"]
    assert sass.find_touches(code) == again
    without_branch = [line for line in code if "0xa0" not in line[1]]
    assert sass.find_touches(without_branch) == []
    # Of two groups the older one is waited for, of products that are one there is but one.
    assert "0x70 FADD R24, R24, R4" not in again
    one = [(address, text.replace("R24, gsb0", "R24")) for address, text in without_branch]
    assert "0x70 FADD R24, R24, R4" in sass.find_touches(one)
    # What reads an operand changes nothing; what is stored is as wide as the store.
    for text, touches in (
        ("SHFL.BFLY PT, R13, R4, 0x1, 0x1f", True),
        ("STS.128 [R4], R12", False),
        ("STS.128 [R4], R22", True),
        ("STS.64 [R4], R22", False),
        ("ISETP.NE.AND P0, PT, R14, RZ, PT", False),
        ("IMAD.WIDE.U32 R4, R2, 0x4, R23", True),
    ):
        behind = [*without_branch[:6], (0x58, text), *without_branch[6:]]
        assert bool(sass.find_touches(behind)) is touches, text
    budget = sass.Budget("AddKernel", 32, 8)
    (problem,) = sass.check([kernel(sass, touches=("0x0 LDS",))], (budget,))
    assert "while wgmma has its registers: 0x0 LDS" in problem


def test_other_architectures_may_take_more_registers_and_some_bytes_of_stack(sass):
    budget = sass.Budget("AddKernel", 32, 8, opcodes=("HMMA",))
    more = {"registers": 40, "spills": 16, "opcodes": {"HMMA", "STL"}}
    for arch in ("sm_100f", "sm_120"):
        assert sass.check([kernel(sass, arch=arch, stack=16, **more)], (budget,)) == []
        (problem,) = sass.check([kernel(sass, arch=arch, stack=200, **more)], (budget,))
        assert "200 bytes of stack, at most 112" in problem


def test_code_of_a_family_is_found_by_its_first_member(sass):
    usage = f"arch = sm_100f\n Function {ADD}:\n  REG:8 STACK:0 SHARED:1028 LOCAL:0\n"
    (one,) = sass.kernels_of(sass.parse_usage(usage), {("sm_100", ADD): Counter(["LDG.E.128"])})
    assert one.opcodes == {"LDG.E.128": 1}
    assert one.shared == 1 + 4


def test_rows_and_kernels_belong_together(sass):
    row, other = sass.Budget("Add*", 32, 1), sass.Budget("*Kernel", 32, 1)
    assert "no row" in sass.check([kernel(sass)], ())[0]
    assert "rows Add*, *Kernel" in sass.check([kernel(sass)], (row, other))[0]
    assert sass.check([kernel(sass)], (row, sass.Budget("Sub*", 32, 1))) == [
        "Sub*: a row without a kernel"
    ]
    assert sass.check([], (row,)) == ["no kernels found", "Add*: a row without a kernel"]


def test_a_log_is_checked_as_a_whole(sass):
    kernels = sass.kernels_of(sass.parse_ptxas(PTXAS_LOG), None)
    assert [(one.name[:12], one.threads, one.shared) for one in kernels] == [
        ("AddKernel", 256, 1),
        ("StreamMatmul", 256, 16384 + 64),
    ]
    assert all(one.opcodes is None for one in kernels)


def test_the_table_has_one_row_for_a_name(sass):
    rows = [budget.kernel for budget in sass.BUDGETS]
    assert len(rows) == len(set(rows))
    assert all(0 < budget.registers <= 255 and budget.blocks >= 1 for budget in sass.BUDGETS)
