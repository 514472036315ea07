// Comparing and picking lanes, for AVX2 files.
#pragma once

#include <cstdint>

#include "cpu/vectors/math_avx2.h"

namespace effinfer::cpu::avx2 {
namespace {

[[gnu::always_inline]] inline uint32_t move_mask(__m256 low, __m256 high) {
  return static_cast<uint32_t>(_mm256_movemask_ps(low)) |
         static_cast<uint32_t>(_mm256_movemask_ps(high)) << 8;
}

// Bit i tells of lane i.
[[gnu::always_inline]] inline uint32_t bits_above(F32x16 a, F32x16 b) {
  return move_mask(_mm256_cmp_ps(a.low.v, b.low.v, _CMP_GT_OQ),
                   _mm256_cmp_ps(a.high.v, b.high.v, _CMP_GT_OQ));
}
[[gnu::always_inline]] inline uint32_t bits_from(F32x16 a, F32x16 b) {
  return move_mask(_mm256_cmp_ps(a.low.v, b.low.v, _CMP_GE_OQ),
                   _mm256_cmp_ps(a.high.v, b.high.v, _CMP_GE_OQ));
}
[[gnu::always_inline]] inline uint32_t bits_nan(F32x16 a) {
  return move_mask(_mm256_cmp_ps(a.low.v, a.low.v, _CMP_UNORD_Q),
                   _mm256_cmp_ps(a.high.v, a.high.v, _CMP_UNORD_Q));
}
// `value` in the lanes where a > b, else 0.
[[gnu::always_inline]] inline F32x16 where_above(F32x16 a, F32x16 b, F32x16 value) {
  return {{_mm256_and_ps(_mm256_cmp_ps(a.low.v, b.low.v, _CMP_GT_OQ), value.low.v)},
          {_mm256_and_ps(_mm256_cmp_ps(a.high.v, b.high.v, _CMP_GT_OQ), value.high.v)}};
}

// The places of the set bits of each byte, lowest first, a byte each. (PDEP and PEXT would compute
// them, but take hundreds of cycles on the first two generations of Zen.)
struct LaneOrders {
  uint64_t places[256];
};
constexpr LaneOrders make_lane_orders() {
  LaneOrders orders{};
  for (uint64_t bits = 0; bits < 256; ++bits) {
    int count = 0;
    for (uint64_t lane = 0; lane < 8; ++lane) {
      if ((bits >> lane & 1) != 0) orders.places[bits] |= lane << 8 * count++;
    }
  }
  return orders;
}
constexpr LaneOrders kLaneOrders = make_lane_orders();

[[gnu::always_inline]] inline void compress_8(__m256i x, uint32_t bits, void* to) {
  const auto places = static_cast<int64_t>(kLaneOrders.places[bits]);
  const __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(places));
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(x, order));
}
// Stores the lanes whose bits are set side by side; may write 16 lanes.
[[gnu::always_inline]] inline void compress(F32x16 x, uint32_t bits, float* to) {
  compress_8(_mm256_castps_si256(x.low.v), bits & 255, to);
  compress_8(_mm256_castps_si256(x.high.v), bits >> 8, to + __builtin_popcount(bits & 255));
}
// Stores the lanes whose bits are set side by side, and their ids; may write 16 of each.
[[gnu::always_inline]] inline void compress(F32x16 x, const int32_t* ids, uint32_t bits, float* to,
                                            int32_t* to_ids) {
  compress(x, bits, to);
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ids));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ids + 8));
  compress_8(low, bits & 255, to_ids);
  compress_8(high, bits >> 8, to_ids + __builtin_popcount(bits & 255));
}
// Stores the lanes whose bits are set side by side, and ids, first + i of lane i; may write 16.
[[gnu::always_inline]] inline void compress(F32x16 x, int32_t first, uint32_t bits, float* to,
                                            int32_t* to_ids) {
  compress(x, bits, to);
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  compress_8(_mm256_add_epi32(lanes, _mm256_set1_epi32(first)), bits & 255, to_ids);
  compress_8(_mm256_add_epi32(lanes, _mm256_set1_epi32(first + 8)), bits >> 8,
             to_ids + __builtin_popcount(bits & 255));
}

// Sums of each lane in double precision.
struct LaneSums {
  __m256d parts[4];

  [[gnu::always_inline]] void add(F32x16 x) {
    parts[0] = _mm256_add_pd(parts[0], _mm256_cvtps_pd(_mm256_castps256_ps128(x.low.v)));
    parts[1] = _mm256_add_pd(parts[1], _mm256_cvtps_pd(_mm256_extractf128_ps(x.low.v, 1)));
    parts[2] = _mm256_add_pd(parts[2], _mm256_cvtps_pd(_mm256_castps256_ps128(x.high.v)));
    parts[3] = _mm256_add_pd(parts[3], _mm256_cvtps_pd(_mm256_extractf128_ps(x.high.v, 1)));
  }
  [[gnu::always_inline]] void store(double* to) const {
    for (int i = 0; i < 4; ++i) _mm256_storeu_pd(to + 4 * i, parts[i]);
  }
};
[[gnu::always_inline]] inline LaneSums no_sums(F32x16) {
  const __m256d zero = _mm256_setzero_pd();
  return {{zero, zero, zero, zero}};
}

}  // namespace
}  // namespace effinfer::cpu::avx2
