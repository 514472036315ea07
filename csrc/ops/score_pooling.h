// Scores of keys smoothed, and reduced to blocks and to groups of heads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "effinfer/ops/attention_scores.h"
#include "ops/cost.h"

namespace effinfer::ops {

// pool_scores() over checked tensors; a sequence and group of heads is one chunk.
struct PoolScoresProblem {
  const float* scores = nullptr;  // [num_groups * options.group, starts[num_sequences]]
  int64_t num_groups = 0;
  int64_t num_sequences = 0;
  const int64_t* starts = nullptr;  // [num_sequences + 1] in keys
  const int64_t* blocks = nullptr;  // [num_sequences + 1] in blocks of keys
  int64_t num_keys = 0;             // on GPUs: starts[num_sequences]
  int64_t num_blocks = 0;           // on GPUs: blocks[num_sequences]
  ScorePool options;
  float* out = nullptr;  // [num_groups, blocks[num_sequences]]
};

std::string describe(const PoolScoresProblem& problem);
Cost cost(const PoolScoresProblem& problem);
size_t scratch_bytes(const PoolScoresProblem& problem);  // a sequence's sums, smoothed and not

}  // namespace effinfer::ops
