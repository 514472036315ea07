// The digits of packed ternary lines with AVX-512.
#pragma once

#include "cpu/ternary_lines.h"
#include "cpu/vectors/packed_avx512.h"

namespace effinfer::cpu::avx512 {
namespace {

// Calls body(field, digits) for the fields of a line in order.
template <QuantBits bits, class Body>
[[gnu::always_inline]] inline void for_digits(__m512i line, Body&& body) {
  if constexpr (bits == QuantBits::t2) {
    unroll<4>([&](auto f) __attribute__((always_inline)) {
      body(f, _mm512_and_si512(_mm512_srli_epi16(line, 2 * f), _mm512_set1_epi8(3)));
    });
  } else {
    // Three times the even and the odd bytes as 16 bits: the digit is in the upper byte.
    const __m512i low = _mm512_set1_epi16(255);
    __m512i even = _mm512_and_si512(line, low);
    __m512i odd = _mm512_srli_epi16(line, 8);
    unroll<5>([&](auto f) __attribute__((always_inline)) {
      even = _mm512_add_epi16(_mm512_add_epi16(even, even), even);
      odd = _mm512_add_epi16(_mm512_add_epi16(odd, odd), odd);
      constexpr int kOrAndNot = 0xf4;  // a | (b & ~c)
      body(f, _mm512_ternarylogic_epi32(_mm512_srli_epi16(even, 8), odd, low, kOrAndNot));
      even = _mm512_and_si512(even, low);
      odd = _mm512_and_si512(odd, low);
    });
  }
}

// One block of a group as a panel (ternary_lines.h), 64-byte aligned.
template <QuantBits bits>
inline void decode_panel(const uint8_t* lines, int dwords, uint8_t* panel) {
  const int count = static_cast<int>(ops::ternary_lines(bits, dwords));
  for (int i = 0; i < count; ++i) {
    for_digits<bits>(load(lines + i * 64),
                     [&](int f, __m512i digits) __attribute__((always_inline)) {
                       if (f * count + i < dwords)
                         _mm512_store_si512(panel + (f * count + i) * 64, digits);
                     });
  }
}

}  // namespace
}  // namespace effinfer::cpu::avx512
