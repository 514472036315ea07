// The portable int8 matmul.
#pragma once

#include "cpu/matmul_units.h"
#include "cpu/packed_lines.h"
#include "ops/operand.h"

namespace effinfer::cpu::portable {
namespace {

using ops::Int8Row;
using ops::kGroupRows;
using ops::PackedFormat;
using ops::PackedWeight;

struct Int8Dot {
  static constexpr int kTokens = 8;
  static constexpr int kRows = static_cast<int>(kGroupRows);

  template <PackedFormat format>
  static void dot(const PackedWeight& weight, int64_t first_group, int groups, const Int8Row* rows,
                  int count, const FetchAhead&, float (*sums)[32]) {
    for (int t = 0; t < count; ++t) std::memset(sums[t], 0, sizeof(sums[t]));
    for (int g = 0; g < groups; ++g) {
      dot_group<format>(weight, weight.group(first_group + g), rows, count, sums, g * kRows);
    }
  }

 private:
  template <PackedFormat format>
  static void dot_group(const PackedWeight& weight, const uint8_t* group, const Int8Row* rows,
                        int count, float (*sums)[32], int offset) {
    const uint8_t* data = group + ops::header_bytes(format, weight.cols);
    const int64_t superblocks = ops::padded_cols(weight.cols) / ops::kSuperblock;
    uint8_t fields[kFieldLines * 64];
    for (int64_t s = 0; s < superblocks; ++s) {
      unpack_lines<format.bits>(data, fields);
      for (int sub = 0; sub < 64 / format.sub_block; ++sub) {
        const Affine affine = load_affine(format, weight, group, s, sub);
        const int first = sub * format.sub_block / 4;
        for (int t = 0; t < count; ++t) {
          add_sub_block<format>(fields + first * 64, rows[t], s * 16 + first, affine,
                                sums[t] + offset);
        }
      }
      data += ops::superblock_bytes(format);
    }
  }

  // `line` is the row's first field line of the sub-block: k = 4 * line.
  template <PackedFormat format>
  static void add_sub_block(const uint8_t* fields, const Int8Row& row, int64_t line,
                            const Affine& affine, float* sums) {
    constexpr int kHalves = format.sub_block / 16;
    float products[kRows] = {};
    for (int half = 0; half < kHalves; ++half) {
      const int64_t block = line / 4 + half;
      int32_t integers[kRows] = {};
      for (int i = 0; i < 4; ++i) {
        const int8_t* a = row.q + block * 16 + i * 4;
        for (int r = 0; r < kRows; ++r) {
          const uint8_t* w = fields + (half * 4 + i) * 64 + r * 4;
          integers[r] += w[0] * a[0] + w[1] * a[1] + w[2] * a[2] + w[3] * a[3];
        }
      }
      const int32_t bias = row.biases[block] * format.zero / 128;
      for (int r = 0; r < kRows; ++r) {
        const auto value = static_cast<float>(integers[r] + bias);
        products[r] = half == 0 ? value * row.scales[block]
                                : __builtin_fmaf(value, row.scales[block], products[r]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      sums[r] = __builtin_fmaf(products[r], affine.scale[r], sums[r]);
    }
    if constexpr (format.has_min) {
      const float scaled = kHalves == 2 ? row.scaled[line / 8] : row.scaled16(line / 4);
      for (int r = 0; r < kRows; ++r) {
        sums[r] = __builtin_fmaf(affine.min[r], scaled, sums[r]);
      }
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::portable
