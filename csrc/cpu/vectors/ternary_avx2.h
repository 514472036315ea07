// The digits of packed ternary lines with AVX2.
#pragma once

#include "cpu/ternary_lines.h"
#include "cpu/vectors/packed_avx2.h"

namespace effinfer::cpu::avx2 {
namespace {

// The fields of half a line, one after the other.
template <QuantBits bits>
class Digits {
 public:
  [[gnu::always_inline]] explicit Digits(__m256i line) : line_(line) {}

  [[gnu::always_inline]] __m256i field(int f) const {
    return _mm256_and_si256(_mm256_srli_epi16(line_, 2 * f), _mm256_set1_epi8(3));
  }

 private:
  __m256i line_;
};

// Three times the even and the odd bytes as 16 bits: the digit is in the upper byte.
template <>
class Digits<QuantBits::t1_6> {
 public:
  [[gnu::always_inline]] explicit Digits(__m256i line)
      : even_(_mm256_and_si256(line, low())), odd_(_mm256_srli_epi16(line, 8)) {}

  // It must be called once for each f, in order.
  [[gnu::always_inline]] __m256i field(int) {
    even_ = _mm256_add_epi16(_mm256_add_epi16(even_, even_), even_);
    odd_ = _mm256_add_epi16(_mm256_add_epi16(odd_, odd_), odd_);
    const __m256i digits =
        _mm256_or_si256(_mm256_srli_epi16(even_, 8), _mm256_andnot_si256(low(), odd_));
    even_ = _mm256_and_si256(even_, low());
    odd_ = _mm256_and_si256(odd_, low());
    return digits;
  }

 private:
  static __m256i low() { return _mm256_set1_epi16(255); }

  __m256i even_;
  __m256i odd_;
};

template <QuantBits bits>
inline constexpr int kFields = bits == QuantBits::t2 ? 4 : 5;

// One block of a group as a panel (ternary_lines.h), 64-byte aligned.
template <QuantBits bits>
inline void decode_panel(const uint8_t* lines, int dwords, uint8_t* panel) {
  const int count = static_cast<int>(ops::ternary_lines(bits, dwords));
  for (int i = 0; i < 2 * count; ++i) {
    Digits<bits> digits(load(lines + i * 32));
    unroll<kFields<bits>>([&](int f) __attribute__((always_inline)) {
      const __m256i field = digits.field(f);
      const int line = f * count + i / 2;
      if (line < dwords) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(panel + line * 64 + i % 2 * 32), field);
      }
    });
  }
}

}  // namespace
}  // namespace effinfer::cpu::avx2
