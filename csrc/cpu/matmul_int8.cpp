// The portable int8 matmul.
#include "cpu/matmul_int8.h"

#include "cpu/matmul.h"
#include "cpu/packed_lines.h"

namespace effinfer::cpu::portable {
namespace {

using kernels::Int8Row;
using kernels::kGroupRows;
using kernels::PackedFormat;
using kernels::PackedWeight;

struct Portable {
  static constexpr int kTokens = 8;
  static constexpr int kRows = static_cast<int>(kGroupRows);

  template <PackedFormat format>
  static void dot(const PackedWeight& weight, int64_t first_group, int groups, const Int8Row* rows,
                  int count, float (*sums)[32]) {
    for (int t = 0; t < count; ++t) std::memset(sums[t], 0, sizeof(sums[t]));
    for (int g = 0; g < groups; ++g) {
      dot_group<format>(weight, weight.group(first_group + g), rows, count, sums, g * kRows);
    }
  }

 private:
  template <PackedFormat format>
  static void dot_group(const PackedWeight& weight, const uint8_t* group, const Int8Row* rows,
                        int count, float (*sums)[32], int offset) {
    constexpr int kPhases = 32 / format.sub_block;
    const uint8_t* data = group + kernels::header_bytes(format, weight.cols);
    const int64_t superblocks = kernels::padded_cols(weight.cols) / kernels::kSuperblock;
    uint8_t fields[kFieldLines * 64];
    for (int64_t s = 0; s < superblocks; ++s) {
      unpack_lines<format.bits>(data, fields);
      for (int phase = 0; phase < kPhases; ++phase) {
        for (int block = 0; block < 2; ++block) {
          const Affine affine = load_affine(format, weight, group, s, block * kPhases + phase);
          const int first = block * 8 + phase * (8 / kPhases);
          for (int t = 0; t < count; ++t) {
            add_sub_block<format>(fields + first * 64, rows[t], s * 16 + first, affine,
                                  sums[t] + offset);
          }
        }
      }
      data += kernels::superblock_bytes(format);
    }
  }

  // `line` is the row's first field line of the sub-block: k = 4 * line.
  template <PackedFormat format>
  static void add_sub_block(const uint8_t* fields, const Int8Row& row, int64_t line,
                            const Affine& affine, float* sums) {
    constexpr int kLines = format.sub_block / 4;
    int32_t integers[kRows] = {};
    for (int i = 0; i < kLines; ++i) {
      const int8_t* a = row.q + (line + i) * 4;
      for (int r = 0; r < kRows; ++r) {
        const uint8_t* w = fields + i * 64 + r * 4;
        integers[r] += w[0] * a[0] + w[1] * a[1] + w[2] * a[2] + w[3] * a[3];
      }
    }
    int32_t sum = row.sums16[line / 4];
    if constexpr (format.sub_block == 32) sum += row.sums16[line / 4 + 1];
    const float scale = row.scales[line / 8];
    for (int r = 0; r < kRows; ++r) {
      const int32_t integer = integers[r] - format.zero * sum;
      sums[r] = __builtin_fmaf(static_cast<float>(integer), affine.scale[r] * scale, sums[r]);
    }
    if constexpr (format.has_min) {
      const float scaled =
          format.sub_block == 32 ? row.sums[line / 8] : scale * static_cast<float>(sum);
      for (int r = 0; r < kRows; ++r) {
        sums[r] = __builtin_fmaf(affine.min[r], scaled, sums[r]);
      }
    }
  }
};

}  // namespace

void matmul_int8(const kernels::MatmulProblem& problem, Team& team) {
  Int8Matmul<Portable>::run(problem, team);
}

}  // namespace effinfer::cpu::portable
