// The network of history_index, and what a row gives pages.
#include "cpu/history_index.h"

#include <algorithm>

#include "cpu/level.h"
#include "cpu/page_index.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/kv.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

using V = KvF32::V;
using ops::kHistoryChannels;
using ops::kHistoryFilter;
using ops::kHistoryRows;
using ops::kPageSize;

static_assert(kHistoryChannels == 16 && kHistoryRows == 32);

// A filter's vector serves as many pages.
constexpr int64_t kPages = 4;

// Adds what neighbour n of N pages gives their hidden channels.
template <int N>
void add_neighbour(const float* filter, const float* history, V (&hidden)[N]) {
  for (int64_t row = 0; row < kHistoryRows; ++row) {
    const V weights = V::load(filter + row * kHistoryChannels);
    for (int64_t i = 0; i < N; ++i) {
      hidden[i] = fma(V::set(history[i * kPageSize + row]), weights, hidden[i]);
    }
  }
}

// Of pages [page, page + N), which have both neighbours or are one page.
template <int N>
void predict_pages(const HistoryTile& tile, int64_t page) {
  const float* const bias = tile.network + kHistoryFilter;
  const float* const out = bias + kHistoryChannels;
  const float* const direct = out + kHistoryChannels;
  V hidden[N];
  for (V& each : hidden) each = V::load(bias);
  for (int64_t n = 0; n < ops::kHistoryPages; ++n) {
    const int64_t from = page + n - 1;
    if (from < 0 || from + N > tile.num_pages) continue;
    add_neighbour<N>(tile.network + n * kHistoryRows * kHistoryChannels,
                     tile.history + from * kPageSize, hidden);
  }
  const V weights = V::load(out);
  for (int64_t i = 0; i < N; ++i) {
    const float* own = tile.history + (page + i) * kPageSize;
    V score = max(hidden[i], V::set(0.0f)) * weights;
    score = fma(V::load(own), V::load(direct), score);
    score = fma(V::load(own + 16), V::load(direct + 16), score);
    tile.scores[page + i - tile.first] = sum(score);
  }
}

void predict(const HistoryTile& tile) {
  int64_t page = tile.first;
  if (page == 0 && page < tile.end) predict_pages<1>(tile, page++);
  for (; page + kPages <= tile.end && page + kPages < tile.num_pages; page += kPages) {
    predict_pages<kPages>(tile, page);
  }
  for (; page < tile.end; ++page) predict_pages<1>(tile, page);
  const int64_t count = tile.end - tile.first;
  std::fill(tile.scores + count, tile.scores + padded_scores(count), kNoScore);
}

void score_pages(const float* logits, int64_t num_pages, int64_t group, float* scores) {
  constexpr float kLog2E = 1.44269504088896340736f;
  const int64_t keys = num_pages * kPageSize;
  std::fill_n(scores, num_pages, 0.0f);
  for (int64_t head = 0; head < group; ++head) {
    const float* own = logits + head * keys;
    V highest = V::set(kNoScore);
    for (int64_t i = 0; i < keys; i += 16) highest = max(highest, V::load(own + i));
    const float most = maximum(highest);
    V sums = V::set(0.0f);
    for (int64_t i = 0; i < keys; i += 16) {
      sums = sums + simd::exp(V::load(own + i) - V::set(most));
    }
    const float all = most + __builtin_logf(sum(sums));
    for (int64_t page = 0; page < num_pages; ++page) {
      V best = V::load(own + page * kPageSize);
      for (int64_t i = 16; i < kPageSize; i += 16) {
        best = max(best, V::load(own + page * kPageSize + i));
      }
      const float score = ops::kLeastLog + (maximum(best) - all) * kLog2E;
      scores[page] = std::max(scores[page], score);
    }
  }
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
const HistoryKernels& kernels<Level::EFFINFER_LEVEL>() {
  static constexpr HistoryKernels kTable = {EFFINFER_LEVEL::predict, EFFINFER_LEVEL::score_pages};
  return kTable;
}

}  // namespace effinfer::cpu
