// Ternary matmul of AVX-512 VNNI, for its own level and for that of AMX.
//
// One VPDPBUSD multiplies a line of 16 rows x 4 k by a broadcast dword of activations. Fields of
// packed lines are multiplied where they lie (t2: as 4^f c; t1_6: by linearity), so one token costs
// 2 operations for 64 weights of t2 and 4 of t1_6; for several tokens digits are put into
// registers.
#pragma once

#include "core/tuned.h"
#include "cpu/matmul_units.h"
#include "cpu/vectors/ternary_avx512.h"

namespace effinfer::cpu::avx512 {
namespace {

// Sums of one group and one token, in a register a field.
template <QuantBits bits>
struct Partial {
  __m512i fields[4] = {};

  template <class Count>
  [[gnu::always_inline]] void add(const uint8_t* lines, const int8_t* a, Count count,
                                  const FetchAhead& ahead) {
    for (int i = 0; i < count; ++i) {
      const __m512i line = load(lines + i * 64);
      ahead.ask_for_line(lines + i * 64);
      unroll<4>([&](auto f) __attribute__((always_inline)) {
        const __m512i digits =
            _mm512_and_si512(line, _mm512_set1_epi8(static_cast<char>(3 << 2 * f)));
        fields[f] =
            _mm512_dpbusd_epi32(fields[f], digits, broadcast_dword(a + 4 * (f * count + i)));
      });
    }
  }
  [[gnu::always_inline]] __m512i sum() const {
    // fields[f] is 4^f times a sum.
    return _mm512_add_epi32(
        _mm512_add_epi32(fields[0], _mm512_srai_epi32(fields[1], 2)),
        _mm512_add_epi32(_mm512_srai_epi32(fields[2], 4), _mm512_srai_epi32(fields[3], 6)));
  }
};

// 3 sum(b_f a) - sum(b_f+1 a) is 256 times the sum of digits, modulo 2^32 too.
template <>
struct Partial<QuantBits::t1_6> {
  __m512i now[5] = {};
  __m512i next[5] = {};

  template <class Count>
  [[gnu::always_inline]] void add(const uint8_t* lines, const int8_t* a, Count count,
                                  const FetchAhead& ahead) {
    for (int i = 0; i < count; ++i) {
      __m512i b = load(lines + i * 64);
      ahead.ask_for_line(lines + i * 64);
      unroll<5>([&](auto f) __attribute__((always_inline)) {
        const __m512i value = broadcast_dword(a + 4 * (f * count + i));
        now[f] = _mm512_dpbusd_epi32(now[f], b, value);
        b = _mm512_add_epi8(_mm512_add_epi8(b, b), b);
        next[f] = _mm512_dpbusd_epi32(next[f], b, value);
      });
    }
  }
  [[gnu::always_inline]] __m512i sum() const {
    __m512i p = now[0];
    __m512i q = next[0];
    for (int f = 1; f < 5; ++f) {
      p = _mm512_add_epi32(p, now[f]);
      q = _mm512_add_epi32(q, next[f]);
    }
    p = _mm512_add_epi32(_mm512_add_epi32(p, p), p);
    return _mm512_srai_epi32(_mm512_sub_epi32(p, q), 8);
  }
};

struct TernaryDot {
  const int t2_lines = line_rows(PackedTernary::t2, kTernaryTokens);
  const int t1_6_lines = line_rows(PackedTernary::t1_6, 16);

  using Vector = F32x16;
  static constexpr int kTokens = 12;  // 24 sums leave 8 registers
  static constexpr bool kWholeTiles = false;
  template <QuantBits bits>
  int line_tokens() const {
    return bits == QuantBits::t2 ? t2_lines : t1_6_lines;
  }
  static constexpr int kLineTile = 8;

  template <QuantBits bits>
  void dot(const uint8_t* lines, int64_t first, int64_t last, const TernaryBlocks& blocks,
           const int8_t* q, int64_t stride, int tokens, const FetchAhead& ahead,
           int32_t* sums) const {
    if (tokens == 1 || (bits == QuantBits::t1_6 && tokens <= 3)) {
      for (int t = 0; t < tokens; ++t) {
        dot_one<bits>(lines, first, last, blocks, q + t * stride, t == 0 ? ahead : FetchAhead(),
                      sums + t * kUnitOutputs);
      }
      return;
    }
    unroll<kLineTile - 1>([&](auto index) __attribute__((always_inline)) {
      if (tokens != index + 2) return;
      dot_tile<bits, index + 2>(lines, first, last, blocks, q, stride, ahead, sums);
    });
  }

  template <QuantBits bits>
  static void decode(const uint8_t* lines, int dwords, uint8_t* panel) {
    decode_panel<bits>(lines, dwords, panel);
  }

  static void multiply(const uint8_t* const* panels, int dwords, const int8_t* q, int64_t stride,
                       int tokens, int32_t (*sums)[32]) {
    unroll<kTokens>([&](auto index) __attribute__((always_inline)) {
      if (tokens == index + 1) multiply_tile<index + 1>(panels, dwords, q, stride, sums);
    });
  }

 private:
  template <QuantBits bits>
  static constexpr int lines_of(int dwords) {
    return static_cast<int>(ops::ternary_lines(bits, dwords));
  }

