// Int8 matmul: the cut into units and blocks of tokens, the choice of the inner kernel by weight
// format, and the arithmetic, which is one sequence of operations everywhere, so that a result is
// the same bits at every level, for any number of rows and any team. For each block of 32 k, in
// order, with i0 and i1 the exact sums of (q_w - zero) q_a over its halves and scale0, scale1 the
// operand's:
//
//   weights with a scale for 32 values      weights with a scale for 16 values
//     t   = fma(float(i1), scale1,            sum = fma(float(i0) * scale0, T0, sum)
//               float(i0) * scale0)           sum = fma(M0, scale0 * sum_a0, sum)
//     sum = fma(t, T, sum)                    sum = fma(float(i1) * scale1, T1, sum)
//     sum = fma(M, scaled_a, sum)             sum = fma(M1, scale1 * sum_a1, sum)
//
// where T is d or d * s, M is m or -(dmin * min), sum_a is the sum of the half's q_a, and scaled_a
// the sum of both halves' scale * sum_a. The lines with M are those of weights with minima.
#include "core/tuned.h"
#include "cpu/level.h"
#include "cpu/matmul.h"
#include "cpu/matmul_units.h"
#include "cpu/quantised_formats.h"
#include "cpu/vectors/int8_dot.h"
#include "cpu/vectors/matmul_epilogue.h"
#if EFFINFER_LEVEL_AVX512
#include "cpu/vectors/int8_panel_avx512.h"
#include "cpu/vectors/panel_matmul.h"
#endif

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// Int8Dot of the level has
//   kTokens                        most tokens of one pass over the weights
//   dot<format>(weight, first_group, groups, rows, count, ahead, sums)
//                                  sums[token][32] of 1 or 2 groups for `count` consecutive rows;
//                                  `ahead` fetches what this member reads after them
struct Int8Matmul {
  static constexpr int kTokens = Int8Dot::kTokens;
  // Up to four rows wait for memory; of more, arithmetic gives it time to come, and their operand
  // needs the first cache.
  static constexpr int64_t kFewRows = 4;
  static constexpr FetchDistance kManyRows = {8192, 0};

  static void run(const ops::MatmulProblem& problem, Team& team) {
    const int64_t units = count_units(problem);
    const int64_t chunks = count_chunks(problem, units, team.size());
    const FetchDistance few_rows = fetch_distance(WeightStream::int8);
    for_units(
        problem, team, chunks,
        [&](int64_t chunk) {
          return UnitRange{chunk * units / chunks, (chunk + 1) * units / chunks};
        },
        [&](int64_t, const MatmulUnit& unit, const uint8_t* next) {
          run_unit(problem, unit, next, few_rows);
        });
  }

  static void run_unit(const ops::MatmulProblem& problem, const MatmulUnit& unit,
                       const uint8_t* next, FetchDistance few_rows) {
    alignas(64) MatmulEpilogue::Sums sums[2][kTokens];
    const int64_t tokens = problem.x.rows;
    for (int64_t token = 0; token < tokens;) {
      const int64_t left = tokens - token;
      const int64_t count = left < kTokens ? left : kTokens;
      ops::Int8Row rows[kTokens];
      for (int64_t i = 0; i < count; ++i) rows[i] = ops::int8_row(problem.x, token + i);
      const bool is_last = token + count == tokens;
      // Between the first pass over the weights and the last one they come from cache.
      const FetchDistance distance = token > 0 && !is_last ? FetchDistance{}
                                     : count <= kFewRows   ? few_rows
                                                           : kManyRows;
      for (int part = 0; part < unit.num_parts; ++part) {
        const ops::PackedWeight& weight = unit.parts[part].weight;
        const FetchAhead ahead = fetch_beyond(unit, part, is_last ? next : nullptr, distance);
        with_quantised_format(weight.format, [&]<ops::PackedFormat format>() {
          Int8Dot::dot<format>(weight, 2 * unit.index, groups_of(unit), rows,
                               static_cast<int>(count), ahead, sums[part]);
        });
      }
      MatmulEpilogue::run(problem, unit, token, count, sums[0], sums[1]);
      token += count;
    }
  }
};

#if EFFINFER_LEVEL_AVX512
// Many rows share weights that are unpacked to memory first.
struct AnyRows {
  using ManyRows = PanelMatmul<Int8Panel>;
  static constexpr int64_t kManyRows = 64;

  static void run(const ops::MatmulProblem& problem, Team& team) {
    problem.x.rows < kManyRows ? Int8Matmul::run(problem, team) : ManyRows::run(problem, team);
  }
  static size_t scratch_bytes(const ops::MatmulProblem& problem) {
    return problem.x.rows < kManyRows ? 0 : ManyRows::scratch_bytes(problem);
  }
};
constexpr Int8Kernel kInt8Kernel = {AnyRows::run, AnyRows::scratch_bytes};
#else
constexpr Int8Kernel kInt8Kernel = {Int8Matmul::run};
#endif

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
const Int8Kernel& kernels<Level::EFFINFER_LEVEL>() {
  return EFFINFER_LEVEL::kInt8Kernel;
}

}  // namespace effinfer::cpu
