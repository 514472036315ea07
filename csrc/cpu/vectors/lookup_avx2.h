// Ternary matmul by table look-up for AVX2: VPSHUFB looks 32 rows up in a table of 9 sums of two k.
// Sums take 16 bits and a table has bytes: one for the lower and one for the upper halves. 64
// products take two shuffles, two interleavings and two additions, where VPMADDUBSW needs two
// multiplications and two additions: look-ups are behind here too.
//
// Indices are bytes c0 + 3 c1, one a row; a dword line of a panel has two groups. Rows lie in the
// order that the packing instructions give them (kRowOf).
#pragma once

#include "cpu/matmul_units.h"
#include "cpu/vectors/ternary_avx2.h"

namespace effinfer::cpu::avx2 {
namespace {

struct Lookup {
  static constexpr int kGroups = 2 * kPanelDwords;
  static constexpr int kTableBytes = 32;  // lower bytes, upper bytes
  static constexpr int kIndexBytes = 32;
  static constexpr int kTile = 2;  // tokens: with two units 8 sums

  static void make_tables(const int8_t* q, int dwords, uint8_t* tables) {
    for (int group = 0; group < kGroups; ++group) {
      const bool exists = group / 2 < dwords;
      const int a = exists ? q[2 * group] : 0;
      const int b = exists ? q[2 * group + 1] : 0;
      for (int entry = 0; entry < 16; ++entry) {
        const int sum = entry < 9 ? (entry % 3 - 1) * a + (entry / 3 - 1) * b : 0;
        tables[group * kTableBytes + entry] = static_cast<uint8_t>(sum);
        tables[group * kTableBytes + 16 + entry] = static_cast<uint8_t>(sum >> 8);
      }
    }
  }

  template <QuantBits bits>
  static void decode(const uint8_t* lines, int dwords, uint8_t* panel) {
    decode_panel<bits>(lines, dwords, panel);
  }

  static void make_indices(const uint8_t* const* panels, int dwords, uint8_t* out) {
    const __m256i powers = _mm256_set1_epi16(0x0301);
    const __m256i low = _mm256_set1_epi32(0xffff);
    for (int n = 0; n < dwords; ++n) {
      __m256i first[4];   // of group 2 n, a dword a row
      __m256i second[4];  // of group 2 n + 1
      for (int i = 0; i < 4; ++i) {
        const __m256i digits = load(panels[i / 2] + n * 64 + i % 2 * 32);
        const __m256i pairs = _mm256_maddubs_epi16(digits, powers);
        first[i] = _mm256_and_si256(pairs, low);
        second[i] = _mm256_srli_epi32(pairs, 16);
      }
      store(out + 2 * n * kIndexBytes, narrow(first));
      store(out + (2 * n + 1) * kIndexBytes, narrow(second));
    }
    // Groups behind the last dword have tables of zeros.
    std::memset(out + 2 * dwords * kIndexBytes, 0,
                static_cast<size_t>((kGroups - 2 * dwords) * kIndexBytes));
  }

  static void look_up(const uint8_t (*indices)[kGroups * kIndexBytes], const uint8_t* tables,
                      int64_t stride, int tokens, int units,
                      int32_t (*sums)[kLookupUnits][kUnitOutputs]) {
    for (int t = 0; t < tokens; t += kTile) {
      const uint8_t* at = tables + t * stride;
      for (int u = 0; u < units; u += 2) {
        const bool two_tokens = t + 1 < tokens;
        const bool two_units = u + 1 < units;
        const auto run = two_tokens ? (two_units ? look_up_tile<2, 2> : look_up_tile<2, 1>)
                                    : (two_units ? look_up_tile<1, 2> : look_up_tile<1, 1>);
        run(indices + u, at, stride, sums + t, u);
      }
    }
  }

 private:
  [[gnu::always_inline]] static void store(void* to, __m256i value) {
    _mm256_storeu_si256(static_cast<__m256i*>(to), value);
  }

  // Dwords of rows 0..7, 8..15, 16..23 and 24..31 as bytes.
  [[gnu::always_inline]] static __m256i narrow(const __m256i* rows) {
    return _mm256_packus_epi16(_mm256_packus_epi32(rows[0], rows[1]),
                               _mm256_packus_epi32(rows[2], rows[3]));
  }

  template <int tokens, int units>
  static void look_up_tile(const uint8_t (*indices)[kGroups * kIndexBytes], const uint8_t* tables,
                           int64_t stride, int32_t (*sums)[kLookupUnits][kUnitOutputs],
                           int first_unit) {
    __m256i sum[tokens][units][2];
    for (auto& token : sum) {
      for (auto& unit : token) unit[0] = unit[1] = _mm256_setzero_si256();
    }
    for (int64_t group = 0; group < kGroups; ++group) {
      __m256i index[units];
      for (int u = 0; u < units; ++u) index[u] = load(indices[u] + group * kIndexBytes);
      for (int t = 0; t < tokens; ++t) {
        const auto* table =
            reinterpret_cast<const __m128i*>(tables + t * stride + group * kTableBytes);
        const __m256i lower = _mm256_broadcastsi128_si256(_mm_loadu_si128(table));
        const __m256i upper = _mm256_broadcastsi128_si256(_mm_loadu_si128(table + 1));
        for (int u = 0; u < units; ++u) {
          const __m256i low = _mm256_shuffle_epi8(lower, index[u]);
          const __m256i high = _mm256_shuffle_epi8(upper, index[u]);
          sum[t][u][0] = _mm256_add_epi16(sum[t][u][0], _mm256_unpacklo_epi8(low, high));
          sum[t][u][1] = _mm256_add_epi16(sum[t][u][1], _mm256_unpackhi_epi8(low, high));
        }
      }
    }
    // Byte i of the indices is row kRowOf[i]; unpacking takes bytes 0..7 and 16..23, then the rest.
    static constexpr uint8_t kRowOf[32] = {0,  1,  2,  3,  8,  9,  10, 11, 16, 17, 18,
                                           19, 24, 25, 26, 27, 4,  5,  6,  7,  12, 13,
                                           14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
    for (int t = 0; t < tokens; ++t) {
      for (int u = 0; u < units; ++u) {
        alignas(32) int16_t words[2][16];
        store(words[0], sum[t][u][0]);
        store(words[1], sum[t][u][1]);
        for (int i = 0; i < 32; ++i) {
          sums[t][first_unit + u][kRowOf[i]] = words[i / 8 % 2][i / 16 * 8 + i % 8];
        }
      }
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::avx2
