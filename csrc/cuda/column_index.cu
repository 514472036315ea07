#include <algorithm>

#include "cuda/bodies/column_index.h"
#include "cuda/bodies/column_scores.h"
#include "cuda/entry.h"
#include "cuda/index_launch.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

using ops::ColumnIndexProblem;

const char* rejects(const ColumnIndexProblem& p) {
  if (const char* reason = rejects_index_keys(p.in)) return reason;
  if (p.in.kv.head_dim > kMostColumnSteps * 16) return "head_dim is above 256";
  return nullptr;
}

size_t shared_bytes(const ColumnIndexProblem& p) {
  return with_index_keys(p.in.kv.dtype, [&]<DType kType>() {
    return std::max(sizeof(typename ColumnScoresKernel<kType>::Shared),
                    sizeof(typename ColumnChoiceKernel::Shared));
  });
}

// Rows that a sequence may ask for: how many it has in the step only the device knows.
int64_t most_asked(const ColumnIndexProblem& p) {
  const int64_t rows = p.in.batch.num_tokens;
  if (p.row_stride > 0) return (rows + p.row_stride - 1) / p.row_stride;
  return std::min<int64_t>(rows, p.last_rows);
}

// As many sequences at a time as there is memory for. A tile's rows are added to what those before
// it left, in the order of the queue.
void column_index(const ColumnIndexProblem& p, Queue& queue) {
  const ops::VisitPlan& visits = p.in.visits;
  ColumnParams params = {p, static_cast<int64_t>(p.in.kv.head_bytes()),
                         ops::ColumnScratch::of(visits.list_words), 0, 0};
  const int64_t lists = visits.num_blocks * p.in.kv.num_kv_heads;
  if (!ops::chooses_any(p.columns) && !ops::chooses_any(p.slashes)) {
    return launch<ColumnListsKernel>(params, lists, queue);
  }
  for (; params.first < visits.num_sequences; params.first += visits.score_sequences) {
    const int64_t count = std::min(visits.score_sequences, visits.num_sequences - params.first);
    const int64_t heads = count * p.in.num_qo_heads;
    with_index_keys(p.in.kv.dtype, [&]<DType kType>() {
      for (params.tile = 0; params.tile * ops::kColumnRows < most_asked(p); ++params.tile) {
        launch<ColumnSumsKernel<kType>>(params, heads * params.scratch.parts, queue);
        launch<ColumnScoresKernel<kType>>(params, heads * params.scratch.parts, queue);
      }
    });
    launch<ColumnChoiceKernel>(params, 2 * heads, queue);
    launch<ColumnListsKernel>(params, lists, queue);
  }
}

}  // namespace

void register_column_index() {
  add<ColumnIndexProblem>("column_index", rejects, column_index, shared_bytes);
}

}  // namespace effinfer::cuda
