// Rows of keys and values into lines (kernels/kv_layout.h), dword by dword.
#pragma once

#include <cstdint>
#include <cstring>

namespace effinfer::cpu::portable {
namespace {

struct KvPack {
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
};

}  // namespace
}  // namespace effinfer::cpu::portable
