// Ternary matmul, what all levels share: the cut into units and blocks of tokens, the sums of
// digits by lines or by panels, and the few float operations at the end, which are one sequence
// everywhere. With c = w + 1 the digits of the weights,
//
//   i   = sum(c q) - sum(q)                       exact, in int32
//   out = float(i) * (scale_x * scale_w)          a row with one scale
//   s   = fma(float(i_b), d_b, s) over blocks b of 256 k, out = s * scale_x      otherwise
//
// Bounds: |sum(c q)| <= 254 K, and no kernel multiplies it by more than 64 before it is exact
// again, with a quarter of K each: kMaxTernaryCols keeps that within int32.
#pragma once

#include <cstdint>

#include "core/tuned.h"
#include "cpu/matmul_units.h"
#include "cpu/ternary_lines.h"
#include "cpu/vectors/matmul_epilogue.h"
#include "effinfer/threads.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// `Dot` has
//   kTokens, kWholeTiles of a tile of multiply(); whether tiles are full but for the last one, or
//                        nearly equal
//   line_tokens<bits>()  up to so many tokens are multiplied by the packed lines themselves,
//   kLineTile            so many at once
//   dot<bits>(lines, first_block, last_block, blocks, q, q_stride, tokens, ahead, sums)
//                        sums[token][32] = sums of digits of one group over the blocks: 16 of them;
//                        `ahead` fetches what this member reads after them
//   decode<bits>(lines, dwords, panel)
//                        one block of one group as a panel
//   multiply(panels, dwords, q, q_stride, tokens, sums)
//                        sums[token][32] += two panels times `tokens` rows
template <class Dot>
struct TernaryMatmul {
  using Sums = MatmulEpilogue::Sums;
  using Integers = int32_t[kUnitOutputs];
  static constexpr int kRows = static_cast<int>(ops::kGroupRows);

  static void run(const ops::MatmulProblem& problem, Team& team, Dot& dot) {
    const int64_t units = count_units(problem);
    const int64_t tokens = problem.x.rows;
    const int64_t blocks = (tokens + kTernaryTokens - 1) / kTernaryTokens;
    const int64_t block = (tokens + blocks - 1) / blocks;
    const int64_t chunks = count_chunks(problem, units, team.size());
    const TokenRows rows(problem.x);
    const FetchDistance distance = fetch_distance(WeightStream::ternary);
    for_units(
        problem, team, chunks * blocks,
        [&](int64_t chunk) {
          const int64_t of_units = chunk % chunks;
          return UnitRange{of_units * units / chunks, (of_units + 1) * units / chunks};
        },
        [&](int64_t chunk, const MatmulUnit& unit, const uint8_t* next) {
          const int64_t first = chunk / chunks * block;
          const int64_t count = first + block < tokens ? block : tokens - first;
          run_unit(problem, {rows, first, count, distance, dot}, unit, next);
        });
  }

 private:
  // What units are multiplied by: tokens [first, first + count) of the operand.
  struct Tokens {
    const TokenRows& rows;
    int64_t first;
    int64_t count;
    FetchDistance distance;
    Dot& dot;
  };

  static void run_unit(const ops::MatmulProblem& problem, const Tokens& tokens,
                       const MatmulUnit& unit, const uint8_t* next) {
    alignas(64) Sums sums[2][kTernaryTokens];
    for (int part = 0; part < unit.num_parts; ++part) {
      const ops::PackedWeight& weight = unit.parts[part].weight;
      const int64_t group = 2 * unit.index;
      const int groups = groups_of(unit);
      with_ternary_bits(weight.format.bits, [&]<ops::QuantBits bits>(
                                                std::integral_constant<ops::QuantBits, bits>) {
        const Job job{tokens, weight, fetch_beyond(unit, part, next, tokens.distance)};
        const bool first = is_uniform(weight.format, weight.group(group));
        const bool last = is_uniform(weight.format, weight.group(group + groups - 1));
        if (first && last) {
          multiply_uniform<bits>(job, group, groups, 0, sums[part]);
        } else {
          for (int g = 0; g < groups; ++g) {
            const auto run =
                (g == 0 ? first : last) ? multiply_uniform<bits> : multiply_blocks<bits>;
            run(job, group + g, 1, g * kRows, sums[part]);
          }
        }
      });
    }
    MatmulEpilogue::run(problem, unit, tokens.first, tokens.count, sums[0], sums[1]);
  }

  // Tokens times one weight.
  struct Job {
    const Tokens& tokens;
    const ops::PackedWeight& weight;
    FetchAhead ahead;

