#include "cuda/bodies/row_top.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

const char* rejects_top(const ops::RowSamplingProblem& p) {
  if (p.result != ops::RowResult::top) return "the result is not top-k: see row_sampling";
  if (p.dtype != DType::f32 || p.out_dtype != DType::f32) return "rows are not float32";
  if (p.vocab > 1 << 24) return "vocab is above 2^24";
  if (p.indices != nullptr || p.narrow_indices != nullptr) return "no indices of rows";
  if (p.sorted && p.top_k.value > RowList::kMost) return "at most 4096 are sorted";
  return nullptr;
}

void row_top(const ops::RowSamplingProblem& p, Queue& queue) {
  launch<RowTop>({p, vectored(p.x, p.vocab, sizeof(float))}, p.rows, queue);
}

}  // namespace

void register_row_top() {
  add<ops::RowSamplingProblem>("row_top", rejects_top, row_top);
}

}  // namespace effinfer::cuda
