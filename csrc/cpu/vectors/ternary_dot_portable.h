// The portable ternary matmul.
#pragma once

#include "cpu/matmul_units.h"
#include "cpu/ternary_lines.h"

namespace effinfer::cpu::portable {
namespace {

struct TernaryDot {
  static constexpr int kTokens = 4;
  static constexpr bool kWholeTiles = false;
  template <ops::QuantBits>
  static constexpr int line_tokens() {
    return 1;
  }
  static constexpr int kLineTile = 1;
  static constexpr int kRows = static_cast<int>(ops::kGroupRows);

  template <ops::QuantBits bits>
  static void dot(const uint8_t* lines, int64_t first, int64_t last, const TernaryBlocks& blocks,
                  const int8_t* q, int64_t, int, const FetchAhead&, int32_t* sums) {
    std::memset(sums, 0, kRows * sizeof(int32_t));
    for (int64_t b = first; b < last; ++b) {
      uint8_t panel[kPanelBytes];
      const int dwords = blocks.dwords_of(b);
      decode<bits>(lines + b * ternary_block_bytes(bits), dwords, panel);
      add_panel(panel, dwords, q + b * ops::kTernaryBlock, sums);
    }
  }

  template <ops::QuantBits bits>
  static void decode(const uint8_t* lines, int dwords, uint8_t* panel) {
    unpack_panel<bits>(lines, dwords, panel);
  }

  static void multiply(const uint8_t* const* panels, int dwords, const int8_t* q, int64_t stride,
                       int tokens, int32_t (*sums)[32]) {
    for (int t = 0; t < tokens; ++t) {
      for (int g = 0; g < 2; ++g) {
        add_panel(panels[g], dwords, q + t * stride, sums[t] + g * kRows);
      }
    }
  }

 private:
  static void add_panel(const uint8_t* panel, int dwords, const int8_t* q, int32_t* sums) {
    for (int n = 0; n < dwords; ++n) {
      const int8_t* a = q + 4 * n;
      for (int r = 0; r < kRows; ++r) {
        const uint8_t* c = panel + n * 64 + r * 4;
        sums[r] += c[0] * a[0] + c[1] * a[1] + c[2] * a[2] + c[3] * a[3];
      }
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::portable
