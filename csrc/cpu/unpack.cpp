// The packed layout back to floats, in the order of operations of io/dequantize.cpp.
#include <algorithm>
#include <cstring>

#include "core/float16.h"
#include "cpu/pack_ternary.h"
#include "cpu/packed_lines.h"
#include "ops/packed_weight.h"

namespace effinfer::ops {
namespace {

// Value k of row r of a dense group.
float dense_value(QuantBits bits, const uint8_t* group, int64_t r, int64_t k) {
  switch (bits) {
    case QuantBits::f32: {
      float value;
      std::memcpy(&value, group + (k * kGroupRows + r) * 4, sizeof(value));
      return value;
    }
    case QuantBits::f16:
      return cpu::load_half(group, k * kGroupRows + r);
    default: {
      uint16_t word;
      std::memcpy(&word, group + ((k / 2 * kGroupRows + r) * 2 + k % 2) * 2, sizeof(word));
      return bf16_to_f32(word);
    }
  }
}

}  // namespace

void unpack_group(const PackedWeight& weight, int64_t group_index, float* out) {
  const uint8_t* group = weight.group(group_index);
  const PackedFormat& format = weight.format;
  if (is_ternary(format)) {
    return cpu::unpack_ternary_rows(weight, group_index, 0, kGroupRows, out);
  }
  if (format.scales == ScaleKind::dense) {
    for (int64_t i = 0; i < kGroupRows * weight.cols; ++i) {
      out[i] = dense_value(format.bits, group, i / weight.cols, i % weight.cols);
    }
    return;
  }
  uint8_t fields[cpu::kFieldLines * 64];
  for (int64_t k0 = 0; k0 < weight.cols; k0 += kSuperblock) {
    const int64_t superblock = k0 / kSuperblock;
    const uint8_t* data =
        group + header_bytes(format, weight.cols) + superblock * superblock_bytes(format);
    cpu::with_quant_bits(format.bits, [&]<QuantBits bits>(std::integral_constant<QuantBits, bits>) {
      cpu::unpack_lines<bits>(data, fields);
    });
    for (int64_t sub = 0; sub < kSuperblock / format.sub_block; ++sub) {
      const cpu::Affine affine = cpu::load_affine(format, weight, group, superblock, sub);
      for (int64_t r = 0; r < kGroupRows; ++r) {
        for (int64_t i = sub * format.sub_block; i < (sub + 1) * format.sub_block; ++i) {
          if (k0 + i >= weight.cols) break;
          const int q = fields[i / 4 * 64 + r * 4 + i % 4] - format.zero;
          float value = affine.scale[r] * static_cast<float>(q);
          if (format.has_min) value += affine.min[r];
          out[r * weight.cols + k0 + i] = value;
        }
      }
    }
  }
}

void unpack_row(const PackedWeight& weight, int64_t row, float* out) {
  const uint8_t* group = weight.group(row / kGroupRows);
  const PackedFormat& format = weight.format;
  const int64_t r = row % kGroupRows;
  if (is_ternary(format)) {
    return cpu::unpack_ternary_rows(weight, row / kGroupRows, r, r + 1, out);
  }
  if (format.scales == ScaleKind::dense) {
    for (int64_t k = 0; k < weight.cols; ++k) out[k] = dense_value(format.bits, group, r, k);
    return;
  }
  uint8_t quants[kSuperblock];
  cpu::Affine affine{};
  for (int64_t k0 = 0; k0 < weight.cols; k0 += kSuperblock) {
    const int64_t superblock = k0 / kSuperblock;
    const uint8_t* data =
        group + header_bytes(format, weight.cols) + superblock * superblock_bytes(format);
    cpu::with_quant_bits(format.bits, [&]<QuantBits bits>(std::integral_constant<QuantBits, bits>) {
      cpu::unpack_row_quants<bits>(data, r, quants);
    });
    const int64_t count = std::min(kSuperblock, weight.cols - k0);
    for (int64_t first = 0; first < count; first += format.sub_block) {
      cpu::load_affine_rows(format, weight.cols, group, superblock, first / format.sub_block, r,
                            r + 1, affine);
      const int64_t last = std::min<int64_t>(first + format.sub_block, count);
      for (int64_t i = first; i < last; ++i) {
        float value = affine.scale[r] * static_cast<float>(quants[i] - format.zero);
        if (format.has_min) value += affine.min[r];
        out[k0 + i] = value;
      }
    }
  }
}

}  // namespace effinfer::ops
