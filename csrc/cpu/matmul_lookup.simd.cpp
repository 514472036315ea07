// Levels: avx2 avx512
//
// Ternary matmul by table look-up. As in T-MAC (arXiv:2407.00088) and TeLLMe v2
// (arXiv:2510.15926): for a group of k the sums of all combinations of weights are computed once
// for a token, and each row of weights looks its sum up.
//
//   tables   [token][block of 256 k][group][entries] int16, made of the token's q when a member
//            begins a block of tokens; an entry is the sum of w q over the digits of its index
//   indices  of the rows of some units and one block of k, made of the packed digits
//
// A look-up costs one shuffle for a group of k and all rows of a register. Sums are kept in int16
// for one block: |sum| <= 256 * 127 = 32512 < 2^15, for any weights and any int8_token operand.
// They are the integers of vectors/matmul_ternary.h, and so are all results.
#include "cpu/level.h"
#include "cpu/matmul.h"
#include "cpu/matmul_units.h"
#include "cpu/ternary_lines.h"
#include "cpu/vectors/lookup.h"
#include "cpu/vectors/matmul_epilogue.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

constexpr int kLookupTokens = 15;                        // that tables are made for at once
constexpr int64_t kLookupTableBytes = int64_t{1} << 20;  // of them: half of a level 2 cache

// Lookup of the level has
//   kGroups, kTableBytes, kIndexBytes    groups of a block, bytes of a group
//   make_tables(q, dwords, tables)       of one token and block
//   decode<bits>(lines, dwords, panel)   as TernaryMatmul
//   make_indices(panels, dwords, out)    of one unit and block
//   look_up(indices, tables, stride, tokens, units, sums)
//                                        sums[token][unit][32] over one block
struct LookupMatmul {
  using Sums = MatmulEpilogue::Sums;
  using Integers = int32_t[kUnitOutputs];
  static constexpr int kRows = static_cast<int>(ops::kGroupRows);
  static constexpr int64_t kBlockBytes = int64_t{Lookup::kGroups} * Lookup::kTableBytes;

  static void run(const ops::MatmulProblem& problem, Team& team) {
    const int64_t units = count_units(problem);
    const int64_t chunks = (units + kLookupUnits - 1) / kLookupUnits;
    const int64_t tokens = problem.x.rows;
    const int64_t most = block_tokens(problem);
    const int64_t blocks = (tokens + most - 1) / most;
    const TokenRows rows(problem.x);
    int64_t made = -1;  // the block of tokens whose tables the scratch holds
    team.for_chunks(chunks * blocks, [&](int64_t chunk) {
      const int64_t block = chunk / chunks;
      const int64_t first = block * tokens / blocks;
      const Job job{problem,
                    rows,
                    static_cast<uint8_t*>(team.scratch()),
                    first,
                    static_cast<int>((block + 1) * tokens / blocks - first),
                    team.rank()};
      if (made != block) make_tables(job);
      made = block;
      const int64_t unit = chunk % chunks * kLookupUnits;
      const int64_t left = units - unit;
      run_units(job, unit, left < kLookupUnits ? static_cast<int>(left) : kLookupUnits);
    });
  }

  static size_t scratch_bytes(const ops::MatmulProblem& problem) {
    return static_cast<size_t>(block_tokens(problem) * TernaryBlocks(problem.x.cols).count() *
                               kBlockBytes);
  }

 private:
  // Tokens of a block: all if few, fewer where K is large.
  static int64_t block_tokens(const ops::MatmulProblem& problem) {
    const int64_t fitting =
        kLookupTableBytes / (TernaryBlocks(problem.x.cols).count() * kBlockBytes);
    int64_t most = fitting < kLookupTokens ? fitting : kLookupTokens;
    most = most < 1 ? 1 : most;
    return problem.x.rows < most ? problem.x.rows : most;
  }

  struct Job {
    const ops::MatmulProblem& problem;
    const TokenRows& rows;
    uint8_t* tables;
    int64_t first_token;
    int count;
    int member;

    [[gnu::always_inline]] ops::TokenRow row(int64_t t) const { return rows[first_token + t]; }
  };

  static void make_tables(const Job& job) {
    const TernaryBlocks blocks(job.problem.x.cols);
    uint8_t* tables = job.tables;
    for (int t = 0; t < job.count; ++t) {
      for (int64_t b = 0; b < blocks.count(); ++b) {
        Lookup::make_tables(job.row(t).q + b * ops::kTernaryBlock, blocks.dwords_of(b), tables);
        tables += kBlockBytes;
      }
    }
  }

