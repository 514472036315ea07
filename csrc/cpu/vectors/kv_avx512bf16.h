// Lines of bfloat16 K and V pages as operands of VDPBF16PS: a dword holds two dimensions of a key,
// or one dimension of two values, and multiplies a pair of the query, or of probabilities.
#pragma once

#include <cstdint>

#include "cpu/vectors/kv_avx512.h"

namespace effinfer::cpu::avx512bf16 {
namespace {

struct KvBf16Pairs : avx512::KvRegisters {
  static constexpr int P = 2;
  static constexpr bool kPairs = true;
  using Line = __m512bh;

  // With a count of 1 the second element of each pair is not meant: zeros in its place.
  [[gnu::always_inline]] static Line load(const uint8_t* line, int count) {
    const __m512i x = _mm512_loadu_si512(line);
    return (__m512bh)(count == P ? x : _mm512_and_si512(x, _mm512_set1_epi32(0xffff)));
  }
  [[gnu::always_inline]] static Line broadcast(uint32_t pair) {
    return (__m512bh)_mm512_set1_epi32(static_cast<int>(pair));
  }
  [[gnu::always_inline]] static V add_products(V sums, Line line, Line pair) {
    return {_mm512_dpbf16_ps(sums.v, line, pair)};
  }
  // 16 values as 8 dwords, rounded to nearest even.
  [[gnu::always_inline]] static void store_pairs(V x, uint32_t* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x.v));
  }
};

}  // namespace
}  // namespace effinfer::cpu::avx512bf16
