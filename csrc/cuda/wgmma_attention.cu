// Attention of prompts in a phase of their own, on Hopper.
#include <algorithm>

#include "cuda/bodies/arrange_pages.h"
#include "cuda/bodies/wgmma_attention.h"
#include "cuda/entry.h"
#include "cuda/prefill_attention.h"

namespace effinfer::cuda {
namespace {

using ops::AttentionProblem;

// visit.operator()<Kernel>() with the kernel of the problem's pages.
template <class Visit>
auto with_kernel(const AttentionProblem& p, Visit&& visit) {
  const bool wide = p.k.dims == 128;
  if (p.k.dtype == DType::f16) {
    if (wide) return visit.template operator()<WgmmaAttention<DType::f16, 4>>();
    return visit.template operator()<WgmmaAttention<DType::f16, 2>>();
  }
  if (wide) return visit.template operator()<WgmmaAttention<DType::bf16, 4>>();
  return visit.template operator()<WgmmaAttention<DType::bf16, 2>>();
}

}  // namespace

const char* rejects_wgmma(const AttentionProblem& p) {
  if (p.k.dtype != DType::f16 && p.k.dtype != DType::bf16) return "pages are not f16 or bf16";
  if (p.k.dims != 64 && p.k.dims != 128) return "head_dim is not 64 or 128";
  const int64_t bytes = p.q.dtype == DType::f32 ? 4 : 2;
  const auto begin = static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.q.data));
  if ((begin | p.q.row_stride * bytes | p.q.head_stride * bytes) % 16 != 0) {
    return "rows of queries are not at multiples of 16 bytes";
  }
  constexpr int kRows = WgmmaAttention<DType::bf16, 4>::kRows;
  return p.work.long_rows == kRows ? nullptr : "tiles of prompts are not of 128 rows";
}

size_t wgmma_shared_bytes(const AttentionProblem& p) {
  return with_kernel(p, [&]<class Kernel>() { return sizeof(typename Kernel::Shared); });
}

void launch_wgmma(const AttentionParams& params, Queue& queue) {
  const AttentionProblem& p = params.p;
  if (p.k.dims == 128) {
    launch<ArrangePages<4>>(p, p.work.num_arranged, queue);
  } else {
    launch<ArrangePages<2>>(p, p.work.num_arranged, queue);
  }
  const auto blocks = std::min<int64_t>(p.work.num_long_items, num_multiprocessors(queue));
  with_kernel(p, [&]<class Kernel>() { launch<Kernel>(params, blocks, queue); });
}

}  // namespace effinfer::cuda
