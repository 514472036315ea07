// Rows of keys and values into lines (ops/kv_layout.h), dword by dword.
#pragma once

#include <cstdint>
#include <cstring>

namespace effinfer::cpu::portable {
namespace {

struct KvPack {
  struct Line {
    alignas(64) uint8_t bytes[64];
  };

  // Line d of 16 dwords: dword d of each row.
  static void transpose(const uint8_t* const (&rows)[16], int64_t offset, int64_t dwords,
                        uint8_t* lines) {
    for (int64_t d = 0; d < dwords; ++d) {
      for (int i = 0; i < 16; ++i) {
        std::memcpy(lines + d * 64 + i * 4, rows[i] + offset + d * 4, 4);
      }
    }
  }

  // Pairs of 16-bit numbers of two rows: a0 b0 a1 b1 ...
  static void interleave(const uint8_t* a, const uint8_t* b, int64_t count, uint8_t* lines) {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(lines + 4 * i, a + 2 * i, 2);
      std::memcpy(lines + 4 * i + 2, b + 2 * i, 2);
    }
  }

  // Loads 16 dwords of each row from one offset on (kCount = 8: 8 dwords).
  template <int kCount>
  static void block(const uint8_t* const* rows, int64_t offset, Line (&lines)[16]) {
    const uint8_t* from[16];
    for (int i = 0; i < 16; ++i) from[i] = rows[i];
    transpose(from, offset, kCount, lines[0].bytes);
  }

  // A line of one row's floats, or of pairs of two rows' 16-bit numbers.
  template <int kRows>
  [[gnu::always_inline]] static Line line(const uint8_t* const (&rows)[kRows], int64_t offset) {
    Line line;
    if constexpr (kRows == 1) {
      std::memcpy(line.bytes, rows[0] + offset, 64);
    } else {
      interleave(rows[0] + offset, rows[1] + offset, 16, line.bytes);
    }
    return line;
  }
};

}  // namespace
}  // namespace effinfer::cpu::portable
