#include "cuda/bodies/caller_index.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {

void register_caller_index() {
  add<ops::PoolRowsProblem>("pool_rows", ops::rejects,
                            [](const ops::PoolRowsProblem& p, Queue& queue) {
                              launch<PoolRowsKernel>(p, p.num_groups, queue);
                            });
  add<ops::PageBoundsProblem>("page_bounds", ops::rejects,
                              [](const ops::PageBoundsProblem& p, Queue& queue) {
                                launch<CallerBoundsKernel>(p, p.num_pages, queue);
                              });
  add<ops::PageScoresProblem>("page_scores", takes_all,
                              [](const ops::PageScoresProblem& p, Queue& queue) {
                                launch<PageScoresKernel>(p, p.num_pages, queue);
                              });
}

}  // namespace effinfer::cuda
