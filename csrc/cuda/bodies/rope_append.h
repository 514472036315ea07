// The appending of keys and values to the pages of ops/kv_layout.h, with norm and rotation: a warp
// one head of one token, of the queries, the keys or the values.
//
// A page's dwords are what attention multiplies: P = 4 / sizeof(element) dims of a token of K are
// a register of mma's B operand for q.k, P tokens of a dim of V one for p.v. P tokens of a step
// thus share dwords of V, and are written by different warps, each its own 8 or 16 bits: bytes are
// locations of their own, and nobody reads before the kernel has ended.
#pragma once

#include "cuda/bodies/norm.h"
#include "cuda/bodies/rope.h"
#include "ops/operand.h"
#include "ops/rope_append.h"

namespace effinfer::cuda {

inline constexpr int kMostHeadDim = 256;

struct RopeAppendParams {
  ops::RopeAppendProblem problem;
  int64_t head_bytes = 0;  // of a page
  int q_heads = 0;         // 0 without queries
  int rope_dims = 0;       // 0 without a table
  int num_warps = 0;
  bool vectored = false;  // rows of q, k and q_out, weights of norms
  bool whole = false;     // four consecutive dims lie in one half of the dims that rotate
};

struct RopeAppendKernel {
  static constexpr const char* kName = "rope_append";
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / kWarp;
  // A lane has dims 4 (lane + 32 i).., the chunks of RmsNormKernel: fusing changes no bit.
  static constexpr int kDims = kMostHeadDim / kWarp;
  using Params = RopeAppendParams;
  using Chunks = RowChunks<float, kWarp, kDims>;
  struct Shared {
    alignas(16) float heads[kWarps][kMostHeadDim];
    float partial[kWarps][1];
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    const ops::RopeAppendProblem& a = p.problem;
    const int index = unit.block * kWarps + unit.warp;
    if (index >= p.num_warps) return;  // whole warps, which meet no other
    const int kv_heads = a.kv.num_kv_heads;
    const int items = p.q_heads + 2 * kv_heads;
    const int row = index / items;
    int item = index % items;
    const int dim = a.kv.head_dim;
    if (item >= p.q_heads + kv_heads) {
      return append_v(unit, p, row, item - p.q_heads - kv_heads);
    }
    const bool is_q = item < p.q_heads;
    if (!is_q) item -= p.q_heads;
    const float* x = (is_q ? a.q + row * a.q_stride : a.k + row * a.k_stride) + item * dim;
    Chunks chunks{x, nullptr, dim, unit.lane, p.vectored, {}};
    chunks.load(unit);
    // Looked up while the head is on its way.
    const Place place = is_q ? Place{} : place_of(unit, a, row, item);
    norm(unit, p, is_q ? a.q_norm : a.k_norm, shared.partial[unit.warp], chunks);
    rotate(unit, p, row, shared.heads[unit.warp], chunks);
    if (!is_q) return append_k(unit, p, place, chunks);
    float* out = a.q_out + row * a.q_out_stride + item * dim;
    chunks.for_each(unit, dim, [&](int first, const float (&y)[4]) {
      store_chunk(out, first, dim, p.vectored, encode<float>(unit, y));
    });
  }

 private:
  // A head's part of a page, and the token's place in it.
  struct Place {
    int64_t head = 0;  // of all pages' heads; -1: the row is of no sequence
    int token = 0;
  };

