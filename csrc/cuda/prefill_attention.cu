#include "cuda/bodies/prefill_attention.h"
#include "cuda/entry.h"
#include "cuda/prefill_attention.h"

namespace effinfer::cuda {
namespace {

using ops::AttentionProblem;

constexpr int kWarps = ops::kGpuLongTileRows / kTileRows;
constexpr int kFewWarps = ops::kGpuLeastLongTileRows / kTileRows;

// What decides beside the columns of 32 dims: how many stages a ring has room for in 99 KB, and how
// many columns of results stay in registers, so that none spills.
template <DType kType, class Visit>
auto with_columns(const AttentionProblem& p, Visit&& visit) {
  if (p.k.dims <= 64) return visit.template operator()<PrefillKernel<kType, 2, kWarps, 4, 2>>();
  if (p.k.dims <= 96) return visit.template operator()<PrefillKernel<kType, 3, kWarps, 4, 3>>();
  if (p.k.dims <= 128) return visit.template operator()<PrefillKernel<kType, 4, kWarps, 3, 3>>();
  return visit.template operator()<PrefillKernel<kType, 8, kFewWarps, 2, 2>>();
}

// Of int8 pages, which take room for widened numbers and registers to widen them.
template <int kTileWarps, class Visit>
auto with_columns_of_i8(const AttentionProblem& p, Visit&& visit) {
  constexpr DType kType = DType::i8;
  if (p.k.dims <= 64) return visit.template operator()<PrefillKernel<kType, 2, kTileWarps, 2, 0>>();
  return visit.template operator()<PrefillKernel<kType, 4, kTileWarps, 2, 1>>();
}

// visit.operator()<Kernel>() with the kernel of the problem's pages.
template <class Visit>
auto with_kernel(const AttentionProblem& p, Visit&& visit) {
  if (p.k.dtype == DType::bf16) return with_columns<DType::bf16>(p, visit);
  if (p.k.dtype == DType::f16) return with_columns<DType::f16>(p, visit);
  if (p.k.dims > 128) {
    return visit.template operator()<PrefillKernel<DType::i8, 8, kFewWarps, 2, 1>>();
  }
  if (p.work.long_rows == ops::kGpuLongTileRows) return with_columns_of_i8<kWarps>(p, visit);
  return with_columns_of_i8<kFewWarps>(p, visit);
}

}  // namespace

const char* rejects_long_tiles(const AttentionProblem& p) {
  if (p.work.long_rows == 0) return nullptr;
  if (p.k.dtype == DType::f32) return "long tiles of f32 keys";
  const int rows = with_kernel(p, [&]<class Kernel>() { return Kernel::kRows; });
  return p.work.long_rows == rows ? nullptr : "no such number of rows of long tiles";
}

size_t prefill_shared_bytes(const AttentionProblem& p) {
  return with_kernel(p, [&]<class Kernel>() { return sizeof(typename Kernel::Shared); });
}

void launch_prefill(const AttentionParams& params, Queue& queue) {
  const AttentionProblem& p = params.p;
  with_kernel(p, [&]<class Kernel>() { launch<Kernel>(params, p.work.num_long_items, queue); });
}

}  // namespace effinfer::cuda
