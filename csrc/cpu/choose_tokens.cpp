#include "cpu/choose_tokens.h"

#include <algorithm>
#include <numeric>

#include "ops/top_list.h"

namespace effinfer::cpu {
namespace {

using ops::order_key;

// Writes the indices of what is chosen of `count` scores to `order`, in no order; returns how many.
// NaNs count as the highest.
int64_t choose_top(const float* scores, int64_t count, const TopScores& top, int32_t* order) {
  int32_t* const end = order + count;
  std::iota(order, end, 0);
  const auto before = [&](int32_t a, int32_t b) {
    const int32_t x = order_key(scores[a]), y = order_key(scores[b]);
    return x != y ? x > y : a < b;
  };
  if (top.mass <= 0.0f) {
    const auto kept = std::min<int64_t>(top.count, count);
    std::nth_element(order, order + kept, end, before);
    return kept;
  }
  const auto sum = [&](int64_t first, int64_t last) {
    double all = 0.0;
    for (int64_t i = first; i < last; ++i) all += scores[order[i]];
    return all;
  };
  const double wanted = top.mass * sum(0, count);
  if (wanted <= 0.0) return 0;
  // The highest `kept` have less than is wanted, the highest `enough` as much. Halving what lies
  // between takes time in proportion to the count, where sorting would not.
  int64_t kept = 0;
  int64_t enough = count;
  double mass = 0.0;
  while (enough - kept > 1) {
    const int64_t middle = kept + (enough - kept) / 2;
    std::nth_element(order + kept, order + middle, order + enough, before);
    const double more = sum(kept, middle);
    if (mass + more >= wanted) {
      enough = middle;
    } else {
      mass += more;
      kept = middle;
    }
  }
  return enough;
}

}  // namespace

void add_always(const AlwaysVisited& always, const ops::VisitBlock& block, TokenSet to) {
  to.add(0, always.sink_tokens);
  const int64_t first = block.position;
  to.add(always.local_tokens > 0 ? first - always.local_tokens + 1 : first, first + block.num_rows);
}

void choose_keys(const float* scores, int64_t count, const TopScores& top, int32_t* order,
                 TokenSet to) {
  const int64_t kept = choose_top(scores, count, top, order);
  for (int64_t i = 0; i < kept; ++i) to.add(order[i]);
}

void choose_distances(const float* scores, int64_t count, DistanceOrder first, const TopScores& top,
                      int32_t* order, TokenSet to) {
  const int64_t kept = choose_top(scores, count, top, order);
  for (int64_t i = 0; i < kept; ++i) {
    to.add(first == DistanceOrder::farthest_first ? count - 1 - order[i] : order[i]);
  }
}

void add_columns(const ChosenColumns& chosen, const ops::VisitBlock& block, TokenSet to) {
  to.add(chosen.keys);
  // Farther ones lead to before the first key.
  chosen.distances.first_words(to.num_words()).for_tokens([&](int64_t distance) {
    const int64_t begin = block.position - distance;
    to.add(begin, begin + block.num_rows);
  });
}

void add_blocks(const float* scores, int64_t count, const TopScores& top, int64_t size,
                int32_t* order, TokenSet to) {
  const int64_t kept = choose_top(scores, count, top, order);
  for (int64_t i = 0; i < kept; ++i) to.add(order[i] * size, (order[i] + 1) * size);
}

}  // namespace effinfer::cpu
