#include "cuda/bodies/top_rows.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {

void register_top_rows() {
  add<ops::TopRowsProblem>(
      "top_rows", ops::rejects,
      [](const ops::TopRowsProblem& p, Queue& queue) { launch<TopRows>(p, p.rows, queue); });
}

}  // namespace effinfer::cuda
