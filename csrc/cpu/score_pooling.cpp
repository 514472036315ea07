// Sums, smoothing and blocks of a sequence's scores: a few operations for each, which wider vectors
// would add up in another order.
#include "ops/score_pooling.h"

#include <algorithm>

#include "cpu/level.h"

namespace effinfer::cpu {
namespace {

using ops::BlockReduce;
using ops::PoolScoresProblem;
using ops::ScorePool;
using ops::ScorePooling;

// Zeros outside: scores are none of them negative, so they are no maximum either.
void smooth(const ScorePool& options, const float* from, int64_t count, float* to) {
  const int64_t half = options.kernel_size / 2;
  for (int64_t i = 0; i < count; ++i) {
    const float* begin = from + std::max<int64_t>(0, i - half);
    const float* end = from + std::min(count, i + half + 1);
    if (options.pooling == ScorePooling::max) {
      to[i] = *std::max_element(begin, end);
    } else {
      float sum = 0.0f;
      for (const float* at = begin; at != end; ++at) sum += *at;
      to[i] = sum / static_cast<float>(options.kernel_size);
    }
  }
}

float reduce(BlockReduce how, const float* values, int64_t count) {
  if (how == BlockReduce::max) return *std::max_element(values, values + count);
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += values[i];
  return how == BlockReduce::sum ? sum : sum / static_cast<float>(count);
}

// `sums` has room for the sequence's scores twice.
void pool_sequence(const ScorePool& options, const float* scores, int64_t head_stride,
                   int64_t length, float* sums, float* out) {
  std::copy_n(scores, length, sums);
  for (int32_t head = 1; head < options.group; ++head) {
    const float* more = scores + head * head_stride;
    for (int64_t i = 0; i < length; ++i) sums[i] += more[i];
  }
  if (options.pooling != ScorePooling::none && options.kernel_size > 1) {
    smooth(options, sums, length, sums + length);
    sums += length;
  }
  for (int64_t begin = 0; begin < length; begin += options.block_size) {
    const int64_t count = std::min<int64_t>(options.block_size, length - begin);
    *out++ = reduce(options.block_reduce, sums + begin, count);
  }
}

}  // namespace

template <>
void run<Level::portable>(const PoolScoresProblem& p, Team& team) {
  auto* sums = static_cast<float*>(team.scratch());
  const int64_t keys = p.starts[p.num_sequences];
  const int64_t blocks = p.blocks[p.num_sequences];
  team.for_chunks(p.num_groups * p.num_sequences, [&](int64_t task) {
    const int64_t s = task % p.num_sequences;
    const int64_t group = task / p.num_sequences;
    pool_sequence(p.options, p.scores + group * p.options.group * keys + p.starts[s], keys,
                  p.starts[s + 1] - p.starts[s], sums, p.out + group * blocks + p.blocks[s]);
  });
}

}  // namespace effinfer::cpu
