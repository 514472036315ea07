#include <algorithm>

#include "cuda/bodies/hash_index.h"
#include "cuda/entry.h"
#include "cuda/index_launch.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

using ops::HashIndexProblem;

const char* rejects(const HashIndexProblem& p) {
  if (const char* reason = rejects_page_keys(p.kv, p.tables.group)) return reason;
  if (p.tables.planes() > HashIndexKernel::kMostPlanes) {
    return "heads that share keys x tables x bits are above 16384";
  }
  return nullptr;
}

size_t shared_bytes(const HashIndexProblem&) {
  return std::max(sizeof(HashCodesKernel::Shared), sizeof(HashIndexKernel::Shared));
}

void hash_index(const HashIndexProblem& p, Queue& queue) {
  const int64_t lists = p.visits.num_rows * p.kv.num_kv_heads;
  const auto put = [&]<class Kernel>() {
    const int64_t parts = blocks_for(p.visits.list_words, Kernel::kPages);
    launch<Kernel>({p, static_cast<int64_t>(p.kv.head_bytes()), static_cast<int32_t>(parts)},
                   lists * parts, queue);
  };
  put.template operator()<HashCodesKernel>();
  put.template operator()<HashIndexKernel>();
}

}  // namespace

void register_hash_index() {
  add<HashIndexProblem>("hash_index", rejects, hash_index, shared_bytes);
}

}  // namespace effinfer::cuda
