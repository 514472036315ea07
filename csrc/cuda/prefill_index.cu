#include "cuda/bodies/block_index.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

using ops::BlockIndexProblem;

const char* rejects_keys(const ops::PrefillIndexInputs& in) {
  if (in.kv.dtype != DType::f16 && in.kv.dtype != DType::bf16 && in.kv.dtype != DType::i8) {
    return "keys are not of 16 bits or 8";
  }
  if (in.kv.head_dim <= 0 || in.kv.head_dim % 16 != 0) return "head_dim is not a multiple of 16";
  return nullptr;
}

const char* rejects_blocks(const BlockIndexProblem& p) {
  using Kernel = BlockIndexKernel<DType::bf16>;
  if (const char* reason = rejects_keys(p.in)) return reason;
  const int64_t places = p.stride == 0 ? 1 : p.stride;
  if (places * p.in.kv.head_dim > Kernel::kMostSteps * 16) return "stride x head_dim is above 2048";
  const int64_t group = p.in.num_qo_heads / p.in.kv.num_kv_heads;
  const int64_t heads = std::min<int64_t>(group, p.stride == 0 ? kTileRows : p.stride / 4);
  const int64_t pages = (p.in.max_kv_len + ops::kPageSize - 1) / ops::kPageSize;
  if (heads * pages > Kernel::kMostScores || pages > RowList::kMost) {
    return "heads that share keys x pages are above 12288";
  }
  return nullptr;
}

template <class Visit>
auto with_keys(DType dtype, Visit&& visit) {
  if (dtype == DType::f16) return visit.template operator()<DType::f16>();
  if (dtype == DType::bf16) return visit.template operator()<DType::bf16>();
  return visit.template operator()<DType::i8>();
}

size_t block_bytes(const BlockIndexProblem& p) {
  return with_keys(p.in.kv.dtype,
                   [&]<DType kType>() { return sizeof(typename BlockIndexKernel<kType>::Shared); });
}

void block_index(const BlockIndexProblem& p, Queue& queue) {
  with_keys(p.in.kv.dtype, [&]<DType kType>() {
    launch<BlockIndexKernel<kType>>(IndexParams<BlockIndexProblem>::of(p),
                                    p.in.visits.num_blocks * p.in.kv.num_kv_heads, queue);
  });
}

}  // namespace

void register_prefill_index() {
  add<BlockIndexProblem>("block_index", rejects_blocks, block_index, block_bytes);
}

}  // namespace effinfer::cuda
