#include "cuda/bodies/strided_index.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

using ops::StridedIndexProblem;

void strided_index(const StridedIndexProblem& p, Queue& queue) {
  const int64_t lists = (p.visits.num_blocks + p.visits.num_rows) * p.visits.num_kv_heads;
  launch<StridedIndexKernel>(p, lists, queue);
}

}  // namespace

void register_strided_index() {
  add<StridedIndexProblem>("strided_index", takes_all, strided_index);
}

}  // namespace effinfer::cuda
