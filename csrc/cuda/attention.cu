#include <algorithm>

#include "cuda/bodies/attention_kernel.h"
#include "cuda/bodies/attention_merge.h"
#include "cuda/decode_pages.h"
#include "cuda/entry.h"
#include "cuda/prefill_attention.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

using ops::Arithmetic;
using ops::AttentionProblem;

const char* rejects_keys(const AttentionProblem& p) {
  if (p.source != ops::KeySource::pages) return "keys are rows, not pages";
  if (p.page_size != ops::kPageSize) return "pages are not of 64 tokens";
  const DType dtype = p.k.dtype;
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::i8) {
    return "kv_dtype is not f32, f16, bf16 or i8";
  }
  if (p.v.dtype != dtype) return "keys and values are of two dtypes";
  if (p.k.dims <= 0 || p.k.dims > 256 || p.k.dims % 16 != 0) {
    return "head_dim is not a multiple of 16 up to 256";
  }
  if (p.v.dims != p.k.dims) return "keys and values have other dims";
  if (p.q_rope.dims > 0 || p.k_rope.dims > 0) return "no dims beside q and k";
  if (p.mask != nullptr) return "no masks";
  return nullptr;
}

const char* rejects_all(const AttentionProblem& p) {
  if (p.num_kv_heads <= 0 || p.num_qo_heads <= 0 || p.num_qo_heads % p.num_kv_heads != 0) {
    return "heads is not a multiple of kv_heads";
  }
  if (const char* reason = rejects_keys(p)) return reason;
  if (p.append.k != nullptr) return "appends no keys";
  if (p.q.dtype != DType::f32 && p.q.dtype != DType::f16 && p.q.dtype != DType::bf16) {
    return "queries are not f32, f16 or bf16";
  }
  if (p.work.tile_rows > kTileRows) return "tiles have more than 16 rows";
  // Of f32 pages products are float32. Those of other pages are of rounded queries and weights,
  // also where float32 is wanted.
  if (p.arithmetic != Arithmetic::f32 &&
      (p.arithmetic != Arithmetic::bf16 || p.k.dtype == DType::f32)) {
    return "multiplies in f32, or in bf16 keys of 16 bits or 8";
  }
  const Arithmetic operand = p.out_operand.arithmetic;
  if (p.out_operand.cols > 0 && operand != Arithmetic::f32 && operand != Arithmetic::bf16) {
    return "the operand is not f32 or bf16";
  }
  return nullptr;
}

const char* rejects(const AttentionProblem& p) {
  if (p.own_sums || p.work.only_long) return "has decoding's bits";
  if (const char* reason = rejects_all(p)) return reason;
  return rejects_long_tiles(p);
}
const char* rejects_own_sums(const AttentionProblem& p) {
  if (!p.own_sums || !p.work.only_long) return "has bits of its own, for prompts alone";
  if (p.visits.has_weights() || p.weighs_keys()) return "keys count once";
  if (p.chunk > 0) return "keys are in no chunks";
  if (const char* reason = rejects_all(p)) return reason;
  return rejects_wgmma(p);
}

template <DType kType, class Visit>
auto with_warps(const AttentionProblem& p, Visit&& visit) {
  if (p.k.dims <= 64) return visit.template operator()<AttentionKernel<kType, 2>>();
  if (p.k.dims <= 128) return visit.template operator()<AttentionKernel<kType, 4>>();
  return visit.template operator()<AttentionKernel<kType, 8>>();
}

// visit.operator()<Kernel>() with the kernel of the problem's pages.
template <class Visit>
auto with_kernel(const AttentionProblem& p, Visit&& visit) {
  switch (p.k.dtype) {
    case DType::f32:
      return with_warps<DType::f32>(p, visit);
    case DType::f16:
      return with_warps<DType::f16>(p, visit);
    case DType::bf16:
      return with_warps<DType::bf16>(p, visit);
    default:
      return with_warps<DType::i8>(p, visit);
  }
}

size_t shared_bytes(const AttentionProblem& p) {
  const size_t bytes =
      with_kernel(p, [&]<class Kernel>() { return sizeof(typename Kernel::Shared); });
  if (p.own_sums) return std::max(bytes, wgmma_shared_bytes(p));
  return p.work.long_rows > 0 ? std::max(bytes, prefill_shared_bytes(p)) : bytes;
}

// Where each block has a multiprocessor for itself, all of a chunk is asked for at once.
template <class Kernel>
void launch_items(AttentionParams& params, int64_t items, Queue& queue) {
  if (!Kernel::kTakesPages || !has_bulk_copies(queue)) return launch<Kernel>(params, items, queue);
  const int dims = static_cast<int>(params.p.k.dims);
  const auto most = static_cast<size_t>(shared_bytes_of(queue));
  const bool alone = items <= num_multiprocessors(queue);
  params.value_places = alone && Kernel::page_bytes(dims, 4) <= most ? 4 : 2;
  launch<Kernel>(params, items, queue, Kernel::page_bytes(dims, params.value_places));
}

void launch_attention(const AttentionProblem& p, Queue& queue) {
  AttentionParams params = {p, 0, 0, 0};
  if (p.out_operand.data != nullptr) {
    params.operand_row_bytes = p.out_operand.row_bytes();
    params.operand_cols = static_cast<int32_t>(ops::padded_cols(p.out_operand.cols));
  }
  launch_decode_pages(p, queue);
  if (p.work.num_long_items > 0) {
    p.own_sums ? launch_wgmma(params, queue) : launch_prefill(params, queue);
    params.p.work.items += p.work.num_long_items;
  }
  const int64_t left = p.work.num_items - p.work.num_long_items;
  with_kernel(p, [&]<class Kernel>() { launch_items<Kernel>(params, left, queue); });
  // Elsewhere those of long items have been merged.
  if (left == 0 && !p.own_sums) return;
  const int rows = p.own_sums ? p.work.long_rows : kTileRows;
  launch<AttentionMergeKernel>(params, p.work.num_merges * rows, queue);
}

}  // namespace

void register_attention() {
  add<AttentionProblem>("attention", rejects, launch_attention, shared_bytes);
  ops::mutable_table<AttentionProblem>().add({"attention.cuda.wgmma", Isa::portable,
                                              rejects_own_sums, nullptr, nullptr, DeviceKind::cuda,
                                              launch_attention, kWgmmaArch, shared_bytes});
}

}  // namespace effinfer::cuda
