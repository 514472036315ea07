#include "ops/score_pooling.h"

#include <algorithm>
#include <string>
#include <vector>

#include "ops/describe.h"
#include "ops/registry.h"
#include "ops/scores_there.h"
#include "ops/validate.h"

namespace effinfer::ops {

std::string describe(const PoolScoresProblem& problem) {
  return "[pool_scores]" + field("groups", problem.num_groups) +
         field("group", problem.options.group) +
         field("keys", problem.starts[problem.num_sequences]) +
         field("kernel_size", problem.options.kernel_size) +
         field("block_size", problem.options.block_size);
}

Cost cost(const PoolScoresProblem& problem) {
  const int64_t keys = problem.num_groups * problem.starts[problem.num_sequences];
  const int64_t blocks = problem.num_groups * problem.blocks[problem.num_sequences];
  const int64_t group = problem.options.group;
  return {4 * (keys * group + blocks), keys * (group + problem.options.kernel_size)};
}

size_t scratch_bytes(const PoolScoresProblem& problem) {
  int64_t longest = 0;
  for (int64_t s = 0; s < problem.num_sequences; ++s) {
    longest = std::max(longest, problem.starts[s + 1] - problem.starts[s]);
  }
  return static_cast<size_t>(longest) * 2 * sizeof(float);
}

void pool_scores(const TensorView& scores, const TensorView& kv_len, const ScorePool& options,
                 float* out, const Executor& executor) {
  const Validator check("pooled_attention_scores", executor.device());
  const std::span<const int32_t> lengths =
      Validator("pooled_attention_scores").ints("kv_len", kv_len);
  check.expect(options.kernel_size > 0 && options.kernel_size % 2 == 1, "kernel_size",
               "an odd number > 0", std::to_string(options.kernel_size));
  check.positive("block_size", options.block_size);
  std::vector<int64_t> starts = {0};
  std::vector<int64_t> blocks = {0};
  for (const int64_t length : lengths) {
    check.expect(length >= 0, "kv_len", "no negative length", std::to_string(length));
    starts.push_back(starts.back() + length);
    blocks.push_back(blocks.back() + (length + options.block_size - 1) / options.block_size);
  }
  check.dtype("scores", scores, DType::f32);
  check.rank("scores", scores, 2);
  const int64_t heads = scores.dims[0];
  check.shape("scores", scores, {heads, starts.back()});
  check.expect(options.group > 0 && heads % options.group == 0, "group",
               "a divisor of " + std::to_string(heads) + " heads", std::to_string(options.group));
  PoolScoresProblem problem;
  problem.scores = static_cast<const float*>(scores.data);
  problem.num_groups = heads / options.group;
  problem.num_sequences = kv_len.dims[0];
  problem.options = options;
  problem.out = out;
  if (executor.queue() != nullptr) return pool_there(problem, starts, blocks, *executor.queue());
  problem.starts = starts.data();
  problem.blocks = blocks.data();
  run_alone(problem, *executor.pool());
}

}  // namespace effinfer::ops
