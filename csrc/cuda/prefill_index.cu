#include "cuda/bodies/block_index.h"
#include "cuda/entry.h"
#include "cuda/index_launch.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

using ops::BlockIndexProblem;

const char* rejects_blocks(const BlockIndexProblem& p) {
  using Kernel = BlockIndexKernel<DType::bf16>;
  if (const char* reason = rejects_index_keys(p.in)) return reason;
  const int64_t places = p.stride == 0 ? 1 : p.stride;
  if (places * p.in.kv.head_dim > Kernel::kMostSteps * 16) return "stride x head_dim is above 2048";
  const int64_t group = p.in.num_qo_heads / p.in.kv.num_kv_heads;
  if (p.probe && group * p.in.kv.head_dim > Kernel::kMostProbe) {
    return "heads that share keys x head_dim are above 8192";
  }
  const int64_t heads = std::min<int64_t>(group, p.stride == 0 ? kTileRows : p.stride / 4);
  const int64_t pages = (p.in.max_kv_len + ops::kPageSize - 1) / ops::kPageSize;
  if (heads * pages > Kernel::kMostScores || pages > RowList::kMost) {
    return "heads that share keys x pages are above 12288";
  }
  return nullptr;
}

size_t block_bytes(const BlockIndexProblem& p) {
  return with_index_keys(p.in.kv.dtype, [&]<DType kType>() {
    return sizeof(typename BlockIndexKernel<kType>::Shared);
  });
}

void block_index(const BlockIndexProblem& p, Queue& queue) {
  with_index_keys(p.in.kv.dtype, [&]<DType kType>() {
    launch<BlockIndexKernel<kType>>({p, static_cast<int64_t>(p.in.kv.head_bytes())},
                                    p.in.visits.num_blocks * p.in.kv.num_kv_heads, queue);
  });
}

}  // namespace

void register_prefill_index() {
  add<BlockIndexProblem>("block_index", rejects_blocks, block_index, block_bytes);
}

}  // namespace effinfer::cuda
