// How the engine's pages (ops/kv_layout.h) lie in the registers of mma.m16n8k16, as they are.
//
// The kernels multiply blocks of 32 tokens x 32 dims, of keys or of values. Lane = 4 c + q holds of
//   A (16 x 16)  rows c and c + 8, k = 2q, 2q+1 and 2q+8, 2q+9
//   B (16 x 8)   column c, the same k
//   D (16 x 8)   rows c and c + 8, columns 2q, 2q+1
// and the order of k and of the columns is ours to choose, the same on both sides.
//
// Keys, 16-bit (i8): a 64-byte line is 16 tokens x 2 dims (4 dims); a dword one token's.
//
//     16 bytes of a lane       tokens 4c .. 4c+3 of the line's dims, line 4l + q of load l
//     load l                   a register of B for four products (column c of product i: token
//                              4c + i); l and l + 1 are both registers of a step of 16 dims
//                              (i8: a dword widened is both registers, so that dims 4q, 4q+1 and
//                              4q+2, 4q+3 are its k)
//
// so that lane (c, q) has the scores of the columns 2q, 2q+1 of four products: tokens 8q + i and
// 8q + 4 + i, which are 8 neighbours. Rounded in pairs they are the A operand for the values:
//
//     step s = 0, 1            k = 2q, 2q+1: tokens 8q + 4s, + 1;  k = 2q+8, 2q+9: 8q + 4s + 2, + 3
//
// Values, 16-bit (i8): a line is 16 dims x 2 tokens (4 tokens); a dword one dim's.
//
//     16 bytes of a lane       dims 4c .. 4c+3 of the tokens' line, of tokens 8q + 2l, + 1 (i8:
//                              8q + 4l .. + 3): loads 2s, 2s + 1 are the registers of B of step s
//                              (i8: load s), for four products whose columns c are dims 4c + i
//
// and lane (c, q) ends up with dims 8q .. 8q+7 of rows c and c + 8. Nothing is shuffled, and each
// load of a warp is of whole sectors. Pages of f32 have the same results in the same lanes, from
// multiply-adds of blocks that the warp's lanes share.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/unit.h"
#include "effinfer/dtype.h"

namespace effinfer::cuda {

// Tokens and dims of a block.
inline constexpr int kBlock = 32;

template <DType kType>
struct KvBlock {
  static constexpr int P = kType == DType::f32 ? 1 : kType == DType::i8 ? 4 : 2;  // in a dword
  static constexpr int kLoads = 8 / P;  // of 16 bytes, by each lane
  static constexpr int kStepLoads = kLoads / 2;
  static constexpr bool kScaled = kType == DType::i8;

  // What lane's load `l` of a block is: a line of keys and four tokens of it, or some tokens of
  // values and four dims of theirs.
  EFFINFER_DEVICE static int quad(int lane) { return P == 1 ? lane % 8 : lane / 4; }
  static constexpr int kKeyLines = 4;  // from one load of a lane to the next
  static constexpr int kValueGroups = P == 1 ? 4 : 1;
  static constexpr int kValueStep = kBlock / P / kValueGroups;  // of those, to the next 32 tokens
  EFFINFER_DEVICE static int key_line(int lane, int l) {
    return kKeyLines * l + (P == 1 ? lane / 8 : lane % 4);
  }
  EFFINFER_DEVICE static int value_group(int lane, int l) {
    return kValueGroups * l + (P == 1 ? lane / 8 : kLoads * (lane % 4));
  }

  // A lane's 16 bytes are copied by another one, so that each eight lanes, which go to memory
  // together, copy 128 bytes in one piece: two lines of 16 keys, or all 32 dims of a group's
  // values. Whose bytes lane `lane` copies:
  EFFINFER_DEVICE static int key_owner(int lane) {
    if constexpr (P == 1) return lane;
    return lane / 16 * 16 + lane % 4 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
  }
  EFFINFER_DEVICE static int value_owner(int lane) {
    if constexpr (P == 1) return lane;
    return lane % 8 * 4 + lane / 8;
  }
  // Where the bytes of lane 4 c + q lie in shared memory: the eight lanes that copy, and those that
  // read, meet all banks evenly.
  EFFINFER_DEVICE static int place(int lane) {
    if constexpr (P == 1) return lane;
    const int q = lane % 4;
    return q * 8 + (lane / 4 ^ (q % 2 * 4 + q / 2 * 2));
  }

