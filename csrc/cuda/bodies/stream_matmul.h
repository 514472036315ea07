// y = x W^T for any number of tokens, with bfloat16 activations and packed weights (dequant.h) that
// are read once: what decoding and verification run.
//
// A block has eight or sixteen warps. Each takes 32 rows ("a unit": two groups of a weight; with
// GLU one group of each of the two, so that gate and up meet in one block) and one slice of k; a
// unit has 16, 8, 4, 2 or 1 slices by its weight's shape alone. Per scale block the products are
// summed in float32 by the tensor cores, which multiply integers and bfloat16 exactly, then scaled
// and added in float32 in the order of k; the slices' sums are added in their order, of 16 first
// each two. Minima multiply the sum of a block's activations, which is one more product, with a row
// of ones.
//
// Tokens go in tiles of 8, the columns of a product. A kernel has 1, 2 or 4 tiles, and each of its
// sums is made by the same operations for all: a token's bits do not depend on how many there are,
// nor on what the others hold. Of more tokens each 32 have blocks of their own, next to each other
// in the grid: all but one find the weights in the L2 cache.
//
// Weights go from memory to registers, 16 bytes a lane and load, kDepth superblocks ahead.
// Activations come through shared memory (stream_tokens.h).
//
// Instructions of a warp for a superblock of 32 rows and one tile, in the machine code for sm_90,
// and the issue slots that an H100 has for them while it reads the weights at 3 TB/s (1.75 GHz):
//
//   q4_0 182 of 355    q4_k 246 of 355    q5_k 337 of 435    q6_k 307 of 515
//   q8_0 228 of 670    bf16 135 of 1260
//
// so memory bounds all of them, as long as there are enough loads in flight.
#pragma once

#include <cmath>
#include <type_traits>

#include "cuda/bodies/dequant.h"
#include "cuda/bodies/matmul_epilogue.h"
#include "cuda/bodies/row_groups.h"
#include "cuda/bodies/stream_tokens.h"
#include "cuda/bodies/weight_scales.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

inline constexpr int kStreamWarps = 8;
inline constexpr int kStreamRows = 32;
inline constexpr int kMostSliceBits = 4;
inline constexpr int kMostSlots = 1 << kMostSliceBits;

struct StreamPart {
  MatmulWeight weight;
  int32_t units = 0;
  int32_t slice_bits = 0;  // log2 of the slices of k
  int32_t blocks = 0;      // that share the units
};

// Weights of one format, times all tokens. With GLU the second part is the linear one.
struct StreamParams {
  const uint8_t* x = nullptr;
  int64_t x_row_bytes = 0;
  int32_t tokens = 0;
  int32_t superblocks = 0;
  int32_t token_blocks = 0;      // of the kernel's tiles
  int32_t slots = kStreamWarps;  // of a block, or kMostSlots
  ops::UnaryOp glu = ops::UnaryOp::none;
  int64_t header_bytes = 0;      // of a group
  int64_t header_row_bytes = 0;  // of the scales in it
  StreamPart parts[ops::kMaxMatmulParts];
  OperandOut operand;
};

// log2 of the slices of k of a unit. Warps that an H100 holds at a time, 16 a multiprocessor, read
// a superblock each in about the time in which its memory delivers them, and take some more to
// begin and to end: the number of slices for which that is the least.
constexpr int stream_slice_bits(int64_t units, int64_t superblocks) {
  constexpr int64_t kWarps = 132 * 16;
  constexpr int64_t kAround = 3;  // superblocks' time
  int best = 0;
  int64_t least = INT64_MAX;
  for (int bits = 0; bits <= kMostSliceBits && superblocks >> bits != 0; ++bits) {
    const int64_t rounds = ((units << bits) + kWarps - 1) / kWarps;
    const int64_t sixteenths = superblocks << kMostSliceBits >> bits;
    const int64_t time = rounds * (sixteenths + (kAround << kMostSliceBits));
    if (time >= least) continue;
    best = bits;
    least = time;
  }
  return best;
}

// The sums of a warp: C fragments of a pair of rows (dequant.h) and a tile of tokens. Element i is
// token 2 t + i % 2 of the tile and row 2 pair + i / 2 of the lane.
template <int kTiles>
struct StreamSums {
  float values[kTiles][2][4];
};

// The inner loop, of weights of one format.
template <ops::PackedFormat kFormat, int kTiles, int kAhead>
struct StreamProduct {
  static constexpr bool kDense = kFormat.scales == ops::ScaleKind::dense;
  static constexpr int kBlockSteps = kFormat.sub_block == 16 ? 1 : 2;
  struct NoScales {
    static constexpr int kRegisters = 0;
  };
  using Scales = std::conditional_t<kDense, NoScales, WeightScales<kFormat>>;

  struct Stage {
    WeightFragments<kFormat> weights;
    Scales scales;
  };
  static constexpr int kStageRegisters = WeightFragments<kFormat>::kRegisters + Scales::kRegisters;
  // Superblocks on their way: as many as kAhead registers hold, from 2 to 6.
  static constexpr int kWanted = kAhead / kStageRegisters;
  static constexpr int kDepth = kWanted < 2 ? 2 : kWanted > 6 ? 6 : kWanted;
  static constexpr int kTokensAhead = StreamTokens<kTiles>::kAhead;

  // The lane's weights, one superblock after the other.
  struct Loads {
    WeightPlace weights;
    const uint8_t* scales;
    const uint8_t* header;
    int64_t header_row;
    uint32_t next;  // superblock

