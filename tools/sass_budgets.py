"""What the machine code of CUDA kernels may use: a row for each kernel or group of instances.

Registers and shared bytes are those of nvcc 13.0 for sm_80 and sm_90a, registers with some room for
other versions as long as as many blocks fit. What a row demands of blocks is what the kernel's
design counts on, on the smaller of the two machines.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    kernel: str  # of its struct, without namespaces, as fnmatch patterns; enumerators are numbers
    registers: int  # at most, of a thread
    blocks: int  # at least, that a multiprocessor holds at once
    shared: int = 1  # bytes at most; a block without shared memory has one
    opcodes: tuple[str, ...] = ()  # each must occur, with at least these modifiers


# Loads and stores of local memory: what spills and indexed arrays become.
FORBIDDEN = ("LDL", "STL")

# Weights of 16 bytes a lane and load, activations without a detour through registers, products on
# the tensor cores.
STREAM = ("LDG.E.128", "LDGSTS.128", "HMMA")
# Half a line of float16 weights is what a lane needs at once.
STREAM_F16 = ("LDG.E.64", "LDGSTS.128", "HMMA")
# Keys and values come as copies of 16 bytes; the states of other blocks as loads.
ATTENTION = ("LDG.E.128", "LDGSTS.128", "HMMA")
ATTENTION_F32 = ("LDG.E.128", "LDGSTS.128")
PREFILL = ("LDS.128", "LDGSTS.128", "HMMA", "MUFU.EX2")
# Rows in and out, 16 bytes a thread.
ROWS = ("LDG.E.128", "STG.E.128")

BUDGETS = (
    # Arguments: format (bits 0 to 3: u4, u5, u6, u8; 4: f16, 5: bf16), tiles of 8 tokens, registers
    # that hold weights on their way, blocks.
    Budget("StreamMatmul<PackedFormat{[01235], *}, 1, 40, 2>", 128, 2, 16384, STREAM),
    Budget("StreamMatmul<PackedFormat{[01235], *}, 1, 96, 1>", 224, 1, 16384, STREAM),
    Budget("StreamMatmul<PackedFormat{[01235], *}, 2, 40, 1>", 216, 1, 32768, STREAM),
    Budget("StreamMatmul<PackedFormat{[0123], *}, 4, 32, 1>", 248, 1, 65536, STREAM),
    Budget("StreamMatmul<PackedFormat{5, *}, 4, 32, 1>", 255, 1, 65536, STREAM),
    Budget("StreamMatmul<PackedFormat{4, *}, 1, 40, 2>", 128, 2, 16384, STREAM_F16),
    Budget("StreamMatmul<PackedFormat{4, *}, 1, 96, 1>", 240, 1, 16384, STREAM_F16),
    Budget("StreamMatmul<PackedFormat{4, *}, 2, 40, 1>", 216, 1, 32768, STREAM_F16),
    Budget("StreamMatmul<PackedFormat{4, *}, 4, 32, 1>", 248, 1, 65536, STREAM_F16),
    Budget("StreamPair<1>", 200, 1, 16384, ("LDGSTS.128", "HMMA")),
    Budget("StreamPair<4>", 255, 1, 65536, ("LDGSTS.128", "HMMA")),
    # Arguments: format (7: t2, 8: t1_6), tiles of 8 tokens.
    Budget("TernaryMatmul<[78], 1>", 120, 2, 43008, ("LDG.E.128", "IMMA")),
    Budget("TernaryMatmul<[78], 2>", 120, 1, 86016, ("LDG.E.128", "IMMA")),
    Budget("FloatMatmul<1>", 48, 5, 1024, ("LDG.E.128",)),
    Budget("FloatMatmul<8>", 80, 3, 8192, ("LDG.E.128",)),
    # Arguments: dtype of keys (0: f32, 1: f16, 2: bf16, 3: i8), warps: head_dim / 32.
    Budget("AttentionKernel<0, 2>", 176, 2, 55168, ATTENTION_F32),
    Budget("AttentionKernel<0, 4>", 168, 1, 92288, ATTENTION_F32),
    Budget("AttentionKernel<0, 8>", 152, 1, 101376, ATTENTION_F32),
    Budget("AttentionKernel<[12], 2>", 176, 3, 43920, ATTENTION),
    Budget("AttentionKernel<[12], 4>", 168, 2, 78992, ATTENTION),
    Budget("AttentionKernel<[12], 8>", 152, 1, 83600, ATTENTION),
    Budget("AttentionKernel<3, 2>", 248, 3, 43904, ATTENTION),
    Budget("AttentionKernel<3, 4>", 160, 2, 62592, ATTENTION),
    Budget("AttentionKernel<3, 8>", 128, 1, 99968, ATTENTION),
    # Arguments: dtype of keys, columns of 32 dims, warps, stages of the ring, columns whose results
    # are in registers. A multiprocessor holds 8 warps, of an A100 with the widest heads 4.
    Budget("PrefillKernel<[12], 2, 8, 4, 2>", 255, 1, 84992, PREFILL),
    Budget("PrefillKernel<[12], 3, 8, 4, 3>", 255, 1, 93184, PREFILL),
    Budget("PrefillKernel<[12], 4, 8, 3, 3>", 255, 1, 101376, PREFILL),
    Budget("PrefillKernel<[12], 8, 4, 2, 2>", 255, 1, 116736, PREFILL),
    Budget("PrefillKernel<3, 2, 8, 2, 0>", 255, 1, 105472, PREFILL),
    Budget("PrefillKernel<3, 4, 8, 2, 1>", 255, 1, 138240, PREFILL),
    Budget("PrefillKernel<3, 8, 4, 2, 2>", 255, 1, 137216, PREFILL),
    # What blocks of GPUs with 99 KB have room for.
    Budget("PrefillKernel<3, 2, 4, 2, 0>", 255, 1, 79872, PREFILL),
    Budget("PrefillKernel<3, 4, 4, 2, 1>", 255, 1, 96256, PREFILL),
    # Arguments: dtype of rows, threads of a row.
    Budget("RmsNormKernel<*, 32>", 64, 4, 8, ROWS),
    Budget("RmsNormKernel<*, 512>", 64, 2, 128, ROWS),
    Budget("LayerNormKernel<*, 32>", 56, 4, 8, ROWS),
    Budget("LayerNormKernel<*, 512>", 64, 2, 128, ROWS),
    Budget("GatedKernel<*>", 32, 16, opcodes=ROWS),
    Budget("MergeStatesKernel<*>", 32, 16, 3584, ROWS),
    Budget("RopeAppendKernel", 40, 6, 8224, ROWS),
    # Argument: whether pairs are neighbours.
    Budget("RopeKernel<*, false>", 40, 12, opcodes=ROWS),
    Budget("RopeKernel<*, true>", 32, 16, opcodes=ROWS),
    Budget("RopeTableKernel", 32, 16),
    Budget("PickRowsKernel<*>", 32, 16, opcodes=ROWS),
    Budget("PickPackedKernel", 32, 16, opcodes=("STG.E.128",)),
    Budget("ToOperandKernel", 32, 8, opcodes=ROWS),
    Budget("TokenRowsKernel", 32, 8, 64, ("LDG.E.128",)),
    Budget("MoveTokens", 48, 10),
    Budget("TopRows", 32, 2, 512),
    Budget("UnaryKernel", 32, 8),
    Budget("BinaryKernel", 32, 8),
)
