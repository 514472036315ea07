// What a warp of ternary.h multiplies, on its way to shared memory: blocks of 256 k of 32 rows of
// weights and of some tokens, each in a place of its own.
//
//   weights   [u][group] 256 bytes: lines 4 u .. 4 u + 3, zeros for those that a block does not
//             have
//   tokens    [token] 256 bytes, and 16 so that eight tokens' dwords lie in all banks
#pragma once

#include <cstdint>

#include "cuda/bodies/matmul_epilogue.h"
#include "cuda/unit.h"
#include "ops/operand.h"
#include "ops/packed_weight.h"

namespace effinfer::cuda {

inline constexpr int kTernaryWarps = 4;
inline constexpr int kTernaryLineBytes = 4 * kWarp * 16;
inline constexpr int kTernaryTokenBytes = 256 + 16;

constexpr int ternary_place_bytes(int tokens) {
  return kTernaryLineBytes + tokens * kTernaryTokenBytes;
}

// How much there is of it depends on the launch.
struct TernaryShared {
  alignas(128) uint8_t first[128];
};

// How ternary_bulk.h cuts a unit: rounds of some blocks of 256 k, as many of which are under way as
// there are places.
struct TernaryRounds {
  int32_t blocks = 0;
  int32_t places = 0;
  int32_t group_bytes = 0;   // of a round, at most
  int32_t token_stride = 0;  // bytes from a token of a round to the next
  int32_t place_bytes = 0;
};

struct TernaryParams {
  const uint8_t* x = nullptr;
  int64_t x_row_bytes = 0;
  int32_t padded = 0;  // columns
  int32_t tokens = 0;
  int32_t token_blocks = 0;
  int32_t blocks = 0;  // of 256 k
  int32_t units = 0;   // of all parts
  ops::UnaryOp glu = ops::UnaryOp::none;
  bool row_scales = false;  // ScaleKind::row
  int64_t header_bytes = 0;
  int64_t tail_offset = 0;   // of the scales of blocks in a group
  int32_t block_tokens = 0;  // at most, of a block
  TernaryRounds rounds;      // where they come by bulk copies
  MatmulWeight parts[ops::kMaxMatmulParts];
  OperandOut operand;
};

EFFINFER_DEVICE int ternary_dwords_of(const TernaryParams& p, int block) {
  const int left = p.padded / 4 - block * 64;
  return left < 64 ? left : 64;
}
template <ops::QuantBits kBits>
EFFINFER_DEVICE int ternary_lines_of(const TernaryParams& p, int block) {
  return static_cast<int>(ops::ternary_lines(kBits, ternary_dwords_of(p, block)));
}

// A lane's part of the copies: of one block of the warp after the other.
template <ops::QuantBits kBits>
class TernaryCopies {
 public:
  template <class Unit>
  EFFINFER_DEVICE TernaryCopies(const Unit& unit, const TernaryParams& p, const uint8_t* group,
                                int first_token, int num_tokens)
      : weights_(group + p.header_bytes + unit.warp * kBlockBytes + unit.lane % 16 * 16),
        tokens_(p.x + (first_token + unit.lane / 16) * p.x_row_bytes + unit.warp * 256 +
                unit.lane % 16 * 16),
        num_tokens_(num_tokens) {}

  // Puts lines of a block on their way, zeros for those that it does not have. Eight lanes have
  // 128 bytes in one piece. Of a group's four lines the third and the fourth have their quads in
  // pairs in turn, so that eight lanes that multiply meet all banks.
  template <class Unit>
  EFFINFER_DEVICE void fetch_weights(Unit& unit, const TernaryParams& p, int block, uint8_t* to) {
    if (block >= p.blocks) return;
    const int line = unit.lane / 4 % 4;
    const int lines = ternary_lines_of<kBits>(p, block) - line;
    to += (unit.lane ^ line / 2 * 2) * 16;
    EFFINFER_UNROLL
    for (int u = 0; u < 4; ++u) {
      unit.copy_async(to + u * (kWarp * 16), weights_ + u * 256, 4 * u < lines);
    }
    weights_ += kTernaryWarps * kBlockBytes;
  }
  // The activations of a block.
  template <class Unit>
  EFFINFER_DEVICE void fetch_tokens(Unit& unit, const TernaryParams& p, int block, uint8_t* to) {
    const int piece = unit.lane % 16;
    if (block < p.blocks && piece * 4 < ternary_dwords_of(p, block)) {
      const uint8_t* from = tokens_;
      to += kTernaryLineBytes + unit.lane / 16 * kTernaryTokenBytes + piece * 16;
      EFFINFER_NO_UNROLL
      for (int token = unit.lane / 16; token < num_tokens_; token += 2) {
        unit.copy_async(to, from);
        to += 2 * kTernaryTokenBytes;
        from += 2 * p.x_row_bytes;
      }
    }
    tokens_ += kTernaryWarps * 256;
  }

  // Where a lane finds its rows of line t.
  EFFINFER_DEVICE static int line_at(int lane) {
    const int t = lane % 4;
    return (lane / 16 * 16 + t * 4 + (lane / 4 % 4 ^ t / 2 * 2)) * 16;
  }

 private:
  static constexpr int kBlockBytes = static_cast<int>(ops::ternary_lines(kBits, 64)) * 64;

  const uint8_t* weights_;
  const uint8_t* tokens_;
  int num_tokens_;
};

}  // namespace effinfer::cuda
