// The packed layout back to floats, in the order of operations of io/dequantize.cpp.
#include <cstring>

#include "core/float16.h"
#include "cpu/packed_lines.h"
#include "kernels/packed_weight.h"

namespace effinfer::kernels {
namespace {

void unpack_dense(const PackedWeight& weight, const uint8_t* group, float* out) {
  for (int64_t r = 0; r < kGroupRows; ++r) {
    for (int64_t k = 0; k < weight.cols; ++k) {
      float& value = out[r * weight.cols + k];
      switch (weight.format.bits) {
        case QuantBits::f32:
          std::memcpy(&value, group + (k * kGroupRows + r) * 4, sizeof(value));
          break;
        case QuantBits::f16:
          value = cpu::load_half(group, k * kGroupRows + r);
          break;
        default: {
          uint16_t bits;
          std::memcpy(&bits, group + ((k / 2 * kGroupRows + r) * 2 + k % 2) * 2, sizeof(bits));
          value = bf16_to_f32(bits);
          break;
        }
      }
    }
  }
}

}  // namespace

void unpack_group(const PackedWeight& weight, int64_t group_index, float* out) {
  const uint8_t* group = weight.group(group_index);
  const PackedFormat& format = weight.format;
  if (format.scales == ScaleKind::dense) return unpack_dense(weight, group, out);
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

}  // namespace effinfer::kernels
