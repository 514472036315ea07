// Products of half a block of 256 k by the tensor cores, for ternary.h.
//
// A product takes a field of two lines, of 4 u + t and the next u: registers 0, 1 of its A operand
// are two rows of the first one, registers 2, 3 of the second one. Fields that their mask leaves
// where they are need no shift; what they are multiplied by so has sums of its own.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/bodies/ternary_digits.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// A lane's lines of a half, the second one `stride` bytes behind the first one, and its dwords of
// tokens.
struct TernaryHalf {
  const uint8_t* lines;
  int stride;
  const uint8_t* tokens;
};

template <ops::QuantBits kBits, int kTiles>
class TernaryProducts {
  using Digits = TernaryDigits<kBits>;

 public:
  static constexpr int kWholeLines = static_cast<int>(ops::ternary_lines(kBits, 64));

  // Of tokens that are none another one's are multiplied, and nobody takes their sums.
  template <class Unit>
  EFFINFER_DEVICE TernaryProducts(const Unit& unit, int num_tokens, int token_bytes) {
    EFFINFER_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      const int token = tile * 8 + unit.lane / 4;
      token_at_[tile] = unit.kept((token < num_tokens ? token : 0) * token_bytes);
    }
  }

  // Half 0 or 1 of a block, of `num_lines` where it is not whole. A whole block's addresses are the
  // compiler's.
  template <class Unit>
  EFFINFER_DEVICE void add(Unit& unit, const TernaryHalf& from, int half, bool is_whole,
                           int num_lines) {
    if (is_whole) {
      add_half<true>(unit, from, half, kWholeLines);
    } else {
      add_half<false>(unit, from, half, num_lines);
    }
  }

  // Moves the sums [token][row] to shared memory.
  template <class Unit>
  EFFINFER_DEVICE void store(const Unit& unit, int num_tokens, int32_t (*out)[kWarp]) {
    const int g = unit.lane / 4;
    const int t = unit.lane % 4;
    EFFINFER_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      EFFINFER_UNROLL
      for (int i = 0; i < 8; ++i) {
        int32_t sum = 0;
        EFFINFER_UNROLL
        for (int set = 0; set < Digits::kSets; ++set) {
          int32_t& part = sums_[tile][set][i / 4][i % 4];
          sum += part >> 2 * set;  // exactly
          part = 0;
        }
        const int token = tile * 8 + 2 * t + i % 2;
        if (token < num_tokens) out[token][4 * g + i / 4 * 2 + i % 4 / 2] = sum;
      }
    }
  }

 private:
  template <bool kWhole, class Unit>
  EFFINFER_DEVICE void add_half(Unit& unit, const TernaryHalf& from, int half, int num_lines) {
    constexpr int kFields = Digits::kFields;
    const int lines = kWhole ? kWholeLines : num_lines;
    const int first = 8 * half + unit.lane % 4;
    Quad quads[2] = {};
    EFFINFER_UNROLL
    for (int i = 0; i < 2; ++i) {
      if ((kWhole && kWholeLines == 16) || first + 4 * i < lines) {
        quads[i] = *reinterpret_cast<const Quad*>(from.lines + i * from.stride);
      }
    }
    // Dwords beyond a block, if any, are multiplied by digits of 0.
    uint32_t b[kTiles][kFields][2];
    EFFINFER_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint8_t* mine = from.tokens + token_at_[tile];
      EFFINFER_UNROLL
      for (int f = 0; f < kFields; ++f) {
        EFFINFER_UNROLL
        for (int i = 0; i < 2; ++i) {
          memcpy(&b[tile][f][i], __builtin_assume_aligned(mine + (f * lines + 4 * i) * 4, 4), 4);
        }
      }
    }
    EFFINFER_UNROLL
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t digits[4][kFields];
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        Digits::take(quads[i / 2].words[2 * pair + i % 2], digits[i]);
      }
      EFFINFER_UNROLL
      for (int f = 0; f < kFields; ++f) {
        EFFINFER_UNROLL
        for (int tile = 0; tile < kTiles; ++tile) {
          unit.mma_s8(sums_[tile][f % Digits::kSets][pair],
                      {digits[0][f], digits[1][f], digits[2][f], digits[3][f]}, b[tile][f]);
        }
      }
    }
  }

  int token_at_[kTiles];
  int32_t sums_[kTiles][Digits::kSets][2][4] = {};
};

}  // namespace effinfer::cuda
