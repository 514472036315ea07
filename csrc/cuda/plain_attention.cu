#include "cuda/bodies/float_attention.h"
#include "cuda/bodies/plain_attention.h"
#include "cuda/entry.h"
#include "cuda/register.h"
#include "ops/latent_tile.h"
#include "ops/validate.h"

namespace effinfer::cuda {
namespace {

using ops::AttentionProblem;

// What no kernel over a caller's rows does. Without values there are sums of weights alone.
const char* rejects_plain(const AttentionProblem& p) {
  if (p.source != ops::KeySource::rows) return "keys are pages of the engine";
  if (p.num_kv_heads <= 0 || p.num_qo_heads <= 0 || p.num_qo_heads % p.num_kv_heads != 0) {
    return "heads is not a multiple of kv_heads";
  }
  if (p.out_operand.cols > 0 || p.visits.list_words > 0) return "no operands, no visits";
  if (p.v.dtype != p.k.dtype) return "keys and values differ in dtype";
  return nullptr;
}

const char* rejects_tensor_cores(const AttentionProblem& p) {
  if (const char* reason = rejects_plain(p)) return reason;
  if (p.work.tile_rows > kPlainRows) return "tiles have more than 16 rows";
  if (p.q_rope.dims > 0 || p.k_rope.dims > 0) return "no dims beside q and k";
  const DType dtype = p.k.dtype;
  if (p.q.dtype != DType::bf16 && p.q.dtype != DType::f16) return "queries are not f16 or bf16";
  if (dtype != p.q.dtype && !is_narrow(dtype)) {
    return "keys are not of the queries' dtype or of 8 bits";
  }
  if (p.k.dims <= 0) return "no dims";
  for (const int32_t dims : {p.k.dims, p.v.dims}) {
    if (dims > ops::kGpuMostHeadDim || dims % 8 != 0) {
      return "head_dim is not a multiple of 8 up to 256";
    }
    if (is_narrow(dtype) && dims % 16 != 0) return "head_dim of 8 bits is no multiple of 16";
  }
  if (p.v.scales != nullptr && p.q.dtype == DType::f16) {
    return "weights in float16 have no room for scales of tokens";
  }
  return nullptr;
}

const char* rejects_floats(const AttentionProblem& p) {
  if (const char* reason = rejects_plain(p)) return reason;
  if (!ops::is_row_type(p.q.dtype)) return "queries are not f32, f16 or bf16";
  if (!ops::is_kv_type(p.k.dtype)) return "keys are not f32, f16, bf16 or of 8 bits";
  const bool same = p.k_rope.dims == 0 || p.k_rope.dtype == p.k.dtype;
  if (!same) return "parts of keys differ in dtype";
  return p.k.dims > 0 ? nullptr : "no dims";
}

// visit.operator()<Kernel>() with the kernel of the problem's rows.
template <class Visit>
auto with_plain_kernel(const AttentionProblem& p, Visit&& visit) {
  const int32_t dims = p.k.dims > p.v.dims ? p.k.dims : p.v.dims;
  const auto of_type = [&]<DType kType>() {
    if (dims <= 64) return visit.template operator()<PlainAttentionKernel<kType, 64>>();
    if (dims <= 128) return visit.template operator()<PlainAttentionKernel<kType, 128>>();
    return visit.template operator()<PlainAttentionKernel<kType, 256>>();
  };
  return p.q.dtype == DType::f16 ? of_type.template operator()<DType::f16>()
                                 : of_type.template operator()<DType::bf16>();
}

size_t plain_shared_bytes(const AttentionProblem& p) {
  return with_plain_kernel(p, [&]<class Kernel>() { return sizeof(typename Kernel::Shared); });
}

void launch_plain(const AttentionProblem& p, Queue& queue) {
  with_plain_kernel(p, [&]<class Kernel>() { launch<Kernel>(p, p.work.num_items, queue); });
}

}  // namespace

// Of two that take a problem the table has the last one.
void register_plain_attention() {
  add<AttentionProblem>(
      "float_attention", rejects_floats,
      [](const AttentionProblem& p, Queue& queue) {
        launch<FloatAttentionKernel>(p, p.work.num_items, queue);
      },
      [](const AttentionProblem&) { return sizeof(FloatAttentionShared); });
  add<AttentionProblem>("plain_attention", rejects_tensor_cores, launch_plain, plain_shared_bytes);
}

}  // namespace effinfer::cuda
