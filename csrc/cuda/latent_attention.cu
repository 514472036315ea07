#include "cuda/bodies/latent_attention.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

using ops::AttentionProblem;

bool same_rows(const ops::KvRows& a, const ops::KvRows& b) {
  return a.data == b.data && a.dims == b.dims && a.page_stride == b.page_stride &&
         a.token_stride == b.token_stride && a.head_stride == b.head_stride;
}

const char* rejects_rows(const AttentionProblem& p) {
  const DType dtype = p.k.dtype;
  if (p.q.dtype != DType::bf16 && p.q.dtype != DType::f16) return "queries are not f16 or bf16";
  if (p.q_rope.dtype != p.q.dtype || p.k_rope.dtype != dtype) return "parts differ in dtype";
  if (dtype != p.q.dtype && !is_narrow(dtype)) {
    return "keys are not of the queries' dtype or of 8 bits";
  }
  if (p.k.dims <= 0 || p.k.dims > kLatentDims || p.k.dims % 16 != 0) {
    return "the latent part is not a multiple of 16 dims up to 512";
  }
  if (p.k_rope.dims > kLatentRopeDims || p.k_rope.dims % 8 != 0) {
    return "the rotated part is not a multiple of 8 dims up to 64";
  }
  if (is_narrow(dtype) && p.k_rope.dims % 16 != 0) {
    return "a rotated part of 8 bits is no multiple of 16 dims";
  }
  if (p.k.scales != nullptr || p.v.scales != nullptr || p.k_rope.scales != nullptr) {
    return "no scales of tokens";
  }
  return nullptr;
}

const char* rejects_latent(const AttentionProblem& p) {
  if (p.source != ops::KeySource::rows) return "keys are pages of the engine";
  if (p.k_rope.dims <= 0) return "keys have no rotated part: see plain_attention";
  if (!same_rows(p.k, p.v)) return "values are not the latent part of the keys";
  if (p.num_kv_heads <= 0 || p.num_qo_heads <= 0 || p.num_qo_heads % p.num_kv_heads != 0) {
    return "heads is not a multiple of kv_heads";
  }
  if (p.work.tile_rows > kLatentRows) return "tiles have more than 32 rows";
  if (p.out_operand.cols > 0 || p.visits.list_words > 0) return "no operands, no visits";
  return rejects_rows(p);
}

size_t latent_shared_bytes(const AttentionProblem&) {
  return sizeof(LatentShared);
}

void launch_latent(const AttentionProblem& p, Queue& queue) {
  if (p.q.dtype == DType::f16) {
    launch<LatentAttentionKernel<DType::f16>>(p, p.work.num_items, queue);
  } else {
    launch<LatentAttentionKernel<DType::bf16>>(p, p.work.num_items, queue);
  }
}

}  // namespace

void register_latent_attention() {
  add<AttentionProblem>("latent_attention", rejects_latent, launch_latent, latent_shared_bytes);
}

}  // namespace effinfer::cuda
