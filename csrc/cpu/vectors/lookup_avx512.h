// Ternary matmul by table look-up for AVX-512: VPERMW looks 32 rows up in a table of 27 sums of
// three k, which is a register. 96 products for a shuffle and an addition are more than the 64 of
// a VPDPBUSD, but tables and indices have to come from memory, 64 bytes each for 96 products: the
// integer kernel, whose operands are 4 bytes a token, stays ahead.
//
// Indices are 16-bit, rows 0..15 of a unit in the even words and rows 16..31 in the odd ones. Of
// three dword lines of a panel,
//
//   group 0, 1, 2   bytes 0, 1, 2 of one line: c0 + 3 c1 + 9 c2 by VPDPBUSD
//   group 3         byte 3 of the three lines
#pragma once

#include <array>

#include "cpu/matmul_units.h"
#include "cpu/vectors/ternary_avx512.h"

namespace effinfer::cpu::avx512 {
namespace {

struct Lookup {
  static constexpr int kGroups = (kPanelDwords + 2) / 3 * 4;
  static constexpr int kTableBytes = 64;
  static constexpr int kIndexBytes = 64;
  static constexpr int kTile = 5;  // tokens: 20 sums, 4 indices and a table

  static void make_tables(const int8_t* q, int dwords, uint8_t* tables) {
    // The weights of entry c0 + 3 c1 + 9 c2.
    alignas(64) static constexpr auto kWeights = [] {
      std::array<std::array<int16_t, 32>, 3> weights{};
      for (int entry = 0; entry < 27; ++entry) {
        const auto at = static_cast<size_t>(entry);
        weights[0][at] = static_cast<int16_t>(entry % 3 - 1);
        weights[1][at] = static_cast<int16_t>(entry / 3 % 3 - 1);
        weights[2][at] = static_cast<int16_t>(entry / 9 - 1);
      }
      return weights;
    }();
    __m512i weights[3];
    for (size_t j = 0; j < 3; ++j) weights[j] = _mm512_load_si512(kWeights[j].data());
    const auto put = [&](int group, int a, int b, int c) __attribute__((always_inline)) {
      const auto product = [&](size_t j, int value) __attribute__((always_inline)) {
        return _mm512_mullo_epi16(weights[j], _mm512_set1_epi16(static_cast<int16_t>(value)));
      };
      const __m512i sums =
          _mm512_add_epi16(_mm512_add_epi16(product(0, a), product(1, b)), product(2, c));
      _mm512_storeu_si512(tables + group * kTableBytes, sums);
    };
    for (int n = 0; n < kPanelDwords; n += 3) {
      int8_t a[3][4] = {};
      for (int line = 0; line < 3 && n + line < dwords; ++line) {
        std::memcpy(a[line], q + 4 * (n + line), 4);
      }
      const int group = n / 3 * 4;
      for (int line = 0; line < 3; ++line) {
        put(group + line, a[line][0], a[line][1], a[line][2]);
      }
      put(group + 3, a[0][3], a[1][3], a[2][3]);
    }
  }

  template <QuantBits bits>
  static void decode(const uint8_t* lines, int dwords, uint8_t* panel) {
    decode_panel<bits>(lines, dwords, panel);
  }

  static void make_indices(const uint8_t* const* panels, int dwords, uint8_t* out) {
    const __m512i own = _mm512_set1_epi32(0x00090301);
    const __m512i zero = _mm512_setzero_si512();
    for (int n = 0; n < dwords; n += 3) {
      __m512i index[2][4];
      for (int g = 0; g < 2; ++g) {
        index[g][3] = zero;
        for (int line = 0; line < 3; ++line) {
          const __m512i digits =
              n + line < dwords ? _mm512_load_si512(panels[g] + (n + line) * 64) : zero;
          const int last = line == 0 ? 1 << 24 : line == 1 ? 3 << 24 : 9 << 24;
          index[g][line] = _mm512_dpbusd_epi32(zero, digits, own);
          index[g][3] = _mm512_dpbusd_epi32(index[g][3], digits, _mm512_set1_epi32(last));
        }
      }
      for (int i = 0; i < 4; ++i) {
        _mm512_store_si512(out + (n / 3 * 4 + i) * kIndexBytes,
                           _mm512_or_si512(index[0][i], _mm512_slli_epi32(index[1][i], 16)));
      }
    }
    // Groups behind the last dword have tables of zeros.
    for (int group = (dwords + 2) / 3 * 4; group < kGroups; ++group) {
      _mm512_store_si512(out + group * kIndexBytes, zero);
    }
  }

  static void look_up(const uint8_t (*indices)[kGroups * kIndexBytes], const uint8_t* tables,
                      int64_t stride, int tokens, int units,
                      int32_t (*sums)[kLookupUnits][kUnitOutputs]) {
    for (int t = 0; t < tokens; t += kTile) {
      const uint8_t* at = tables + t * stride;
      unroll<kTile>([&](auto index) __attribute__((always_inline)) {
        constexpr int kCount = index + 1;
        if (tokens - t != kCount && (kCount != kTile || tokens - t < kTile)) return;
        if (units == kLookupUnits) {
          look_up_tile<kCount, kLookupUnits>(indices, at, stride, sums + t);
        } else {
          for (int u = 0; u < units; ++u) {
            look_up_tile<kCount, 1>(indices + u, at, stride, sums + t, u);
          }
        }
      });
    }
  }

 private:
  template <int tokens, int units>
  static void look_up_tile(const uint8_t (*indices)[kGroups * kIndexBytes], const uint8_t* tables,
                           int64_t stride, int32_t (*sums)[kLookupUnits][kUnitOutputs],
                           int first_unit = 0) {
    __m512i sum[tokens][units];
    for (auto& row : sum) {
      for (__m512i& part : row) part = _mm512_setzero_si512();
    }
    for (int64_t group = 0; group < kGroups; ++group) {
      __m512i index[units];
      for (int u = 0; u < units; ++u) index[u] = load(indices[u] + group * kIndexBytes);
      for (int t = 0; t < tokens; ++t) {
        const __m512i table = load(tables + t * stride + group * kTableBytes);
        for (int u = 0; u < units; ++u) {
          sum[t][u] = _mm512_add_epi16(sum[t][u], _mm512_permutexvar_epi16(index[u], table));
        }
      }
    }
    for (int t = 0; t < tokens; ++t) {
      for (int u = 0; u < units; ++u) {
        int32_t* out = sums[t][first_unit + u];
        _mm512_storeu_si512(out, _mm512_srai_epi32(_mm512_slli_epi32(sum[t][u], 16), 16));
        _mm512_storeu_si512(out + 16, _mm512_srai_epi32(sum[t][u], 16));
      }
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::avx512