  // Bytes from a head's page on; `line` is of P dims, `group` of P tokens.
  EFFINFER_DEVICE static int key_offset(int token, int line, int dims) {
    return (token / 16 * (dims / P) + line) * 64 + token % 16 * 4;
  }
  EFFINFER_DEVICE static int value_offset(int group, int dim, int dims) {
    return (group * (dims / 16) + dim / 16) * 64 + dim % 16 * 4;
  }
  // Number `index` of a dword, where number `to` lies.
  EFFINFER_DEVICE static uint32_t moved(uint32_t dword, int index, int to) {
    if constexpr (P == 1) {
      return dword;
    } else {
      constexpr int kBits = 32 / P;
      return (dword >> index * kBits & ((1u << kBits) - 1)) << to * kBits;
    }
  }
};

// Two int8 numbers in the low bytes of both halves, as bfloat16. A number v is m or m - 128 with
// m = v & 127; 128 + m is 0x4300 + m, and what is subtracted 128 or 256.
template <class Unit>
EFFINFER_DEVICE uint32_t widen_pair(Unit& unit, uint32_t halves) {
  const uint32_t sums = (halves & 0x007f007f) | 0x43004300;
  const uint32_t minus = (halves & 0x00800080) | 0xc300c300;
  constexpr uint32_t kOnes = 0x3f803f80;
  return unit.fma_bf16x2(sums, kOnes, minus);
}

// The four int8 numbers of a dword.
template <class Unit>
EFFINFER_DEVICE void widen(Unit& unit, uint32_t dword, uint32_t (&pairs)[2]) {
  pairs[0] = widen_pair(unit, (dword & 0xff) | (dword & 0xff00) << 8);
  pairs[1] = widen_pair(unit, (dword >> 16 & 0xff) | (dword >> 8 & 0xff0000));
}

// The products of a warp's blocks with 16 rows. Queries and weights lie in shared memory as A
// operands, rounded: to float16 beside float16 (11 bits where bfloat16 has 8; queries are scaled
// into its range), else to bfloat16, whose range holds weights times the scale of an int8 value.
template <DType kType, int kWarps>
struct Products {
  using Block = KvBlock<kType>;
  static constexpr bool kScalesQueries = kType == DType::f16;
  struct Operands {
    Quad queries[2 * kWarps][kWarp];  // of steps of 16 dims
    Quad weights[16][kWarp];          // of steps of 16 tokens
  };
  using Slot = Quad[Block::kLoads][kWarp];

  template <class Unit>
  EFFINFER_DEVICE static uint32_t rounded(Unit& unit, float low, float high) {
    return kType == DType::f16 ? unit.f16x2(low, high) : unit.bf16x2(low, high);
  }
  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, float (&d)[4], const Quad& a,
                                       const uint32_t (&b)[2]) {
    if constexpr (kType == DType::f16) {
      unit.mma_f16(d, a.words, b);
    } else {
      unit.mma(d, a.words, b);
    }
  }

  // d += queries x the keys of a block: of `steps` steps of 16 dims from `step` on the first two.
  template <class Unit>
  EFFINFER_DEVICE static void add_scores(Unit& unit, const Operands& from, const Slot& keys,
                                         int step, int steps, float (&d)[4][4]) {
    EFFINFER_UNROLL
    for (int s = 0; s < 2; ++s) {
      if (s >= steps) break;
      const Quad a = from.queries[step + s][unit.lane];
      multiply_quads(unit, d, a, step_of(unit, keys, s), sizeof keys[0]);
    }
  }

  // d += weights of block `index` of tokens x their values.
  template <class Unit>
  EFFINFER_DEVICE static void add_values(Unit& unit, const Operands& from, const Slot& values,
                                         int index, float (&d)[4][4]) {
    EFFINFER_UNROLL
    for (int s = 0; s < 2; ++s) {
      const Quad a = from.weights[2 * index + s][unit.lane];
      multiply_quads(unit, d, a, step_of(unit, values, s), sizeof values[0]);
    }
  }

