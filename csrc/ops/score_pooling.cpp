// Scores of keys smoothed, and reduced to blocks and to groups of heads.
#include <algorithm>
#include <string>
#include <vector>

#include "effinfer/ops/attention_scores.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

// Zeros outside: scores are none of them negative, so they are no maximum either.
void smooth(const ScorePool& options, const std::vector<float>& from, std::vector<float>& to) {
  const auto count = static_cast<int64_t>(from.size());
  const int64_t half = options.kernel_size / 2;
  for (int64_t i = 0; i < count; ++i) {
    const auto begin = from.begin() + std::max<int64_t>(0, i - half);
    const auto end = from.begin() + std::min(count, i + half + 1);
    float& x = to[static_cast<size_t>(i)];
    if (options.pooling == ScorePooling::max) {
      x = *std::max_element(begin, end);
    } else {
      x = 0.0f;
      for (auto at = begin; at != end; ++at) x += *at;
      x /= static_cast<float>(options.kernel_size);
    }
  }
}

float reduce(BlockReduce how, const float* values, int64_t count) {
  if (how == BlockReduce::max) return *std::max_element(values, values + count);
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += values[i];
  return how == BlockReduce::sum ? sum : sum / static_cast<float>(count);
}

void pool_sequence(const ScorePool& options, const float* scores, int64_t head_stride,
                   int64_t length, float* out) {
  std::vector<float> sums(scores, scores + length);
  for (int32_t head = 1; head < options.group; ++head) {
    const float* more = scores + head * head_stride;
    for (int64_t i = 0; i < length; ++i) sums[static_cast<size_t>(i)] += more[i];
  }
  if (options.pooling != ScorePooling::none && options.kernel_size > 1) {
    std::vector<float> smoothed(sums.size());
    smooth(options, sums, smoothed);
    sums.swap(smoothed);
  }
  for (int64_t begin = 0; begin < length; begin += options.block_size) {
    const int64_t count = std::min<int64_t>(options.block_size, length - begin);
    *out++ = reduce(options.block_reduce, sums.data() + begin, count);
  }
}

}  // namespace

void pool_scores(const TensorView& scores, const TensorView& kv_len, const ScorePool& options,
                 float* out, ThreadPool& pool) {
  const Validator check("pooled_attention_scores");
  check.dtype("kv_len", kv_len, DType::i32);
  check.rank("kv_len", kv_len, 1);
  const auto* lengths = static_cast<const int32_t*>(kv_len.data);
  check.expect(options.kernel_size > 0 && options.kernel_size % 2 == 1, "kernel_size",
               "an odd number > 0", std::to_string(options.kernel_size));
  check.expect(options.block_size > 0, "block_size", "a positive number",
               std::to_string(options.block_size));
  std::vector<int64_t> starts = {0};
  std::vector<int64_t> blocks = {0};
  for (int64_t s = 0; s < kv_len.dims[0]; ++s) {
    check.expect(lengths[s] >= 0, "kv_len", "no negative length", std::to_string(lengths[s]));
    starts.push_back(starts.back() + lengths[s]);
    blocks.push_back(blocks.back() +
                     (int64_t{lengths[s]} + options.block_size - 1) / options.block_size);
  }
  check.dtype("scores", scores, DType::f32);
  check.rank("scores", scores, 2);
  const int64_t heads = scores.dims[0];
  check.shape("scores", scores, {heads, starts.back()});
  check.expect(options.group > 0 && heads % options.group == 0, "group",
               "a divisor of " + std::to_string(heads) + " heads", std::to_string(options.group));
  const auto* from = static_cast<const float*>(scores.data);
  const int64_t tasks = heads / options.group * kv_len.dims[0];
  pool.parallel([&](Team& team) {
    team.for_chunks(tasks, [&](int64_t task) {
      const auto s = static_cast<size_t>(task % kv_len.dims[0]);
      const int64_t head = task / kv_len.dims[0];
      pool_sequence(options, from + head * options.group * starts.back() + starts[s], starts.back(),
                    starts[s + 1] - starts[s], out + head * blocks.back() + blocks[s]);
    });
  });
}

}  // namespace effinfer::ops
