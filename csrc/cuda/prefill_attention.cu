#include "cuda/bodies/prefill_tile.h"
#include "cuda/entry.h"
#include "cuda/prefill_attention.h"

namespace effinfer::cuda {
namespace {

using ops::AttentionProblem;

constexpr int kLongWarps = ops::kGpuLongTileRows / kTileRows;
constexpr int kWideWarps = ops::kGpuWideTileRows / kTileRows;

template <DType kType, class Visit>
auto with_columns(const AttentionProblem& p, Visit&& visit) {
  if (p.k.dims <= 64) return visit.template operator()<PrefillKernel<kType, 2, kLongWarps, 4>>();
  if (p.k.dims <= 96) return visit.template operator()<PrefillKernel<kType, 3, kLongWarps, 4>>();
  if (p.k.dims <= 128) return visit.template operator()<PrefillKernel<kType, 4, kLongWarps, 4>>();
  return visit.template operator()<PrefillKernel<kType, 8, kWideWarps, 2>>();
}

// visit.operator()<Kernel>() with the kernel of the problem's pages.
template <class Visit>
auto with_kernel(const AttentionProblem& p, Visit&& visit) {
  switch (p.k.dtype) {
    case DType::f16:
      return with_columns<DType::f16>(p, visit);
    case DType::i8:
      return with_columns<DType::i8>(p, visit);
    default:
      return with_columns<DType::bf16>(p, visit);
  }
}

}  // namespace

size_t prefill_shared_bytes(const AttentionProblem& p) {
  return with_kernel(p, [&]<class Kernel>() { return sizeof(typename Kernel::Shared); });
}

void launch_prefill(const AttentionParams& params, Queue& queue) {
  const AttentionProblem& p = params.p;
  with_kernel(p, [&]<class Kernel>() { launch<Kernel>(params, p.work.num_long_items, queue); });
}

}  // namespace effinfer::cuda
