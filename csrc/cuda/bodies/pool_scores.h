// Scores of keys smoothed, and reduced to blocks and to groups of heads (ops/score_pooling.h): a
// thread a block of keys.
#pragma once

#include <cstdint>

#include "cuda/unit.h"
#include "ops/score_pooling.h"

namespace effinfer::cuda {

struct PoolScoresKernel {
  static constexpr const char* kName = "pool_scores";
  static constexpr int kThreads = 128;
  using Params = ops::PoolScoresProblem;
  struct Shared {};

  // Of threads, for a group of heads.
  static constexpr int32_t blocks_of(int64_t num_blocks) {
    return static_cast<int32_t>((num_blocks + kThreads - 1) / kThreads);
  }

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    // 32 bits: a division of 64 is a call, which spills.
    const int32_t per_group = blocks_of(p.num_blocks);
    const int64_t group = unit.block / per_group;
    const int64_t block = int64_t{unit.block % per_group} * kThreads + unit.thread;
    if (block >= p.num_blocks) return;
    // The last sequence whose blocks start at or before it; those that end there are empty.
    int64_t low = 0;
    int64_t high = p.num_sequences;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (unit.load(p.blocks + middle) <= block) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int64_t start = unit.load(p.starts + low);
    const int64_t length = unit.load(p.starts + low + 1) - start;
    const int64_t first = (block - unit.load(p.blocks + low)) * p.options.block_size;
    const int64_t rest = length - first;
    const int64_t count = rest < p.options.block_size ? rest : p.options.block_size;
    const float* scores = p.scores + group * p.options.group * p.num_keys + start;
    float result = 0.0f;
    for (int64_t key = first; key < first + count; ++key) {
      const float x = smoothed(unit, p, scores, length, key);
      const bool greatest = p.options.block_reduce == ops::BlockReduce::max;
      result = !greatest ? result + x : x > result ? x : result;
    }
    if (p.options.block_reduce == ops::BlockReduce::mean) result /= static_cast<float>(count);
    p.out[group * p.num_blocks + block] = result;
  }

 private:
  // Scores are none of them negative, so that zeros are no maximum.
  template <class Unit>
  EFFINFER_DEVICE static float smoothed(Unit& unit, const Params& p, const float* scores,
                                        int64_t length, int64_t key) {
    const bool none = p.options.pooling == ops::ScorePooling::none;
    const int64_t half = none ? 0 : p.options.kernel_size / 2;
    const int64_t begin = key - half < 0 ? 0 : key - half;
    const int64_t end = key + half + 1 < length ? key + half + 1 : length;
    float result = 0.0f;
    for (int64_t at = begin; at < end; ++at) {
      float sum = 0.0f;
      for (int32_t head = 0; head < p.options.group; ++head) {
        sum += unit.load(scores + head * p.num_keys + at);
      }
      const bool greatest = p.options.pooling == ops::ScorePooling::max;
      result = !greatest ? result + sum : sum > result ? sum : result;
    }
    const bool average = p.options.pooling == ops::ScorePooling::avg;
    return average ? result / static_cast<float>(p.options.kernel_size) : result;
  }
};

}  // namespace effinfer::cuda
