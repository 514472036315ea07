// What rope_append.h writes: where a head of a token lies in the pages of ops/kv_layout.h, and how.
//
// A page's dwords are what attention multiplies: P = 4 / sizeof(element) dims of a token of K are
// a register of mma's B operand for q.k, P tokens of a dim of V one for p.v. P tokens of a step
// thus share dwords of V, and are written by different warps, each its own 8 or 16 bits: bytes are
// locations of their own, and nobody reads before the kernel has ended.
#pragma once

#include <algorithm>

#include "cuda/bodies/kept_chunks.h"
#include "ops/operand.h"
#include "ops/rope_append.h"

namespace effinfer::cuda {

inline constexpr int kMostHeadDim = 256;
inline constexpr int kHeadDims = kMostHeadDim / kWarp;  // of a lane
// A lane has dims 4 (lane + 32 i).., the chunks of RmsNormKernel: fusing changes no bit.
using HeadChunks = RowChunks<float, 1, kHeadDims / 4>;

struct RopeAppendParams {
  ops::RopeAppendProblem problem;
  int64_t head_bytes = 0;  // of a page
  int q_heads = 0;         // 0 without queries
  int rope_dims = 0;       // 0 without a table
  int num_warps = 0;
  float per_dim = 0.0f;   // 1 / head_dim
  bool vectored = false;  // rows of q, k and q_out, weights of norms
  bool whole = false;     // four consecutive dims lie in one half of the dims that rotate
};

// A head's part of a page, and the token's place in it.
struct HeadPlace {
  int64_t head = 0;  // of all pages' heads; -1: the row is of no sequence
  int token = 0;
};

// A row's sequence is the number of sequences that end at it or before, which lanes count.
template <class Unit>
EFFINFER_DEVICE HeadPlace place_of(Unit& unit, const ops::RopeAppendProblem& a, int row, int head) {
  const ops::BatchLayout& batch = a.batch;
  const int sequences = static_cast<int>(batch.num_sequences);
  int sequence = 0;
  for (int i = unit.lane; i < sequences; i += kWarp) {
    sequence += unit.load(batch.qo_indptr + i + 1) <= row ? 1 : 0;
  }
  EFFINFER_UNROLL
  for (int mask = kWarp / 2; mask > 0; mask /= 2) sequence += unit.shfl_xor(sequence, mask);
  if (sequence == sequences) return {-1, 0};
  const int position =
      unit.load(batch.kv_len + sequence) - (unit.load(batch.qo_indptr + sequence + 1) - row);
  const int index = unit.load(batch.kv_indptr + sequence) + position / int{ops::kPageSize};
  const int64_t page = unit.load(batch.kv_indices + index);
  return {page * a.kv.num_kv_heads + head, position % int{ops::kPageSize}};
}

// max|x| / 127, and its inverse: 0 of a head that is too small for one, NaN and 0 of a head with
// an infinity or a NaN.
struct HeadScale {
  float scale;
  float inverse;
};
template <class Unit>
EFFINFER_DEVICE HeadScale head_scale(Unit& unit, uint32_t highest) {
  // Bits of |x| order as the numbers do, NaNs on top.
  EFFINFER_UNROLL
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const uint32_t other = unit.shfl_xor(highest, mask);
    highest = other > highest ? other : highest;
  }
  if (highest >= 0x7f800000u) return {float_of(0x7fc00000u), 0.0f};
  const float max = float_of(highest);
  if (max < ops::kSmallestBlock) return {0.0f, 0.0f};
  return {max / 127.0f, 127.0f / max};
}
EFFINFER_DEVICE uint32_t magnitude(float x) {
  return bits_of(x) & 0x7fffffffu;
}
// To nearest even; a head without an inverse is zeros.
EFFINFER_DEVICE uint32_t int8_of(float x, float inverse) {
  const int q = inverse == 0.0f ? 0 : static_cast<int>(rintf(x * inverse));
  return static_cast<uint32_t>(q) & 0xffu;
}

