#include "executor/top_logits.h"

#include <limits>

namespace effinfer::executor {

void merge_top(ops::TopList* lists, int members, size_t rows, const TopLogits& out) {
  const auto k = static_cast<size_t>(out.k);
  for (size_t row = 0; row < rows; ++row) {
    ops::TopList& all = lists[row];
    for (int member = 1; member < members; ++member) {
      const ops::TopList& list = lists[static_cast<size_t>(member) * rows + row];
      all.nans |= list.nans;
      for (int32_t i = 0; i < list.count; ++i) all.add(list.entries[i], out.k);
    }
    for (size_t i = 0; i < k; ++i) {
      out.values[row * k + i] = all.entries[i].value;
      out.tokens[row * k + i] = all.entries[i].index;
    }
    if (all.nans != 0) out.values[row * k] = std::numeric_limits<float>::quiet_NaN();
  }
}

}  // namespace effinfer::executor
