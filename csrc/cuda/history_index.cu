#include <algorithm>

#include "cuda/bodies/history_index.h"
#include "cuda/entry.h"
#include "cuda/index_launch.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

using ops::HistoryIndexProblem;

const char* rejects(const HistoryIndexProblem& p) {
  const ops::PageIndexProblem& pages = p.pages;
  if (const char* reason = rejects_page_keys(pages.kv, pages.group())) return reason;
  if (pages.max_kv_len > RowList::kMost * ops::kPageSize) return "pages are above 4096";
  return nullptr;
}

size_t shared_bytes(const HistoryIndexProblem&) {
  return sizeof(HistoryIndexKernel::Shared);
}

// As many sequences at a time as there is memory for what their pages have.
void history_index(const HistoryIndexProblem& p, Queue& queue) {
  const ops::PageIndexProblem& pages = p.pages;
  HistoryIndexParams params = {p, static_cast<int64_t>(pages.kv.head_bytes()), 0, 0};
  const int64_t blocks = pages.batch.num_sequences * pages.kv.num_kv_heads;
  for (; params.first_row < pages.visits.num_rows; params.first_row += params.num_rows) {
    params.num_rows = pages.visits.score_rows;
    launch<HistoryIndexKernel>(params, blocks, queue);
  }
}

}  // namespace

void register_history_index() {
  add<HistoryIndexProblem>("history_index", rejects, history_index, shared_bytes);
}

}  // namespace effinfer::cuda
