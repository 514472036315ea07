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
    hopper: tuple[str, ...] = ()  # in place of these, where sm_90a has another way
    arch: str = "*"  # those that it is for, as an fnmatch pattern; for others it is empty
    # Waits for wgmma at most: ptxas puts one behind each where it serialises them, without a word.
    waits: int | None = None


# What rows say of registers and blocks is for these. On others ptxas takes some more, so that what
# is at the limit here keeps a few bytes in local memory there.
PINNED = ("sm_80", "sm_90", "sm_90a")
STACK_ELSEWHERE = 112

# Loads and stores of local memory: what spills and indexed arrays become.
FORBIDDEN = ("LDL", "STL")

# Where the kernels for compute capability 9.0 have others beside them.
NOT_HOPPER = "sm_[!9]*"

# Weights and activations without a detour through registers, products on the tensor cores.
STREAM = ("LDGSTS.128", "HMMA")
BULK_STREAM = ("UBLKCP", "SYNCS", "HMMA")
AHEAD_STREAM = (*BULK_STREAM, "UBLKPF")  # of the next weights
BOX_STREAM = (*BULK_STREAM, "UTMALDG")
TERNARY = ("LDGSTS.128", "IMMA")
BULK_TERNARY = ("UBLKCP", "SYNCS", "IMMA")
# Keys and values come as copies of 16 bytes, on Hopper as whole pages; what weighs keys as loads.
ATTENTION = ("LDG.E.128", "LDGSTS.128", "HMMA")
BULK_ATTENTION = ("LDG.E.128", "UBLKCP", "SYNCS", "HMMA")
ATTENTION_F32 = ("LDG.E.128", "LDGSTS.128")
# Tiles of activations come by tensor maps and weights by bulk copies, for which warps wait at
# mbarriers.
WGMMA = ("HGMMA", "UTMALDG", "UBLKCP", "SYNCS", "USETMAXREG")
# Keys and values as a caller has them.
PLAIN = ("LDGSTS.128", "LDSM.16", "HMMA")
# Pages come as loads or, where they are re-arranged, as copies. Counts of places become uniform by
# reductions.
WGMMA_ATTENTION = (
    *("HGMMA", "SYNCS", "USETMAXREG", "LDG.E.128", "STS.128", "UBLKCP", "MUFU.EX2"),
    *("REDUX", "ATOMG"),
)
PREFILL = ("LDS.128", "LDGSTS.128", "HMMA", "MUFU.EX2")
# Rows in and out, 16 bytes a thread.
ROWS = ("LDG.E.128", "STG.E.128")

