// The portable float32 matmul: plain multiplications and additions, since a fused one is a library
// call on the baseline CPU. Its results differ from the vector levels by rounding.
#pragma once

#include "core/float16.h"
#include "cpu/packed_lines.h"
#include "cpu/vectors/token_rows.h"

namespace effinfer::cpu::portable {
namespace {

using ops::PackedWeight;
using ops::QuantBits;
using ops::ScaleKind;

struct Panel {
  static constexpr int kTokens = 4;
  static constexpr int kUnits = 1;
  static constexpr int64_t kStretch = 256;
  static constexpr int kStreamTiles = 0;
  static constexpr int64_t kRows = ops::kGroupRows;

  static const uint8_t* panel(const PackedWeight& weight, int64_t group_index, int64_t k,
                              int64_t count, uint8_t* scratch) {
    const uint8_t* group = weight.group(group_index);
    auto* out = reinterpret_cast<float*>(scratch);
    if (weight.format.scales == ScaleKind::dense) {
      if (weight.format.bits == QuantBits::f32) return group + k * kRows * 4;
      dense_panel(weight.format.bits, group + k * kRows * 2, count, out);
    } else {
      for (int64_t i = 0; i < count; i += ops::kSuperblock) {
        superblock(weight, group, (k + i) / ops::kSuperblock, out + i * kRows);
      }
    }
    return scratch;
  }

  static void multiply(const ops::PackedFormat&, const uint8_t* const* panels, int64_t first_k,
                       int64_t count, const TokenRows& rows, int tokens, float (*sums)[32]) {
    const uint8_t* x = rows.data + first_k * 4;
    const int64_t x_stride = rows.stride;
    for (int t = 0; t < tokens; ++t) {
      const auto* row = reinterpret_cast<const float*>(x + t * x_stride);
      for (int g = 0; g < 2; ++g) {
        const auto* weights = reinterpret_cast<const float*>(panels[g]);
        float sum[kRows];
        std::memcpy(sum, sums[t] + g * kRows, sizeof(sum));
        for (int64_t k = 0; k < count; ++k) {
          for (int64_t r = 0; r < kRows; ++r) sum[r] += weights[k * kRows + r] * row[k];
        }
        std::memcpy(sums[t] + g * kRows, sum, sizeof(sum));
      }
    }
  }

 private:
  static void dense_panel(QuantBits bits, const uint8_t* data, int64_t count, float* out) {
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t r = 0; r < kRows; ++r) {
        uint16_t half;
        const int64_t index =
            bits == QuantBits::f16 ? k * kRows + r : (k / 2 * kRows + r) * 2 + k % 2;
        std::memcpy(&half, data + index * 2, sizeof(half));
        out[k * kRows + r] = bits == QuantBits::f16 ? f16_to_f32(half) : bf16_to_f32(half);
      }
    }
  }

  static void superblock(const PackedWeight& weight, const uint8_t* group, int64_t index,
                         float* out) {
    const ops::PackedFormat& format = weight.format;
    uint8_t fields[kFieldLines * 64];
    with_quant_bits(format.bits, [&]<QuantBits bits>(std::integral_constant<QuantBits, bits>) {
      unpack_lines<bits>(
          group + ops::header_bytes(format, weight.cols) + index * ops::superblock_bytes(format),
          fields);
    });
    for (int64_t sub = 0; sub < ops::kSuperblock / format.sub_block; ++sub) {
      const Affine affine = load_affine(format, weight, group, index, sub);
      for (int64_t k = sub * format.sub_block; k < (sub + 1) * format.sub_block; ++k) {
        for (int64_t r = 0; r < kRows; ++r) {
          const int q = fields[k / 4 * 64 + r * 4 + k % 4] - format.zero;
          out[k * kRows + r] = affine.scale[r] * static_cast<float>(q) + affine.min[r];
        }
      }
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::portable