    EFFINFER_DEVICE Loads(const GroupPlace& group, int lane, int superblock, int64_t row_bytes)
        : header(group.header), header_row(row_bytes), next(static_cast<uint32_t>(superblock)) {
      const uint8_t* data = group.superblocks + superblock * ops::superblock_bytes(kFormat);
      weights = weight_place(kFormat.bits, data, lane % 4, lane / 4 % 4);
      if constexpr (!kDense) scales = Scales::place(data, lane / 4 % 4);
    }
    template <class Unit>
    EFFINFER_DEVICE void load(Unit& unit, Stage& stage) {
      constexpr int64_t kBytes = ops::superblock_bytes(kFormat);
      stage.weights.load(unit, weights);
      weights.lines += kBytes;
      weights.high += kBytes;
      if constexpr (!kDense) {
        // A row of the header is for 4 superblocks.
        stage.scales.load(unit, scales, header + (next >> 2) * (ops::kGroupRows * 2), header_row);
        scales += kBytes;
      }
      ++next;
    }
  };

  // Adds superblocks [first, last) to `sums`.
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const StreamParams& p, const GroupPlace& group,
                                  const uint8_t* x, int count, int first, int last,
                                  StreamTokens<kTiles>& tokens, StreamSums<kTiles>& sums) {
    Loads loads(group, unit.lane, first, p.header_row_bytes);
    Stage stages[kDepth];
    EFFINFER_UNROLL
    for (int i = 0; i < kDepth; ++i) {
      if (first + i < last) loads.load(unit, stages[i]);
    }
    // Weights come while the kernel before still runs.
    unit.wait_for_inputs();
    tokens.clear(unit, count);
    TokenCopies<kTiles> copies(unit, x, p.x_row_bytes, count, first);
    EFFINFER_UNROLL
    for (int i = 0; i < kTokensAhead; ++i) copies.fetch(unit, first + i < last, tokens);
    for (int base = first; base < last; base += kDepth) {
      EFFINFER_UNROLL
      for (int i = 0; i < kDepth; ++i) {
        const int superblock = base + i;
        if (superblock < last) {
          unit.template wait<kTokensAhead - 1>();
          unit.sync_warp();  // all have read what the next copies replace
          copies.fetch(unit, superblock + kTokensAhead < last, tokens);
          multiply(unit, stages[i], copies.place, tokens, sums);
          if (superblock + kDepth < last) loads.load(unit, stages[i]);
        }
      }
    }
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE static void add_product(Unit& unit, bool first, float (&sum)[4],
                                          const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if (first) {
      unit.mma_first(sum, a, b);
    } else {
      unit.mma(sum, a, b);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, const Stage& stage, int place,
                                       const StreamTokens<kTiles>& tokens,
                                       StreamSums<kTiles>& sums) {
    EFFINFER_UNROLL
    for (int block = 0; block < 4 / kBlockSteps; ++block) {
      float scale[4];
      float minimum[4];
      if constexpr (!kDense) {
        EFFINFER_UNROLL
        for (int row = 0; row < 4; ++row) {
          scale[row] = stage.scales.scale(unit, block, row);
          if constexpr (kFormat.has_min) {
            minimum[row] = fmaf(scale[row], static_cast<float>(-quant_offset(kFormat)),
                                stage.scales.minimum(unit, block, row));
          }
        }
      }
      multiply_block(unit, stage.weights, place, block, scale, minimum, tokens, sums);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void multiply_block(Unit& unit, const WeightFragments<kFormat>& weights,
                                             int place, int block, const float (&scale)[4],
                                             const float (&minimum)[4],
                                             const StreamTokens<kTiles>& tokens,
                                             StreamSums<kTiles>& sums) {
    constexpr int kParts = WeightFragments<kFormat>::kParts;
    uint32_t a[kBlockSteps][2][kParts][4];
    EFFINFER_UNROLL
    for (int s = 0; s < kBlockSteps; ++s) {
      EFFINFER_UNROLL
      for (int pair = 0; pair < 2; ++pair) {
        const int step = block * kBlockSteps + s;
        weights.template fragment<0>(unit, step, pair, unit.lane % 4, a[s][pair][0]);
        if constexpr (kParts == 2) {
          weights.template fragment<1>(unit, step, pair, unit.lane % 4, a[s][pair][1]);
        }
      }
    }
    EFFINFER_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t b[kBlockSteps][2];
      EFFINFER_UNROLL
      for (int s = 0; s < kBlockSteps; ++s) {
        tokens.fragment(place, tile, block * kBlockSteps + s, unit.lane / 4, unit.lane % 4, b[s]);
      }
      float activations[4];
      if constexpr (kFormat.has_min) {
        constexpr uint32_t kOne = bf16_pair(1);
        EFFINFER_UNROLL
        for (int s = 0; s < kBlockSteps; ++s) {
          add_product(unit, s == 0, activations, {kOne, kOne, kOne, kOne}, b[s]);
        }
      }
      EFFINFER_UNROLL
      for (int pair = 0; pair < 2; ++pair) {
        float products[4];
        EFFINFER_UNROLL
        for (int s = 0; s < kBlockSteps; ++s) {
          EFFINFER_UNROLL
          for (int part = 0; part < kParts; ++part) {
            add_product(unit, s + part == 0, products, a[s][pair][part], b[s]);
          }
        }
        EFFINFER_UNROLL
        for (int i = 0; i < 4; ++i) {
          float& sum = sums.values[tile][pair][i];
          if constexpr (kDense) {
            sum += products[i];
          } else {
            sum = fmaf(scale[2 * pair + i / 2], products[i], sum);
            if constexpr (kFormat.has_min) {
              sum = fmaf(minimum[2 * pair + i / 2], activations[i % 2], sum);
            }
          }
        }
      }
    }
  }
};

}  // namespace effinfer::cuda
