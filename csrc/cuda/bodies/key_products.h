// Products of queries with a token's key as pages have it: by one thread, so that the threads of a
// warp read lines of a page, 16 tokens x P dims each.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/float16.h"
#include "cuda/bodies/head_pages.h"
#include "cuda/unit.h"
#include "ops/kv_layout.h"

namespace effinfer::cuda {

template <DType kType>
struct KeyLine {
  static constexpr int P = kType == DType::f32 ? 1 : kType == DType::i8 ? 4 : 2;  // dims

  // P numbers of a dword of a page.
  template <class Unit>
  EFFINFER_DEVICE static void widen(Unit& unit, uint32_t dword, float (&out)[P]) {
    if constexpr (kType == DType::f32) {
      out[0] = float_of(dword);
    } else if constexpr (kType == DType::i8) {
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) out[i] = static_cast<int8_t>(dword >> 8 * i & 0xff);
    } else {
      EFFINFER_UNROLL
      for (int i = 0; i < 2; ++i) {
        const auto bits = static_cast<uint16_t>(dword >> 16 * i);
        out[i] = kType == DType::f16 ? unit.from_f16(bits) : bf16_to_f32(bits);
      }
    }
  }

  // The token's dword of line 0; those of the others follow each 16 dwords.
  EFFINFER_DEVICE static const uint32_t* first(const uint8_t* head_page, int dims, int token) {
    return reinterpret_cast<const uint32_t*>(head_page) + token / 16 * (dims / P) * 16 + token % 16;
  }

  // Adds the products of one line with kHeads queries, [dims][kHeads].
  template <int kHeads, class Unit>
  EFFINFER_DEVICE static void add(Unit& unit, const uint32_t* from, int line,
                                  const float (*queries)[kHeads], float (&x)[kHeads]) {
    float k[P];
    widen(unit, unit.load(from + line * 16), k);
    EFFINFER_UNROLL
    for (int e = 0; e < P; ++e) {
      EFFINFER_UNROLL
      for (int four = 0; four < kHeads / 4; ++four) {
        const Quad q = reinterpret_cast<const Quad*>(queries[line * P + e])[four];
        EFFINFER_UNROLL
        for (int i = 0; i < 4; ++i) {
          x[4 * four + i] = fmaf(float_of(q.words[i]), k[e], x[4 * four + i]);
        }
      }
    }
  }
};

// The same of a type that is known at run time, for kernels that memory bounds: for each type a
// kernel of its own would be as much code again.
struct AnyKeyLine {
  static constexpr int kMost = 4;  // dims of a line

  DType dtype;
  int dims;     // of a head
  int of_line;  // of these

  EFFINFER_DEVICE explicit AnyKeyLine(const ops::KvLayer& kv)
      : dtype(kv.dtype), dims(kv.head_dim), of_line(4 / element_bytes(kv.dtype)) {}

  EFFINFER_DEVICE int lines() const { return dims / of_line; }

  template <class Unit>
  EFFINFER_DEVICE void widen(Unit& unit, uint32_t dword, float (&out)[kMost]) const {
    EFFINFER_UNROLL
    for (int i = 0; i < kMost; ++i) {
      const auto half = static_cast<uint16_t>(dword >> 16 * (i % 2));
      out[i] = dtype == DType::bf16  ? bf16_to_f32(half)
               : dtype == DType::f16 ? unit.from_f16(half)
               : dtype == DType::i8  ? static_cast<float>(static_cast<int8_t>(dword >> 8 * i))
                                     : float_of(dword);
    }
  }
  // The token's dword of line 0, and those of the others.
  EFFINFER_DEVICE const uint32_t* first(const uint8_t* head_page, int token) const {
    return reinterpret_cast<const uint32_t*>(head_page) + token / 16 * lines() * 16 + token % 16;
  }
  // What numbers of a token's key are multiplied by.
  template <class Unit>
  EFFINFER_DEVICE float scale(Unit& unit, const ops::KvLayer& kv, int64_t head_page,
                              int token) const {
    if (dtype != DType::i8) return 1.0f;
    return unit.load(kv.k_scale + head_page * ops::kPageSize + token);
  }
  // use(dim, number) of a line.
  template <class Unit, class Use>
  EFFINFER_DEVICE void visit(Unit& unit, const uint32_t* from, int line, Use&& use) const {
    float k[kMost];
    widen(unit, unit.load(from + line * 16), k);
    EFFINFER_UNROLL
    for (int e = 0; e < kMost; ++e) {
      if (e < of_line) use(line * of_line + e, k[e]);
    }
  }
  // Adds the products of one line with four queries.
  template <class Unit>
  EFFINFER_DEVICE void add(Unit& unit, const uint32_t* from, int line, const float (*queries)[4],
                           float (&x)[4]) const {
    visit(unit, from, line, [&](int dim, float key) {
      const Quad q = *reinterpret_cast<const Quad*>(queries[dim]);
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) x[i] = fmaf(float_of(q.words[i]), key, x[i]);
    });
  }
};

}  // namespace effinfer::cuda