template <class Unit>
EFFINFER_DEVICE void append_key(Unit& unit, const RopeAppendParams& p, HeadPlace place,
                                HeadChunks& chunks) {
  if (place.head < 0) return;
  const ops::KvLayer& kv = p.problem.kv;
  auto* page = reinterpret_cast<uint32_t*>(kv.k + place.head * p.head_bytes);
  // The lines of `dwords` dwords of dims, one after the other: a line is 16 tokens'.
  const auto store = [&](int dwords, int g, uint32_t dword) {
    page[(place.token / 16 * dwords + g) * 16 + place.token % 16] = dword;
  };
  const int dim = kv.head_dim;
  HeadScale scale{0.0f, 0.0f};
  if (kv.dtype == DType::i8) {
    uint32_t highest = 0;
    chunks.for_each(unit, dim, [&](int, const float (&y)[4], int) {
      EFFINFER_UNROLL
      for (int e = 0; e < 4; ++e) highest = std::max(highest, magnitude(y[e]));
    });
    scale = head_scale(unit, highest);
    if (unit.lane == 0) kv.k_scale[place.head * ops::kPageSize + place.token] = scale.scale;
  }
  chunks.for_each(unit, dim, [&](int first, const float (&y)[4], int) {
    switch (kv.dtype) {
      case DType::f32:
        EFFINFER_UNROLL
        for (int e = 0; e < 4; ++e) store(dim, first + e, bits_of(y[e]));
        break;
      case DType::f16:
        store(dim / 2, first / 2, unit.f16x2(y[0], y[1]));
        store(dim / 2, first / 2 + 1, unit.f16x2(y[2], y[3]));
        break;
      case DType::bf16:
        store(dim / 2, first / 2, unit.bf16x2(y[0], y[1]));
        store(dim / 2, first / 2 + 1, unit.bf16x2(y[2], y[3]));
        break;
      default:
        store(dim / 4, first / 4,
              int8_of(y[0], scale.inverse) | int8_of(y[1], scale.inverse) << 8 |
                  int8_of(y[2], scale.inverse) << 16 | int8_of(y[3], scale.inverse) << 24);
    }
  });
}

// A lane has dims lane + 32 i: neighbours' dwords lie side by side in a line.
template <class Element, class Unit, class Convert>
EFFINFER_DEVICE void store_value(Unit& unit, uint8_t* page, int token, int dim,
                                 const float (&v)[kHeadDims], Convert&& convert) {
  constexpr int kTokens = 4 / sizeof(Element);  // of a dword
  Element* to = reinterpret_cast<Element*>(page) + ops::v_offset(token, unit.lane, dim, kTokens);
  EFFINFER_UNROLL
  for (int i = 0; i < kHeadDims; ++i) {
    if (unit.lane + i * kWarp < dim) to[i * kWarp * kTokens] = convert(v[i]);
  }
}

template <class Unit>
EFFINFER_DEVICE void append_value(Unit& unit, const RopeAppendParams& p, int row, int head) {
  const ops::KvLayer& kv = p.problem.kv;
  const int dim = kv.head_dim;
  const float* own = p.problem.v + row * p.problem.v_stride + head * dim + unit.lane;
  const HeadPlace place = place_of(unit, p.problem, row, head);
  unit.wait_for_inputs();
  if (place.head < 0) return;
  float v[kHeadDims];
  EFFINFER_UNROLL
  for (int i = 0; i < kHeadDims; ++i) {
    v[i] = unit.lane + i * kWarp < dim ? unit.load(own + i * kWarp) : 0.0f;
  }
  uint8_t* page = kv.v + place.head * p.head_bytes;
  HeadScale scale{0.0f, 0.0f};
  if (kv.dtype == DType::i8) {
    uint32_t highest = 0;
    EFFINFER_UNROLL
    for (int i = 0; i < kHeadDims; ++i) highest = std::max(highest, magnitude(v[i]));
    scale = head_scale(unit, highest);
    if (unit.lane == 0) kv.v_scale[place.head * ops::kPageSize + place.token] = scale.scale;
  }
  switch (kv.dtype) {
    case DType::f32:
      return store_value<float>(unit, page, place.token, dim, v, [](float y) { return y; });
    case DType::f16:
      return store_value<uint16_t>(unit, page, place.token, dim, v, [&](float y) {
        return static_cast<uint16_t>(unit.f16x2(y, 0.0f));
      });
    case DType::bf16:
      return store_value<uint16_t>(unit, page, place.token, dim, v, [&](float y) {
        return static_cast<uint16_t>(unit.bf16x2(y, 0.0f));
      });
    default:
      return store_value<uint8_t>(unit, page, place.token, dim, v, [&](float y) {
        return static_cast<uint8_t>(int8_of(y, scale.inverse));
      });
  }
}

}  // namespace effinfer::cuda