    [[gnu::always_inline]] int64_t count() const { return tokens.count; }
    [[gnu::always_inline]] ops::TokenRow row(int64_t t) const {
      return tokens.rows[tokens.first + t];
    }
    [[gnu::always_inline]] int64_t header() const {
      return ops::header_bytes(weight.format, weight.cols);
    }
    [[gnu::always_inline]] const uint8_t* lines(int64_t group) const {
      return weight.group(group) + header();
    }
  };

  // Sums of digits over blocks [first, last) of k, for one or two groups.
  template <ops::QuantBits bits>
  static void sum_digits(const Job& job, int64_t group, int groups, int64_t first, int64_t last,
                         Integers* sums) {
    const TernaryBlocks blocks(job.weight.cols);
    if (job.count() <= job.tokens.dot.template line_tokens<bits>()) {
      const int64_t tiles = (job.count() + Dot::kLineTile - 1) / Dot::kLineTile;
      for (int g = 0; g < groups; ++g) {
        if (first == 0) job.ahead.ask_for(job.weight.group(group + g), job.header());
        for (int64_t tile = 0; tile < tiles; ++tile) {
          const int64_t t = tile * job.count() / tiles;
          // After the first tile the lines are in the first cache, and those behind them on their
          // way.
          const FetchAhead ahead = tile == 0 ? job.ahead : FetchAhead();
          job.tokens.dot.template dot<bits>(
              job.lines(group + g), first, last, blocks, job.row(t).q, job.tokens.rows.stride,
              static_cast<int>((tile + 1) * job.count() / tiles - t), ahead, sums[t] + g * kRows);
        }
      }
      return;
    }
    alignas(64) uint8_t panels[2][kPanelBytes];
    std::memset(sums, 0, static_cast<size_t>(job.count()) * sizeof(Integers));
    const int64_t tiles = (job.count() + Dot::kTokens - 1) / Dot::kTokens;
    const auto first_of = [&](int64_t tile) {
      const int64_t token = Dot::kWholeTiles ? tile * Dot::kTokens : tile * job.count() / tiles;
      return token < job.count() ? token : job.count();
    };
    for (int64_t b = first; b < last; ++b) {
      const int dwords = blocks.dwords_of(b);
      for (int g = 0; g < groups; ++g) {
        job.tokens.dot.template decode<bits>(job.lines(group + g) + b * ternary_block_bytes(bits),
                                             dwords, panels[g]);
      }
      // Without a second group the first is multiplied twice and half the sums are dropped.
      const uint8_t* both[2] = {panels[0], panels[groups - 1]};
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t t = first_of(tile);
        const int8_t* q = job.row(t).q + b * ops::kTernaryBlock;
        job.tokens.dot.multiply(both, dwords, q, job.tokens.rows.stride,
                                static_cast<int>(first_of(tile + 1) - t), sums + t);
      }
    }
  }

  template <ops::QuantBits bits>
  static void multiply_uniform(const Job& job, int64_t group, int groups, int offset, Sums* out) {
    alignas(64) Integers integers[kTernaryTokens];
    sum_digits<bits>(job, group, groups, 0, TernaryBlocks(job.weight.cols).count(), integers);
    for (int64_t t = 0; t < job.count(); ++t) {
      const ops::TokenRow row = job.row(t);
      for (int g = 0; g < groups; ++g) {
        const float* d = row_scales(job.weight.group(group + g));
        for (int r = 0; r < kRows; ++r) {
          const auto value = static_cast<float>(integers[t][g * kRows + r] - row.sum);
          out[t][offset + g * kRows + r] = value * (row.scale * d[r]);
        }
      }
    }
  }

  template <ops::QuantBits bits>
  static void multiply_blocks(const Job& job, int64_t group, int, int offset, Sums* out) {
    alignas(64) Integers integers[kTernaryTokens];
    for (int64_t t = 0; t < job.count(); ++t)
      std::memset(out[t] + offset, 0, kRows * sizeof(float));
    const int64_t blocks = TernaryBlocks(job.weight.cols).count();
    for (int64_t b = 0; b < blocks; ++b) {
      sum_digits<bits>(job, group, 1, b, b + 1, integers);
      float d[kRows];
      load_block_scales(job.weight, job.weight.group(group), b, d);
      for (int64_t t = 0; t < job.count(); ++t) {
        const int32_t sum = job.row(t).sums[b];
        for (int r = 0; r < kRows; ++r) {
          float& s = out[t][offset + r];
          s = __builtin_fmaf(static_cast<float>(integers[t][r] - sum), d[r], s);
        }
      }
    }
    for (int64_t t = 0; t < job.count(); ++t) {
      const float scale = job.row(t).scale;
      for (int r = 0; r < kRows; ++r) out[t][offset + r] *= scale;
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
