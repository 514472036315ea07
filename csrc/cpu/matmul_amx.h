// How the AMX matmul cuts its work (vectors/matmul_amx.h says why and what runs). Portable:
// the table of variants asks for the scratch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/matmul_units.h"
#include "ops/matmul.h"

namespace effinfer::cpu {

// The CPUs that have AMX have 2 MB of L2 a core. Two panels of 32 outputs x kAmxStretch (256 KB
// each) and the operand of a block of tokens (1 MB) leave room for the packed weights and the sums.
inline constexpr int64_t kAmxStretch = 4096;
inline constexpr int64_t kAmxOperandBytes = int64_t{1} << 20;
inline constexpr int64_t kAmxMinBlock = 128;  // tokens: with fewer, dequantising costs most
inline constexpr int64_t kAmxMaxBlock = 512;  // 64 KB of sums
inline constexpr int64_t kAmxPairRows = 32;   // tokens of two tiles
// Units of a chunk where K is cut: they share a stretch of the operand while it is in L2.
inline constexpr int64_t kAmxBatch = 8;

struct AmxPlan {
  int64_t tokens;
  int64_t tile_rows;  // 16, or all tokens if fewer
  int64_t cols;       // padded
  int64_t stretch;    // of k, a multiple of 64
  int64_t block;      // tokens of a chunk, a multiple of 32
  int64_t blocks;
  int64_t units;
  int64_t batch;  // units of a chunk
  int64_t unit_chunks;

  int64_t chunks() const { return unit_chunks * blocks; }
  int64_t panel_bytes() const { return kUnitOutputs * stretch * 2; }
};

[[gnu::always_inline]] inline AmxPlan amx_plan(const ops::MatmulProblem& problem, int64_t team) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  AmxPlan plan;
  plan.tokens = problem.x.rows;
  plan.tile_rows = plan.tokens < 16 ? plan.tokens : 16;
  plan.cols = ops::padded_cols(problem.x.cols);
  const int64_t stretches = ceil_div(plan.cols, kAmxStretch);
  plan.stretch = ceil_div(plan.cols, stretches * 64) * 64;
  plan.units = count_units(problem);
  plan.batch = stretches > 1 ? kAmxBatch : 1;

  const int64_t fitting = kAmxOperandBytes / (2 * plan.stretch);
  int64_t most = fitting < kAmxMinBlock ? kAmxMinBlock : fitting;
  most = most > kAmxMaxBlock ? kAmxMaxBlock : most;
  plan.blocks = ceil_div(plan.tokens, most);
  // Too few chunks for the team: first smaller ones, then fewer tokens in each.
  while (plan.batch > 1 && ceil_div(plan.units, plan.batch) * plan.blocks < 4 * team) {
    plan.batch /= 2;
  }
  plan.unit_chunks = ceil_div(plan.units, plan.batch);
  while (plan.chunks() < 4 * team && plan.tokens >= 2 * plan.blocks * kAmxMinBlock) {
    plan.blocks *= 2;
  }
  plan.block = ceil_div(plan.tokens, plan.blocks * kAmxPairRows) * kAmxPairRows;
  plan.blocks = ceil_div(plan.tokens, plan.block);
  return plan;
}

// Scratch of a member: two panels, then the sums of a chunk. Enough for any team.
[[gnu::always_inline]] inline size_t amx_scratch_bytes(const ops::MatmulProblem& problem) {
  const AmxPlan plan = amx_plan(problem, 1);
  const int64_t rows = plan.tokens < kAmxMaxBlock
                           ? (plan.tokens + kAmxPairRows - 1) / kAmxPairRows * kAmxPairRows
                           : kAmxMaxBlock;
  const int64_t batch = plan.cols > kAmxStretch ? kAmxBatch : 1;
  const int64_t parts = problem.glu == ops::UnaryOp::none ? 1 : 2;
  return static_cast<size_t>(2 * plan.panel_bytes() + batch * parts * rows * kUnitOutputs * 4);
}

}  // namespace effinfer::cpu