  template <QuantBits bits>
  static void dot_one(const uint8_t* lines, int64_t first, int64_t last,
                      const TernaryBlocks& blocks, const int8_t* q, const FetchAhead& ahead,
                      int32_t* sums) {
    // 256 times a sum of digits must fit in int32: 254 * 256 * 128 * 256 < 2^31.
    constexpr int64_t kExact = bits == QuantBits::t2 ? kMaxTernaryCols : 128;
    __m512i total = _mm512_setzero_si512();
    for (int64_t begin = first; begin < last; begin += kExact) {
      const int64_t end = begin + kExact < last ? begin + kExact : last;
      Partial<bits> partial;
      for (int64_t b = begin; b < end; ++b) {
        const uint8_t* data = lines + b * ternary_block_bytes(bits);
        const int8_t* a = q + b * ops::kTernaryBlock;
        const int dwords = blocks.dwords_of(b);
        if (dwords == kPanelDwords) {
          partial.add(data, a, std::integral_constant<int, lines_of<bits>(kPanelDwords)>(), ahead);
        } else {
          partial.add(data, a, lines_of<bits>(dwords), ahead);
        }
      }
      total = _mm512_add_epi32(total, partial.sum());
    }
    _mm512_storeu_si512(sums, total);
  }

  // The digits of a line, in a register, times all tokens.
  template <QuantBits bits, int tokens>
  static void dot_tile(const uint8_t* lines, int64_t first, int64_t last,
                       const TernaryBlocks& blocks, const int8_t* q, int64_t stride,
                       const FetchAhead& ahead, int32_t* sums) {
    // Enough independent sums to cover the latency of VPDPBUSD.
    constexpr int kChains = tokens <= 2 ? 4 : tokens <= 4 ? 2 : 1;
    __m512i sum[tokens][kChains];
    for (auto& chains : sum) {
      for (__m512i& chain : chains) chain = _mm512_setzero_si512();
    }
    const auto add = [&](const uint8_t* data, const int8_t* a,
                         auto count) __attribute__((always_inline)) {
      constexpr int kBases = (tokens + 2) / 3;  // a pointer for three rows
      const int8_t* base[kBases];
      for (int i = 0; i < kBases; ++i) base[i] = a + 3 * i * stride;
      for (int i = 0; i < count; ++i) {
        ahead.ask_for_line(data + i * 64);
        for_digits<bits>(
            load(data + i * 64), [&](auto f, __m512i digits) __attribute__((always_inline)) {
              for (int t = 0; t < tokens; ++t) {
                const int8_t* row = base[t / 3] + t % 3 * stride;
                __m512i& chain = sum[t][f % kChains];
                chain = _mm512_dpbusd_epi32(chain, digits, broadcast_dword(row + 4 * f * count));
              }
            });
        for (int j = 0; j < kBases; ++j) base[j] += 4;
      }
    };
    for (int64_t b = first; b < last; ++b) {
      const uint8_t* data = lines + b * ternary_block_bytes(bits);
      const int8_t* a = q + b * ops::kTernaryBlock;
      const int dwords = blocks.dwords_of(b);
      if (dwords == kPanelDwords) {
        add(data, a, std::integral_constant<int, lines_of<bits>(kPanelDwords)>());
      } else {
        add(data, a, lines_of<bits>(dwords));
      }
    }
    for (int t = 0; t < tokens; ++t) {
      for (int c = 1; c < kChains; ++c) sum[t][0] = _mm512_add_epi32(sum[t][0], sum[t][c]);
      _mm512_storeu_si512(sums + t * kUnitOutputs, sum[t][0]);
    }
  }

  template <int tokens>
  static void multiply_tile(const uint8_t* const* panels, int dwords, const int8_t* q,
                            int64_t stride, int32_t (*sums)[32]) {
    __m512i sum[tokens][2];
    for (int t = 0; t < tokens; ++t) {
      for (int g = 0; g < 2; ++g) sum[t][g] = _mm512_loadu_si512(sums[t] + 16 * g);
    }
    // A pointer for three rows: twelve would not fit the general registers.
    constexpr int kBases = (tokens + 2) / 3;
    const int8_t* base[kBases];
    for (int i = 0; i < kBases; ++i) base[i] = q + 3 * i * stride;
    const uint8_t* panel0 = panels[0];
    const uint8_t* panel1 = panels[1];
    for (const uint8_t* end = panel0 + dwords * 64; panel0 < end;) {
      const __m512i w0 = load(panel0);
      const __m512i w1 = load(panel1);
      panel0 += 64;
      panel1 += 64;
      for (int t = 0; t < tokens; ++t) {
        const __m512i value = broadcast_dword(base[t / 3] + t % 3 * stride);
        sum[t][0] = _mm512_dpbusd_epi32(sum[t][0], w0, value);
        sum[t][1] = _mm512_dpbusd_epi32(sum[t][1], w1, value);
      }
      for (int i = 0; i < kBases; ++i) base[i] += 4;
    }
    for (int t = 0; t < tokens; ++t) {
      for (int g = 0; g < 2; ++g) _mm512_storeu_si512(sums[t] + 16 * g, sum[t][g]);
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::avx512
