#include "cpu/pack_ternary.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "cpu/ternary_lines.h"
#include "io/gguf_blocks.h"

namespace effinfer::cpu {
namespace {

using ops::kGroupRows;
using ops::kTernaryBlock;
using ops::QuantBits;
using ops::ScaleKind;

// Whether all blocks of a row can do with one scale, which is then `*scale`. Any finite scale of
// the same sign gives a block of zeros.
template <class Block>
bool has_one_scale(const Block* blocks, int64_t count, float* scale) {
  const auto is_zero = [](const Block& block) {
    uint8_t quants[Block::kSize];
    block.quants(quants);
    bool zero = std::isfinite(block.d.value());
    for (const uint8_t q : quants) zero = zero && q == Block::kZero;
    return zero;
  };
  const Block* chosen = nullptr;
  bool zeros = false;
  for (int64_t b = 0; b < count; ++b) {
    if (chosen != nullptr && chosen->d.bits() == blocks[b].d.bits()) continue;
    if (is_zero(blocks[b])) {
      zeros = true;
    } else if (chosen != nullptr) {
      return false;
    } else {
      chosen = blocks + b;
    }
  }
  *scale = chosen == nullptr ? blocks[0].d.value() : chosen->d.value();
  for (int64_t b = 0; b < count && zeros; ++b) {
    if (std::signbit(blocks[b].d.value()) != std::signbit(*scale)) return false;
  }
  return !zeros || std::isfinite(*scale);
}

// Digits of one row into a panel. Returns whether they are digits.
[[gnu::always_inline]] inline bool scatter_row(const uint8_t* quants, int64_t count, int64_t row,
                                               uint8_t* panel) {
  uint8_t largest = 0;
  for (int64_t k = 0; k < count; ++k) {
    panel[k / 4 * 64 + row * 4 + k % 4] = quants[k];
    largest = quants[k] > largest ? quants[k] : largest;
  }
  return largest <= 2;
}

template <class Block>
bool pack_blocks(const Block* blocks, int64_t cols, int64_t rows, const ops::PackedFormat& format,
                 uint8_t* out) {
  const int64_t row_blocks = cols / kTernaryBlock;
  const auto header = static_cast<size_t>(ops::header_bytes(format, cols));
  const auto tail = static_cast<size_t>(ops::ternary_tail_bytes(format.scales, cols));
  std::memset(out, 0, header);
  uint8_t* lines = out + header;
  uint8_t* scales = lines + ops::ternary_quant_bytes(format.bits, cols);
  std::memset(scales, 0, tail);
  int32_t uniform = 1;
  for (int64_t r = 0; r < rows; ++r) {
    float scale = 0.0f;
    if (!has_one_scale(blocks + r * row_blocks, row_blocks, &scale)) uniform = 0;
    std::memcpy(out + r * 4, &scale, sizeof(scale));
  }
  std::memcpy(out + 64, &uniform, sizeof(uniform));
  bool valid = true;
  for (int64_t b = 0; b < row_blocks; ++b) {
    uint8_t panel[kPanelBytes];
    std::memset(panel, Block::kZero, sizeof(panel));
    for (int64_t r = 0; r < rows; ++r) {
      const Block& block = blocks[r * row_blocks + b];
      uint8_t quants[Block::kSize];
      block.quants(quants);
      valid = scatter_row(quants, Block::kSize, r, panel) && valid;
      const uint16_t d = block.d.bits();
      std::memcpy(scales + (b * kGroupRows + r) * 2, &d, sizeof(d));
    }
    with_ternary_bits(format.bits, [&]<QuantBits bits>(std::integral_constant<QuantBits, bits>) {
      pack_panel<bits>(panel, kPanelDwords, lines);
      lines += ternary_block_bytes(bits);
    });
  }
  return valid;
}

// One scale for the whole tensor: nothing to find out.
bool pack_i2_s(const TensorView& weight, int64_t first_row, int64_t rows,
               const ops::PackedFormat& format, uint8_t* out) {
  constexpr int64_t kSize = gguf::BlockI2S::kSize;
  const int64_t cols = weight.dims[1];
  const auto* blocks = static_cast<const gguf::BlockI2S*>(weight.data) + first_row * cols / kSize;
  const float scale = gguf::i2_s_scale(weight.data, weight.dims.num_elements());
  std::memset(out, 0, static_cast<size_t>(ops::header_bytes(format, cols)));
  for (int64_t r = 0; r < rows; ++r) std::memcpy(out + r * 4, &scale, sizeof(scale));
  uint8_t* lines = out + ops::header_bytes(format, cols);
  const TernaryBlocks panels(cols);
  bool valid = true;
  for (int64_t b = 0; b < panels.count(); ++b) {
    uint8_t panel[kPanelBytes];
    std::memset(panel, gguf::BlockI2S::kZero, sizeof(panel));
    const int64_t count = panels.dwords_of(b) * 4 / kSize;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < count; ++i) {
        uint8_t quants[kSize];
        blocks[r * (cols / kSize) + b * kTernaryBlock / kSize + i].quants(quants);
        valid = scatter_row(quants, kSize, r, panel + i * kSize / 4 * 64) && valid;
      }
    }
    with_ternary_bits(format.bits, [&]<QuantBits bits>(std::integral_constant<QuantBits, bits>) {
      pack_panel<bits>(panel, panels.dwords_of(b), lines);
      lines += ternary_block_bytes(bits);
    });
  }
  return valid;
}

}  // namespace

