#include "ops/history_index.h"

namespace effinfer::ops {

std::string describe(const HistoryIndexProblem& p) {
  return "[history_index] every=" + std::to_string(p.every) +
         " plane=" + std::string(p.pages.planes.name) +
         describe(p.pages).substr(std::string_view("[page_index]").size());
}

// Of rows that visit what they choose: their history, and the keys of as many pages.
Cost cost(const HistoryIndexProblem& p) {
  Cost cost;
  const VisitPlan& visits = p.pages.visits;
  for (int64_t i = 0; i < visits.num_rows; ++i) {
    const VisitBlock& row = visits.blocks[visits.num_blocks + i];
    if (visits_all(p.pages, row)) continue;
    const int64_t pages = candidates_of(p.pages, row).count();
    const int64_t keys = chosen_units(p.pages, pages) * kPageSize * p.pages.kv.head_dim;
    cost.bytes += (pages * kHistoryRows * static_cast<int64_t>(sizeof(float)) +
                   keys * dtype_info(p.pages.kv.dtype).block_bytes) *
                  p.pages.kv.num_kv_heads;
    cost.ops +=
        2 * (pages * kHistoryFilter * p.pages.kv.num_kv_heads + keys * p.pages.num_qo_heads);
  }
  return cost;
}

}  // namespace effinfer::ops
