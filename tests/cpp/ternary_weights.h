// Random ternary weights for tests, as digits, as files hold them and packed.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "core/float16.h"
#include "cpu/ternary_lines.h"
#include "ops/packed_weight.h"

namespace {

using namespace effinfer;
using namespace effinfer::ops;

struct Free {
  void operator()(void* pointer) const { std::free(pointer); }
};
using Memory = std::unique_ptr<void, Free>;

Memory allocate(size_t bytes) {
  Memory memory(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  std::memset(memory.get(), 0xee, bytes);
  return memory;
}

// Digits 0..2 of [rows, cols] and the scales of their blocks of 256.
struct Ternary {
  int64_t rows;
  int64_t cols;
  std::vector<uint8_t> digits;
  std::vector<float> scales;  // [rows][ceil(cols / 256)], float16 values

  int64_t blocks() const { return (cols + 255) / 256; }
  int digit(int64_t r, int64_t k) const { return digits[static_cast<size_t>(r * cols + k)]; }
  float scale(int64_t r, int64_t b) const { return scales[static_cast<size_t>(r * blocks() + b)]; }
};

enum class Scales { row, block };

Ternary random_ternary(int64_t rows, int64_t cols, Scales scales, uint32_t seed) {
  Ternary weight{rows, cols, std::vector<uint8_t>(static_cast<size_t>(rows * cols)), {}};
  std::mt19937 random(seed);
  for (uint8_t& digit : weight.digits) digit = static_cast<uint8_t>(random() % 3);
  for (int64_t r = 0; r < rows; ++r) {
    float d = 0;
    for (int64_t b = 0; b < weight.blocks(); ++b) {
      // One row of five keeps one scale also where others do not: groups mix both kinds.
      if (b == 0 || (scales == Scales::block && r % 5 != 0)) {
        d = f16_to_f32(static_cast<uint16_t>(0x2400 + random() % 0x800));
      }
      weight.scales.push_back(d);
    }
  }
  return weight;
}

// The bytes of a tq2_0 tensor.
std::vector<uint8_t> to_tq2_0(const Ternary& weight) {
  std::vector<uint8_t> bytes;
  for (int64_t r = 0; r < weight.rows; ++r) {
    for (int64_t b = 0; b < weight.blocks(); ++b) {
      for (int64_t half = 0; half < 2; ++half) {
        for (int64_t i = 0; i < 32; ++i) {
          int byte = 0;
          for (int f = 0; f < 4; ++f) {
            byte |= weight.digit(r, b * 256 + half * 128 + f * 32 + i) << 2 * f;
          }
          bytes.push_back(static_cast<uint8_t>(byte));
        }
      }
      const uint16_t d = f32_to_f16(weight.scale(r, b));
      bytes.push_back(static_cast<uint8_t>(d));
      bytes.push_back(static_cast<uint8_t>(d >> 8));
    }
  }
  return bytes;
}

// The bytes of an i2_s tensor with scale `d`.
std::vector<uint8_t> to_i2_s(const Ternary& weight, float d) {
  std::vector<uint8_t> bytes;
  for (int64_t r = 0; r < weight.rows; ++r) {
    for (int64_t k = 0; k < weight.cols; k += 128) {
      for (int64_t i = k; i < k + 32; ++i) {
        int byte = 0;
        for (int64_t f = 0; f < 4; ++f) byte = byte << 2 | weight.digit(r, i + 32 * f);
        bytes.push_back(static_cast<uint8_t>(byte));
      }
    }
  }
  bytes.resize(bytes.size() + 32);
  std::memcpy(bytes.data() + bytes.size() - 32, &d, sizeof(d));
  return bytes;
}

// A weight with one scale a row and any number of columns, as no file type has it.
struct RowPacked {
  PackedWeight view;
  Memory memory;

  RowPacked(const Ternary& weight, QuantBits bits) {
    view.format = {bits, ScaleKind::row, false, 0, 1};
    view.rows = weight.rows;
    view.cols = weight.cols;
    view.group_bytes = packed_group_bytes(view.format, weight.cols);
    memory = allocate(view.num_bytes());
    view.data = static_cast<uint8_t*>(memory.get());
    for (int64_t g = 0; g < view.groups(); ++g) {
      auto* group = const_cast<uint8_t*>(view.group(g));
      std::memset(group, 0, 64);
      uint8_t* lines = group + header_bytes(view.format, weight.cols);
      const int64_t rows = std::min<int64_t>(16, weight.rows - 16 * g);
      for (int64_t r = 0; r < rows; ++r) {
        const float d = weight.scale(16 * g + r, 0);
        std::memcpy(group + 4 * r, &d, 4);
      }
      const cpu::TernaryBlocks blocks(weight.cols);
      for (int64_t b = 0; b < blocks.count(); ++b) {
        uint8_t panel[cpu::kPanelBytes];
        std::memset(panel, 1, sizeof(panel));
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t k = 0; k < std::min<int64_t>(256, weight.cols - 256 * b); ++k) {
            panel[k / 4 * 64 + r * 4 + k % 4] =
                static_cast<uint8_t>(weight.digit(16 * g + r, 256 * b + k));
          }
        }
        cpu::with_ternary_bits(bits,
                               [&]<QuantBits known>(std::integral_constant<QuantBits, known>) {
                                 cpu::pack_panel<known>(panel, blocks.dwords_of(b), lines);
                                 lines += cpu::ternary_block_bytes(known);
                               });
      }
    }
  }
};

}  // namespace