bool pack_ternary_group(const TensorView& weight, int64_t first_row, int64_t rows,
                        const ops::PackedFormat& format, uint8_t* out) {
  if (weight.dtype == DType::i2_s) return pack_i2_s(weight, first_row, rows, format, out);
  const int64_t cols = weight.dims[1];
  const auto first_block = first_row * cols / kTernaryBlock;
  if (weight.dtype == DType::tq1_0) {
    const auto* blocks = static_cast<const gguf::BlockTq1_0*>(weight.data);
    return pack_blocks(blocks + first_block, cols, rows, format, out);
  }
  const auto* blocks = static_cast<const gguf::BlockTq2_0*>(weight.data);
  return pack_blocks(blocks + first_block, cols, rows, format, out);
}

void unpack_ternary_rows(const ops::PackedWeight& weight, int64_t group_index, int64_t first,
                         int64_t last, float* out) {
  const ops::PackedFormat& format = weight.format;
  const uint8_t* group = weight.group(group_index);
  const uint8_t* lines = group + ops::header_bytes(format, weight.cols);
  const bool uniform = is_uniform(format, group);
  const TernaryBlocks blocks(weight.cols);
  for (int64_t b = 0; b < blocks.count(); ++b) {
    uint8_t panel[kPanelBytes];
    with_ternary_bits(format.bits, [&]<QuantBits bits>(std::integral_constant<QuantBits, bits>) {
      unpack_panel<bits>(lines, blocks.dwords_of(b), panel);
      lines += ternary_block_bytes(bits);
    });
    const int64_t k0 = b * kTernaryBlock;
    const int64_t count = weight.cols - k0 < kTernaryBlock ? weight.cols - k0 : kTernaryBlock;
    float scales[kGroupRows];
    if (uniform) {
      std::memcpy(scales, row_scales(group), sizeof(scales));
    } else {
      load_block_scales(weight, group, b, scales);
    }
    for (int64_t r = first; r < last; ++r) {
      const float d = scales[r];
      for (int64_t k = 0; k < count; ++k) {
        const int digit = panel[k / 4 * 64 + r * 4 + k % 4];
        out[(r - first) * weight.cols + k0 + k] = d * static_cast<float>(digit - format.zero);
      }
    }
  }
}

}  // namespace effinfer::cpu
