#include "cuda/bodies/caller_index.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {

void register_caller_index() {
  add<ops::PoolRowsProblem>(
      "pool_rows", ops::rejects, [](const ops::PoolRowsProblem& p, Queue& queue) {
        const int64_t numbers = p.num_groups * p.heads * p.width();
        launch<PoolRowsKernel>(p, blocks_for(numbers, PoolRowsKernel::kThreads), queue);
      });
  add<ops::PageBoundsProblem>(
      "page_bounds", ops::rejects, [](const ops::PageBoundsProblem& p, Queue& queue) {
        const int64_t numbers = p.num_pages * p.num_kv_heads * p.k.dims;
        launch<CallerBoundsKernel>(p, blocks_for(numbers, CallerBoundsKernel::kThreads), queue);
      });
  add<ops::PageScoresProblem>(
      "page_scores", takes_all, [](const ops::PageScoresProblem& p, Queue& queue) {
        const int64_t warps = p.num_pages * p.num_qo_heads;
        launch<PageScoresKernel>(p, blocks_for(warps, PageScoresKernel::kWarps), queue);
      });
}

}  // namespace effinfer::cuda
