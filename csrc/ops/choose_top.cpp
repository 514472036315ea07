#include "ops/choose_top.h"

#include <algorithm>
#include <numeric>

#include "ops/top_list.h"

namespace effinfer::ops {

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
  std::sort(order, end, before);
  double all = 0.0;
  for (const int32_t* i = order; i < end; ++i) all += scores[*i];
  double sum = 0.0;
  int64_t kept = 0;
  while (kept < count && !(sum >= top.mass * all)) sum += scores[order[kept++]];
  return kept;
}

}  // namespace effinfer::ops