BUDGETS = (
    # Arguments: format (bits 0 to 3: u4, u5, u6, u8; 4: f16, 5: bf16), most tokens, most
    # warps, rounds. Their shared memory is the launch's.
    Budget("StreamMatmul<PackedFormat{*}, [18], 16, 1>", 128, 1, 128, STREAM, AHEAD_STREAM),
    Budget("StreamMatmul<PackedFormat{*[!4]}, 16, 16, 1>", 128, 1, 128, STREAM, BOX_STREAM),
    # Q3_K, for which 8.0 has too few registers.
    Budget("StreamMatmul<PackedFormat{*4}, 16, 16, 1>", 128, 1, 128, BOX_STREAM, arch="sm_90a"),
    Budget("StreamMatmul<PackedFormat{*}, 32, 16, 1>", 128, 1, 128, BOX_STREAM, arch="sm_90a"),
    Budget("StreamMatmul<PackedFormat{*}, 32, 8, 2>", 232, 1, 128, STREAM, arch=NOT_HOPPER),
    # Arguments: format, tokens. What the entry has is for all its warps alike.
    Budget("WgmmaMatmul<PackedFormat{*}, 128>", 168, 1, 197632, WGMMA, arch="sm_90a", waits=4),
    Budget("WgmmaMatmul<PackedFormat{*}, 256>", 168, 1, 229376, WGMMA, arch="sm_90a", waits=4),
    Budget("StreamPair<16>", 224, 1, 128, STREAM, BOX_STREAM),
    # Arguments: format, tiles of 8 tokens.
    Budget("TileMatmul<*, 16>", 255, 1, 98432, STREAM, arch=NOT_HOPPER),
    Budget("TileMatmul<*, 8>", 192, 1, 98432, STREAM, arch=NOT_HOPPER),
    Budget("TileRows<*, 2>", 104, 2, 49152, STREAM, arch=NOT_HOPPER),
    Budget("TileRows<*, 8>", 104, 1, 98304, STREAM, arch=NOT_HOPPER),
    # Arguments: format (7: t2, 8: t1_6), tiles of 8 tokens.
    # Their shared memory is the launch's, too.
    Budget("TernaryMatmul<7, 1>", 80, 6, 128, TERNARY, BULK_TERNARY),
    Budget("TernaryMatmul<8, 1>", 120, 4, 128, TERNARY, BULK_TERNARY),
    Budget("TernaryMatmul<[78], 2>", 120, 4, 128, TERNARY, BULK_TERNARY),
    Budget("FloatMatmul<1>", 48, 5, 1024, ("LDG.E.128",)),
    Budget("FloatMatmul<8>", 80, 3, 8192, ("LDG.E.128",)),
    # Arguments: dtype of keys (0: f32, 1: f16, 2: bf16, 3: i8), warps: head_dim / 32. Where pages
    # come whole the shared memory is the launch's, and attention_kernel.h says what fits.
    Budget("AttentionKernel<0, 2>", 200, 2, 55552, ATTENTION_F32),
    Budget("AttentionKernel<0, 4>", 168, 1, 92672, ATTENTION_F32),
    Budget("AttentionKernel<0, 8>", 152, 1, 101376, ATTENTION_F32),
    Budget("AttentionKernel<[12], 2>", 208, 3, 44416, ATTENTION, BULK_ATTENTION),
    Budget("AttentionKernel<[12], 4>", 168, 2, 79488, ATTENTION, BULK_ATTENTION),
    Budget("AttentionKernel<[12], 8>", 152, 1, 84096, ATTENTION, BULK_ATTENTION),
    Budget("AttentionKernel<3, 2>", 248, 3, 44288, ATTENTION, BULK_ATTENTION),
    Budget("AttentionKernel<3, 4>", 168, 2, 62976, ATTENTION, BULK_ATTENTION),
    Budget("AttentionKernel<3, 8>", 144, 1, 100352, ATTENTION),
    Budget("AttentionMergeKernel", 168, 3, 6144),
    # Arguments: columns of 32 dims.
    Budget("ArrangePages<2>", 64, 8, 1, ROWS, arch="sm_90a"),
    Budget("ArrangePages<4>", 104, 4, 1, ROWS, arch="sm_90a"),
    # Arguments: dtype, columns of 32 dims. Registers as those of WgmmaMatmul.
    Budget("WgmmaAttention<[12], 2>", 168, 1, 183296, WGMMA_ATTENTION, arch="sm_90a", waits=5),
    Budget("WgmmaAttention<[12], 4>", 168, 1, 232448, WGMMA_ATTENTION, arch="sm_90a", waits=5),
    # Arguments: dtype of keys, columns of 32 dims, warps, stages of the ring, columns whose results
    # are in registers. A multiprocessor holds 8 warps, of an A100 with the widest heads 4.
    Budget("PrefillKernel<[12], 2, 8, 4, 2>", 255, 1, 84992, PREFILL),
    Budget("PrefillKernel<[12], 3, 8, 4, 3>", 255, 1, 93184, PREFILL),
    Budget("PrefillKernel<[12], 4, 8, 3, 3>", 255, 1, 101376, PREFILL),
    Budget("PrefillKernel<[12], 8, 4, 2, 2>", 255, 1, 116736, PREFILL),
    Budget("PrefillKernel<3, 2, 8, 2, 0>", 255, 1, 105472, PREFILL),
    Budget("PrefillKernel<3, 4, 8, 2, 1>", 255, 1, 138240, PREFILL),
    Budget("PrefillKernel<3, 8, 4, 2, 1>", 255, 1, 145408, PREFILL),
    # What blocks of GPUs with 99 KB have room for.
    Budget("PrefillKernel<3, 2, 4, 2, 0>", 255, 1, 79872, PREFILL, arch=NOT_HOPPER),
    Budget("PrefillKernel<3, 4, 4, 2, 1>", 255, 1, 96256, PREFILL, arch=NOT_HOPPER),
    # Arguments: dtype of rows, warps of a row at most. Those of few have a quarter or a third.
    Budget("RmsNormKernel<*, 1>", 80, 3, 8, ROWS),
    Budget("RmsNormKernel<*, 32>", 64, 1, 256, ROWS),
    Budget("RmsNormKernel<*, 24>", 80, 1, 192, ROWS),
    Budget("LayerNormKernel<*, 1>", 80, 3, 8, ROWS),
    Budget("LayerNormKernel<*, 32>", 64, 1, 256, ROWS),
    Budget("LayerNormKernel<*, 24>", 80, 1, 192, ROWS),
    Budget("GatedKernel<*>", 32, 16, opcodes=ROWS),
    Budget("MergeStatesKernel<*>", 40, 12, 3584, ROWS),
    Budget("RopeAppendKernel", 64, 4, 8192, ROWS),
    # Argument: whether pairs are neighbours.
    Budget("RopeKernel<*, false>", 40, 12, opcodes=ROWS),
    Budget("RopeKernel<*, true>", 32, 16, opcodes=ROWS),
    Budget("RopeTableKernel", 32, 16),
    Budget("PickRowsKernel<*>", 32, 16, opcodes=ROWS),
    Budget("PickPackedKernel", 32, 16, opcodes=("STG.E.128",)),
    Budget("ToOperandKernel", 32, 8, opcodes=ROWS),
    Budget("TokenRowsKernel", 32, 8, 64, ("LDG.E.128",)),
    Budget("MoveTokens", 48, 10),
    Budget("RetainSlots", 48, 10),
    Budget("RotateKeys", 48, 20),
    Budget("DecodePages", 56, 8, 4160),
    Budget("ExpandPages", 96, 5, 4160),
    Budget("TopRows", 64, 1, 512),
    # More registers would be no help: a block has 56 KB of copies under way with these.
    Budget("SampleRows", 128, 1, 100352, ("LDGSTS", "DADD")),
    Budget("RowExtents", 32, 4, 128, ("LDG.E.128",)),
    Budget("RowRanges", 40, 3, 5760, ("LDG.E.128", "ATOMS.ADD")),
    Budget("WeighParts", 64, 2, 1536, ("LDG.E.128", "DADD")),
    Budget("RowTop", 128, 1, 100352, ("LDGSTS",)),
    Budget("ChainSpeculation", 96, 1, 67328, ("LDGSTS", "DADD")),
    Budget("TokenBitmask", 32, 8),
    # Argument: dtype of keys.
    Budget("BlockIndexKernel<[12]>", 120, 1, 139072, ("LDG.E.128", "HMMA")),
    Budget("BlockIndexKernel<3>", 128, 1, 139072, ("LDG.E.128", "HMMA")),
    Budget("ColumnSumsKernel<*>", 160, 3, 34816, ("LDG.E.128", "HMMA", "MUFU.EX2")),
    Budget("ColumnScoresKernel<*>", 136, 2, 75264, ("LDG.E.128", "HMMA", "STS.128")),
    Budget("ColumnChoiceKernel", 128, 1, 100096, ("LDGSTS", "DADD")),
    Budget("ColumnListsKernel", 48, 10),
    Budget("PageBoundsKernel", 80, 3, opcodes=("LDG.E.128", "ATOMG")),
    Budget("UnitScoresKernel", 56, 4, 32768, ("LDG.E", "FFMA")),
    Budget("UnitKeysKernel", 56, 4, 37888, ("LDS.128", "FFMA")),
    Budget("PageIndexKernel", 96, 1, 2112, ("MUFU.EX2", "FFMA")),
    Budget("HashCodesKernel", 64, 2, 65856, ("LDG.E.128", "VOTE", "ATOMG")),
    Budget("HashIndexKernel", 128, 2, 53760, ("LDG.E.64", "LDS")),
    Budget("BucketMeanKernel", 48, 5),
    Budget("BucketKeysKernel", 64, 2, 65600, ("LDG.E.128", "VOTE")),
    Budget("BucketIndexKernel", 80, 1, 12864, ("DADD",)),
    Budget("HistoryIndexKernel", 128, 1, 61760, ("LDS.128", "MUFU.EX2")),
    Budget("StridedIndexKernel", 48, 10),
    Budget("UnaryKernel", 32, 8),
    Budget("BinaryKernel", 32, 8),
    Budget("NarrowKernel", 32, 8),
    Budget("ConvertKernel", 40, 6, opcodes=ROWS),
    Budget("PackBitsKernel", 32, 8),
    Budget("WindowRowsKernel", 32, 8),
    Budget("PlaceChosenKernel", 32, 16),
    Budget("UnmirrorKernel", 32, 16),
    Budget("AppendPagesKernel", 40, 6, opcodes=ROWS),
    Budget("RowPositionsKernel", 32, 16),
    Budget("PageLengthsKernel", 32, 16),
    # Arguments: dtype, dims of heads at most.
    Budget("Int8RowsKernel", 56, 8),
    Budget("Int8Matmul", 80, 3, 20480, ("IMMA",)),
    Budget("PoolRowsKernel", 40, 6),
    Budget("CallerBoundsKernel", 40, 6),
    Budget("PageScoresKernel", 40, 6),
    Budget("FloatAttentionKernel", 96, 2, 56392),
    Budget("FloatScoresKernel", 80, 3, 36864),
    Budget("PlainAttentionKernel<[12], 64>", 168, 2, 75536, PLAIN),
    Budget("PlainAttentionKernel<[12], 128>", 240, 1, 147216, PLAIN),
    Budget("PlainAttentionKernel<[12], 256>", 248, 1, 159504, PLAIN),
    Budget("KeyScoresKernel<[12], 64>", 104, 4, 37120, PLAIN),
    Budget("KeyScoresKernel<[12], 128>", 104, 2, 73984, PLAIN),
    Budget("KeyScoresKernel<[12], 256>", 80, 1, 147712, PLAIN),
    Budget("PoolScoresKernel", 64, 8),
    # Arguments: dtype of keys, whether probabilities are added.
    Budget("AttentionMassKernel<*, false>", 128, 4, 21760, ("LDS.128", "MUFU.EX2", "FFMA")),
    Budget("AttentionMassKernel<*, true>", 80, 6, 21760, ("LDS.128", "MUFU.EX2", "FFMA")),
    # Argument: dtype. As much shared memory as a block of an A100 may have.
    Budget("LatentAttentionKernel<[12]>", 255, 1, 165520, PLAIN),
)