  static void run_units(const Job& job, int64_t first_unit, int count) {
    alignas(64) Sums sums[2][kLookupUnits][kLookupTokens];
    MatmulUnit units[kLookupUnits] = {};
    for (int u = 0; u < count; ++u) units[u] = find_unit(job.problem, first_unit + u, job.member);
    for (int part = 0; part < units[0].num_parts; ++part) {
      multiply(job, units, count, part, sums[part]);
    }
    for (int u = 0; u < count; ++u) {
      MatmulEpilogue::run(job.problem, units[u], job.first_token, job.count, sums[0][u],
                          sums[1][u]);
    }
  }

  static void multiply(const Job& job, const MatmulUnit* units, int count, int part,
                       Sums (*out)[kLookupTokens]) {
    alignas(64) uint8_t indices[kLookupUnits][Lookup::kGroups * Lookup::kIndexBytes];
    alignas(64) int32_t sums[kLookupTokens][kLookupUnits][kUnitOutputs];
    alignas(64) Integers totals[kLookupUnits][kLookupTokens];
    std::memset(totals, 0, sizeof(totals));
    for (int u = 0; u < count; ++u) std::memset(out[u], 0, sizeof(out[u]));
    const TernaryBlocks blocks(job.problem.x.cols);
    for (int64_t b = 0; b < blocks.count(); ++b) {
      for (int u = 0; u < count; ++u) {
        make_indices(units[u].parts[part].weight, units[u], b, blocks.dwords_of(b), indices[u]);
      }
      Lookup::look_up(indices, job.tables + b * kBlockBytes, blocks.count() * kBlockBytes,
                      job.count, count, sums);
      for (int u = 0; u < count; ++u) {
        for (int g = 0; g < groups_of(units[u]); ++g) {
          add_block(units[u].parts[part].weight, 2 * units[u].index + g, b, job.count, sums, u,
                    g * kRows, totals[u], out[u]);
        }
      }
    }
    for (int u = 0; u < count; ++u) {
      for (int g = 0; g < groups_of(units[u]); ++g) {
        finish(job, units[u].parts[part].weight, 2 * units[u].index + g, g * kRows, totals[u],
               out[u]);
      }
    }
  }

  [[gnu::always_inline]] static int groups_of(const MatmulUnit& unit) {
    return unit.num_outputs > kRows ? 2 : 1;
  }

  static void make_indices(const ops::PackedWeight& weight, const MatmulUnit& unit, int64_t block,
                           int dwords, uint8_t* out) {
    alignas(64) uint8_t panels[2][kPanelBytes];
    const int groups = groups_of(unit);
    with_ternary_bits(weight.format.bits,
                      [&]<ops::QuantBits bits>(std::integral_constant<ops::QuantBits, bits>) {
                        for (int g = 0; g < groups; ++g) {
                          const uint8_t* lines = weight.group(2 * unit.index + g) +
                                                 ops::header_bytes(weight.format, weight.cols) +
                                                 block * ternary_block_bytes(bits);
                          Lookup::decode<bits>(lines, dwords, panels[g]);
                        }
                      });
    const uint8_t* both[2] = {panels[0], panels[groups - 1]};
    Lookup::make_indices(both, dwords, out);
  }

  // Sums of one block: to the total, or with the block's own scale to the result.
  static void add_block(const ops::PackedWeight& weight, int64_t group, int64_t block, int tokens,
                        const int32_t (*sums)[kLookupUnits][kUnitOutputs], int unit, int offset,
                        Integers* totals, Sums* out) {
    if (is_uniform(weight.format, weight.group(group))) {
      for (int t = 0; t < tokens; ++t) {
        for (int r = offset; r < offset + kRows; ++r) totals[t][r] += sums[t][unit][r];
      }
      return;
    }
    float d[kRows];
    load_block_scales(weight, weight.group(group), block, d);
    for (int t = 0; t < tokens; ++t) {
      for (int r = 0; r < kRows; ++r) {
        float& s = out[t][offset + r];
        s = __builtin_fmaf(static_cast<float>(sums[t][unit][offset + r]), d[r], s);
      }
    }
  }

  static void finish(const Job& job, const ops::PackedWeight& weight, int64_t group, int offset,
                     const Integers* totals, Sums* out) {
    const bool uniform = is_uniform(weight.format, weight.group(group));
    const float* d = row_scales(weight.group(group));
    for (int t = 0; t < job.count; ++t) {
      const float scale = job.row(t).scale;
      float* values = out[t] + offset;
      for (int r = 0; r < kRows; ++r) {
        values[r] = uniform ? static_cast<float>(totals[t][offset + r]) * (scale * d[r])
                            : values[r] * scale;
      }
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
const LookupKernel& kernels<Level::EFFINFER_LEVEL>() {
  using EFFINFER_LEVEL::LookupMatmul;
  static constexpr LookupKernel kKernel = {LookupMatmul::run, LookupMatmul::scratch_bytes};
  return kKernel;
}

}  // namespace effinfer::cpu
