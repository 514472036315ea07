#include <algorithm>

#include "cuda/bodies/page_bounds.h"
#include "cuda/bodies/page_index.h"
#include "cuda/bodies/unit_keys.h"
#include "cuda/bodies/unit_scores.h"
#include "cuda/entry.h"
#include "cuda/index_launch.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

using ops::PageIndexProblem;

const char* rejects(const PageIndexProblem& p) {
  return rejects_page_keys(p.kv, p.group());
}

size_t shared_bytes(const PageIndexProblem& p) {
  const size_t scores =
      p.has_bounds() ? sizeof(UnitScoresKernel::Shared) : sizeof(UnitKeysKernel::Shared);
  return std::max(scores, sizeof(PageIndexKernel::Shared));
}

template <class Kernel>
void launch_parts(PageIndexParams params, int64_t count, int64_t a_part, Queue& queue) {
  params.parts = static_cast<int32_t>(blocks_for(count, a_part));
  launch<Kernel>(params, params.num_rows * params.problem.kv.num_kv_heads * params.parts, queue);
}

// Of some rows.
void choose(const PageIndexParams& params, Queue& queue) {
  const PageIndexProblem& p = params.problem;
  const int64_t units = p.visits.list_words * (ops::kPageSize / p.summary_unit());
  if (p.has_bounds()) {
    launch_parts<UnitScoresKernel>(params, units, UnitScoresKernel::kUnits, queue);
  } else {
    launch_parts<UnitKeysKernel>(params, units, UnitKeysKernel::kUnits, queue);
  }
  const int64_t lists = p.reuse > 0.0f ? p.batch.num_sequences : params.num_rows;
  launch<PageIndexKernel>(params, lists * p.kv.num_kv_heads, queue);
}

// As many rows at a time as there is memory for their scores.
void page_index(const PageIndexProblem& p, Queue& queue) {
  PageIndexParams params = {p, static_cast<int64_t>(p.kv.head_bytes()), 1, 0, p.visits.num_rows};
  if (p.has_bounds()) {
    launch_parts<PageBoundsKernel>(params, p.visits.list_words, PageBoundsKernel::kBlockPages,
                                   queue);
  }
  for (; params.first_row < p.visits.num_rows; params.first_row += p.visits.score_rows) {
    params.num_rows = std::min(p.visits.score_rows, p.visits.num_rows - params.first_row);
    choose(params, queue);
  }
}

}  // namespace

void register_page_index() {
  add<PageIndexProblem>("page_index", rejects, page_index, shared_bytes);
}

}  // namespace effinfer::cuda