  // A row's sequence is the number of sequences that end at it or before, which lanes count.
  template <class Unit>
  EFFINFER_DEVICE static Place place_of(Unit& unit, const ops::RopeAppendProblem& a, int row,
                                        int head) {
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

  template <class Unit>
  EFFINFER_DEVICE static void norm(Unit& unit, const Params& p, const float* weight,
                                   float (&partial)[1], Chunks& chunks) {
    if (weight == nullptr) return;
    const float scale = rms_scale<kWarp>(unit, chunks, p.problem.norm_eps, partial);
    chunks.for_each(unit, chunks.cols, [&](int first, float (&y)[4]) {
      float w[4];
      load_floats(unit, weight, first, chunks.cols, p.vectored, w);
      EFFINFER_UNROLL
      for (int e = 0; e < 4; ++e) y[e] = y[e] * scale * w[e];
    });
  }

  // `head` is the warp's own memory.
  template <class Unit>
  EFFINFER_DEVICE static void rotate(Unit& unit, const Params& p, int row, float* head,
                                     Chunks& chunks) {
    if (p.rope_dims == 0) return;
    const float* cos = p.problem.cos_sin + int64_t{row} * p.rope_dims;
    if (p.problem.interleaved) {
      rotate_pairs(unit, p, cos, chunks);
    } else {
      rotate_halves(unit, p, cos, head, chunks);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void rotate_pairs(Unit& unit, const Params& p, const float* cos,
                                           Chunks& chunks) {
    const int half = p.rope_dims / 2;
    chunks.for_each(unit, p.rope_dims, [&](int first, float (&y)[4]) {
      EFFINFER_UNROLL
      for (int e = 0; e < 4; e += 2) {
        if (first + e >= p.rope_dims) continue;
        const float c = unit.load(cos + (first + e) / 2);
        const float s = unit.load(cos + half + (first + e) / 2);
        const float a = y[e];
        y[e] = rotated(a, y[e + 1], c, s, true);
        y[e + 1] = rotated(y[e + 1], a, c, s, false);
      }
    });
  }

  // The other halves of pairs are other lanes': all of the head goes through shared memory.
  template <class Unit>
  EFFINFER_DEVICE static void rotate_halves(Unit& unit, const Params& p, const float* cos,
                                            float* head, Chunks& chunks) {
    const int half = p.rope_dims / 2;
    chunks.for_each(unit, p.rope_dims, [&](int first, const float (&y)[4]) {
      *reinterpret_cast<Quad*>(head + first) = encode<float>(unit, y);
    });
    unit.sync_warp();
    chunks.for_each(unit, p.rope_dims, [&](int first, float (&y)[4]) {
      float other[4];
      float c[4];
      float s[4];
      if (p.whole) {
        const bool is_first = first < half;
        const int angle = is_first ? first : first - half;
        decode<float>(
            unit, *reinterpret_cast<const Quad*>(head + (is_first ? first + half : angle)), other);
        load_floats(unit, cos, angle, half, true, c);
        load_floats(unit, cos + half, angle, half, true, s);
        EFFINFER_UNROLL
        for (int e = 0; e < 4; ++e) y[e] = rotated(y[e], other[e], c[e], s[e], is_first);
        return;
      }
      EFFINFER_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int d = first + e;
        if (d >= p.rope_dims) continue;
        const bool is_first = d < half;
        const int angle = is_first ? d : d - half;
        y[e] = rotated(y[e], head[is_first ? d + half : angle], unit.load(cos + angle),
                       unit.load(cos + half + angle), is_first);
      }
    });
  }

  // max|x| / 127, and its inverse: 0 of a head that is too small for one, NaN and 0 of a head with
  // an infinity or a NaN.
  struct Int8Scale {
    float scale;
    float inverse;
  };
  template <class Unit>
  EFFINFER_DEVICE static Int8Scale int8_scale(Unit& unit, uint32_t highest) {
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
  EFFINFER_DEVICE static uint32_t magnitude(float x) { return bits_of(x) & 0x7fffffffu; }
  // To nearest even; a head without an inverse is zeros.
  EFFINFER_DEVICE static uint32_t int8_of(float x, float inverse) {
    const int q = inverse == 0.0f ? 0 : static_cast<int>(rintf(x * inverse));
    return static_cast<uint32_t>(q) & 0xffu;
  }

  template <class Unit>
  EFFINFER_DEVICE static void append_k(Unit& unit, const Params& p, Place place, Chunks& chunks) {
    if (place.head < 0) return;
    const ops::KvLayer& kv = p.problem.kv;
    auto* page = reinterpret_cast<uint32_t*>(kv.k + place.head * p.head_bytes);
    // The lines of `dwords` dwords of dims, one after the other: a line is 16 tokens'.
    const auto store = [&](int dwords, int g, uint32_t dword) {
      page[(place.token / 16 * dwords + g) * 16 + place.token % 16] = dword;
    };
    const int dim = kv.head_dim;
    Int8Scale scale{0.0f, 0.0f};
    if (kv.dtype == DType::i8) {
      uint32_t highest = 0;
      chunks.for_each(unit, dim, [&](int, const float (&y)[4]) {
        EFFINFER_UNROLL
        for (int e = 0; e < 4; ++e) highest = std::max(highest, magnitude(y[e]));
      });
      scale = int8_scale(unit, highest);
      if (unit.lane == 0) kv.k_scale[place.head * ops::kPageSize + place.token] = scale.scale;
    }
    chunks.for_each(unit, dim, [&](int first, const float (&y)[4]) {
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
  template <class Unit>
  EFFINFER_DEVICE static void append_v(Unit& unit, const Params& p, int row, int head) {
    const ops::KvLayer& kv = p.problem.kv;
    const int dim = kv.head_dim;
    const float* x = p.problem.v + row * p.problem.v_stride + head * dim;
    float v[kDims];
    EFFINFER_UNROLL
    for (int i = 0; i < kDims; ++i) {
      const int d = unit.lane + i * kWarp;
      v[i] = d < dim ? unit.load(x + d) : 0.0f;
    }
    const Place place = place_of(unit, p.problem, row, head);
    if (place.head < 0) return;
    uint8_t* page = kv.v + place.head * p.head_bytes;
    Int8Scale scale{0.0f, 0.0f};
    if (kv.dtype == DType::i8) {
      uint32_t highest = 0;
      EFFINFER_UNROLL
      for (int i = 0; i < kDims; ++i) highest = std::max(highest, magnitude(v[i]));
      scale = int8_scale(unit, highest);
      if (unit.lane == 0) kv.v_scale[place.head * ops::kPageSize + place.token] = scale.scale;
    }
    switch (kv.dtype) {
      case DType::f32:
        return store_v<float>(unit, page, place.token, dim, v, [](float y) { return y; });
      case DType::f16:
        return store_v<uint16_t>(unit, page, place.token, dim, v, [&](float y) {
          return static_cast<uint16_t>(unit.f16x2(y, 0.0f));
        });
      case DType::bf16:
        return store_v<uint16_t>(unit, page, place.token, dim, v, [&](float y) {
          return static_cast<uint16_t>(unit.bf16x2(y, 0.0f));
        });
      default:
        return store_v<uint8_t>(unit, page, place.token, dim, v, [&](float y) {
          return static_cast<uint8_t>(int8_of(y, scale.inverse));
        });
    }
  }

  template <class Element, class Unit, class Convert>
  EFFINFER_DEVICE static void store_v(Unit& unit, uint8_t* page, int token, int dim,
                                      const float (&v)[kDims], Convert&& convert) {
    constexpr int kTokens = 4 / sizeof(Element);  // of a dword
    Element* to = reinterpret_cast<Element*>(page) + ops::v_offset(token, unit.lane, dim, kTokens);
    EFFINFER_UNROLL
    for (int i = 0; i < kDims; ++i) {
      if (unit.lane + i * kWarp < dim) to[i * kWarp * kTokens] = convert(v[i]);
    }
  }
};

}  // namespace effinfer::cuda