  // d += `a` x a step of 16 dims or tokens, of which the lane loads 16 bytes, or twice with so many
  // bytes from one to the next.
  template <class Unit>
  EFFINFER_DEVICE static void multiply_quads(Unit& unit, float (&d)[4][4], const Quad& a,
                                             const uint8_t* loads, int distance) {
    if constexpr (kType == DType::i8) {
      const Quad b = *reinterpret_cast<const Quad*>(loads);
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint32_t pairs[2];
        widen(unit, b.words[i], pairs);
        multiply(unit, d[i], a, pairs);
      }
    } else {
      const Quad low = *reinterpret_cast<const Quad*>(loads);
      const Quad high = *reinterpret_cast<const Quad*>(loads + distance);
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        const uint32_t pairs[2] = {low.words[i], high.words[i]};
        multiply(unit, d[i], a, pairs);
      }
    }
  }

  // Weights of block `index`, as add_scores() leaves scores.
  template <class Unit>
  EFFINFER_DEVICE static void set_weights(Unit& unit, Operands& to, int index,
                                          const float (&w)[4][4]) {
    EFFINFER_UNROLL
    for (int s = 0; s < 2; ++s) to.weights[2 * index + s][unit.lane] = weight_quad(unit, w, s);
  }
  // Of step `s` of a block.
  template <class Unit>
  EFFINFER_DEVICE static Quad weight_quad(Unit& unit, const float (&w)[4][4], int s) {
    return {rounded(unit, w[0][s], w[1][s]), rounded(unit, w[0][2 + s], w[1][2 + s]),
            rounded(unit, w[2][s], w[3][s]), rounded(unit, w[2][2 + s], w[3][2 + s])};
  }

 private:
  // The lane's loads of step `s` of a block.
  template <class Unit>
  EFFINFER_DEVICE static const uint8_t* step_of(Unit& unit, const Slot& slot, int s) {
    return reinterpret_cast<const uint8_t*>(&slot[Block::kStepLoads * s][Block::place(unit.lane)]);
  }
};

// In float32 throughout, by multiply-adds in the order of dims and of tokens.
template <int kWarps>
struct Products<DType::f32, kWarps> {
  using Block = KvBlock<DType::f32>;
  static constexpr bool kScalesQueries = false;
  static constexpr int kRow = 17;  // of weights: lanes store to, and read from, different banks
  struct Operands {
    float queries[kWarps * kBlock][16];
    float weights[256][kRow];
  };
  using Slot = Quad[Block::kLoads][kWarp];

  // Queries: load(row, dim) of 16 rows; by the threads of the block together.
  template <class Unit, class Load>
  EFFINFER_DEVICE static void set_queries(Unit& unit, Operands& to, int dims, Load&& load) {
    for (int i = unit.thread; i < dims * 16; i += kWarps * kWarp) {
      to.queries[i / 16][i % 16] = load(i % 16, i / 16);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void add_scores(Unit& unit, const Operands& from, const Slot& keys,
                                         int step, int steps, float (&d)[4][4]) {
    for (int i = 0; i < kBlock && i < 16 * steps; ++i) {
      const float (&rows)[16] = from.queries[16 * step + i];
      add_products(unit, rows, keys, i, d);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void add_values(Unit& unit, const Operands& from, const Slot& values,
                                         int index, float (&d)[4][4]) {
    for (int i = 0; i < kBlock; ++i) {
      add_products(unit, from.weights[index * kBlock + i], values, i, d);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void set_weights(Unit& unit, Operands& to, int index,
                                          const float (&w)[4][4]) {
    const int row = unit.lane / 4;
    EFFINFER_UNROLL
    for (int t = 0; t < 8; ++t) {
      float* token = to.weights[index * kBlock + unit.lane % 4 * 8 + t];
      token[row] = w[t % 4][t / 4];
      token[row + 8] = w[t % 4][2 + t / 4];
    }
  }

 private:
  // Line `line` of a block, 32 numbers, times a number of each row.
  template <class Unit>
  EFFINFER_DEVICE static void add_products(Unit& unit, const float* rows, const Slot& block,
                                           int line, float (&d)[4][4]) {
    const Quad* numbers = &block[line / 4][line % 4 * 8 + unit.lane % 4 * 2];
    add_numbers(numbers[0], numbers[1], rows[unit.lane / 4], rows[unit.lane / 4 + 8], d);
  }
  EFFINFER_REGISTERS EFFINFER_DEVICE static void add_numbers(Quad low, Quad high, float a, float b,
                                                             float (&d)[4][4]) {
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) {
      d[i][0] = fmaf(a, float_of(low.words[i]), d[i][0]);
      d[i][1] = fmaf(a, float_of(high.words[i]), d[i][1]);
      d[i][2] = fmaf(b, float_of(low.words[i]), d[i][2]);
      d[i][3] = fmaf(b, float_of(high.words[i]), d[i][3]);
    }
  }
};

}  // namespace effinfer::cuda
