// The digits of packed ternary lines with AVX2. For the *_avx2.cpp files only: all of it has
// internal linkage.
#pragma once

#include "cpu/simd/packed_avx2.h"

namespace effinfer::cpu {
namespace {

// Calls body(field, digits) for the fields of half a line in order.
template <QuantBits bits, class Body>
[[gnu::always_inline]] inline void for_digits(__m256i line, Body&& body) {
  if constexpr (bits == QuantBits::t2) {
    unroll<4>([&](auto f) __attribute__((always_inline)) {
      body(f, _mm256_and_si256(_mm256_srli_epi16(line, 2 * f), _mm256_set1_epi8(3)));
    });
  } else {
    // Three times the even and the odd bytes as 16 bits: the digit is in the upper byte.
    const __m256i low = _mm256_set1_epi16(255);
    __m256i even = _mm256_and_si256(line, low);
    __m256i odd = _mm256_srli_epi16(line, 8);
    unroll<5>([&](auto f) __attribute__((always_inline)) {
      even = _mm256_add_epi16(_mm256_add_epi16(even, even), even);
      odd = _mm256_add_epi16(_mm256_add_epi16(odd, odd), odd);
      body(f, _mm256_or_si256(_mm256_srli_epi16(even, 8), _mm256_andnot_si256(low, odd)));
      even = _mm256_and_si256(even, low);
      odd = _mm256_and_si256(odd, low);
    });
  }
}

// One block of a group as a panel (ternary_lines.h), 64-byte aligned.
template <QuantBits bits>
inline void decode_panel(const uint8_t* lines, int dwords, uint8_t* panel) {
  const int count = static_cast<int>(kernels::ternary_lines(bits, dwords));
  for (int i = 0; i < 2 * count; ++i) {
    for_digits<bits>(
        load(lines + i * 32), [&](int f, __m256i digits) __attribute__((always_inline)) {
          const int line = f * count + i / 2;
          if (line < dwords)
            _mm256_store_si256(reinterpret_cast<__m256i*>(panel + line * 64 + i % 2 * 32), digits);
        });
  }
}

}  // namespace
}  // namespace effinfer::cpu
