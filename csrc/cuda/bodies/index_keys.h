// What the index kernels share: the keys of a sequence, and the words of a list.
#pragma once

#include <cstdint>

#include "cuda/bodies/fragments.h"
#include "cuda/unit.h"
#include "ops/prefill_index.h"

namespace effinfer::cuda {

template <class Problem>
EFFINFER_DEVICE bool visits_all(const Problem& p, int64_t sequence, int64_t kv_head) {
  return p.in.heads[kv_head] == ops::IndexedHead::dense || !ops::chooses(p, sequence);
}

// Bits [begin, end) of word `word` of a set of tokens.
EFFINFER_DEVICE uint64_t bits_of_word(int64_t word, int64_t begin, int64_t end) {
  const int64_t first = begin - word * 64;
  const int64_t last = end - word * 64;
  const uint64_t from = first <= 0 ? ~uint64_t{0} : first < 64 ? ~uint64_t{0} << first : 0;
  const uint64_t to = last >= 64 ? ~uint64_t{0} : last > 0 ? (uint64_t{1} << last) - 1 : 0;
  return from & to;
}

// What a block visits whatever is chosen.
EFFINFER_DEVICE uint64_t always_visited(int64_t sink_tokens, int64_t local_tokens,
                                        const ops::VisitBlock& block, int64_t word) {
  const int64_t first = block.position;
  const int64_t local = local_tokens > 0 ? first - local_tokens + 1 : first;
  return bits_of_word(word, 0, sink_tokens) | bits_of_word(word, local, first + block.num_rows);
}
EFFINFER_DEVICE uint64_t always_visited(const ops::PrefillIndexInputs& in,
                                        const ops::VisitBlock& block, int64_t word) {
  return always_visited(in.sink_tokens, in.local_tokens, block, word);
}

// The keys of one KV head of a sequence, in pages of 16-bit or 8-bit numbers. Those of bfloat16 may
// be pages of float32 as well, whose numbers are rounded when they are loaded: kernels of their own
// would be as much code again. Those of float16 have the branch, too: compressed, two kernels that
// are alike take little more than one.
template <DType kType>
struct IndexKeys {
  static constexpr int P = KvBlock<kType>::P;
  static constexpr bool kScaled = KvBlock<kType>::kScaled;
  // Quads of a step of 16 dims: four tokens of the lines that a lane has.
  static constexpr int kLoads = P == 2 ? 2 : 1;

  const uint8_t* keys;
  const float* scales;
  const int32_t* pages;
  int64_t page_bytes;
  int64_t page_scales;
  int dims;
  bool wide;  // pages of float32

  // `head_bytes` are those of a KV head's page.
  EFFINFER_DEVICE static IndexKeys of(const ops::PrefillIndexInputs& in, int64_t head_bytes,
                                      int64_t sequence, int64_t kv_head) {
    IndexKeys k;
    k.keys = in.kv.k + kv_head * head_bytes;
    k.scales = kScaled ? in.kv.k_scale + kv_head * ops::kPageSize : nullptr;
    k.pages = in.batch.kv_indices + in.batch.kv_indptr[sequence];
    k.page_bytes = head_bytes * in.kv.num_kv_heads;
    k.page_scales = int64_t{in.kv.num_kv_heads} * ops::kPageSize;
    k.dims = in.kv.head_dim;
    k.wide = in.kv.dtype == DType::f32;
    return k;
  }

  // Four neighbouring tokens' registers of B of a step.
  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, const uint8_t* page, int token, int step,
                            Quad (&out)[kLoads]) const {
    if constexpr (P == 2) {
      if (wide) return load_wide(unit, page, token, step, out);
    }
    EFFINFER_UNROLL
    for (int l = 0; l < kLoads; ++l) {
      const int line = step * (16 / P) + 4 * l + unit.lane % 4;
      out[l] = unit.load(
          reinterpret_cast<const Quad*>(page + KvBlock<kType>::key_offset(token, line, dims)));
    }
  }
  // Those of token `t` of the four.
  template <class Unit>
  EFFINFER_DEVICE static void operand(Unit& unit, const Quad (&quads)[kLoads], int t,
                                      uint32_t (&b)[2]) {
    if constexpr (kScaled) {
      widen(unit, quads[0].words[t], b);
    } else {
      b[0] = quads[0].words[t];
      b[1] = quads[kLoads - 1].words[t];
    }
  }
  // The dims of register `word` of A (row lane / 4 + 8 (word % 2)), the first of two.
  EFFINFER_DEVICE static int dim_of(int lane, int word) {
    const int half = word / 2;
    return P == 4 ? 4 * (lane % 4) + 2 * half : 2 * (lane % 4) + 8 * half;
  }
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

 private:
  // A line has one dim of 16 tokens.
  template <class Unit>
  EFFINFER_DEVICE void load_wide(Unit& unit, const uint8_t* page, int token, int step,
                                 Quad (&out)[kLoads]) const {
    EFFINFER_UNROLL
    for (int l = 0; l < kLoads; ++l) {
      const int line = step * 16 + 8 * l + 2 * (unit.lane % 4);
      const auto* from =
          reinterpret_cast<const Quad*>(page + KvBlock<DType::f32>::key_offset(token, line, dims));
      const Quad low = unit.load(from);
      const Quad high = unit.load(from + 4);
      EFFINFER_UNROLL
      for (int t = 0; t < 4; ++t) {
        out[l].words[t] = rounded(unit, float_of(low.words[t]), float_of(high.words[t]));
      }
    }
  }
};

}  // namespace effinfer::cuda
