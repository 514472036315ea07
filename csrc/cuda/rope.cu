#include "cuda/bodies/rope.h"
#include "cuda/bodies/rope_append.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

void rope_table(const ops::RopeTableProblem& p, Queue& queue) {
  launch<RopeTableKernel>(p, blocks_for(p.rows * (p.dims / 2), RopeTableKernel::kThreads), queue);
}

template <class T, bool kInterleaved>
void launch_rope(const ops::RopeProblem& p, Queue& queue) {
  using Kernel = RopeKernel<T, kInterleaved>;
  constexpr int64_t kElement = sizeof(T);
  const int64_t rotating = kInterleaved ? p.dims : p.dims / 2;
  const bool in_place = p.out.data == p.x.data && p.out.stride == p.x.stride &&
                        p.out.group_stride == p.x.group_stride;
  const int64_t copied = in_place ? 0 : p.head_dim - p.dims;
  RopeParams params;
  params.x = p.x;
  params.out = p.out;
  params.cos_sin = p.cos_sin;
  params.positions = p.positions;
  params.heads = p.heads;
  params.head_dim = p.head_dim;
  params.dims = p.dims;
  params.rotating = static_cast<int>(blocks_for(rotating, Kernel::kNumbers));
  params.slots = params.rotating + static_cast<int>(blocks_for(copied, Kernel::kNumbers));
  params.vectored = vectored(p.x, rotating, kElement) && vectored(p.out, rotating, kElement) &&
                    vectored(p.cos_sin, p.dims / 2, 4) &&
                    (copied == 0 || vectored(nullptr, copied, kElement));
  params.parts = static_cast<int>(blocks_for(int64_t{p.heads} * params.slots, Kernel::kThreads));
  launch<Kernel>(params, p.rows * params.parts, queue);
}

void rope(const ops::RopeProblem& p, Queue& queue) {
  with_elements(p.dtype, [&]<class T>() {
    return p.interleaved ? launch_rope<T, true>(p, queue) : launch_rope<T, false>(p, queue);
  });
}

const char* rejects_append(const ops::RopeAppendProblem& p) {
  const DType dtype = p.kv.dtype;
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::i8) {
    return "kv_dtype is not f32, f16, bf16 or i8";
  }
  if (p.kv.head_dim <= 0 || p.kv.head_dim > kMostHeadDim || p.kv.head_dim % 16 != 0) {
    return "head_dim is not a multiple of 16 up to 256";
  }
  if (p.rope_dims < 0 || p.rope_dims > p.kv.head_dim || p.rope_dims % 2 != 0) {
    return "rope_dims is not an even number up to head_dim";
  }
  if (p.kv.num_kv_heads <= 0 || p.num_qo_heads % p.kv.num_kv_heads != 0) {
    return "heads is not a multiple of kv_heads";
  }
  return nullptr;
}

void rope_append(const ops::RopeAppendProblem& p, Queue& queue) {
  using Kernel = RopeAppendKernel;
  const auto aligned = [](const float* rows, int64_t stride) {
    return vectored(rows, stride, sizeof(float));
  };
  RopeAppendParams params;
  params.problem = p;
  params.head_bytes = static_cast<int64_t>(p.kv.head_bytes());
  params.q_heads = p.q == nullptr ? 0 : p.num_qo_heads;
  params.rope_dims = p.cos_sin == nullptr ? 0 : p.rope_dims;
  params.per_dim = 1.0f / static_cast<float>(p.kv.head_dim);
  params.vectored = aligned(p.q, p.q_stride) && aligned(p.q_out, p.q_out_stride) &&
                    aligned(p.k, p.k_stride) && aligned(p.q_norm, 0) && aligned(p.k_norm, 0);
  params.whole = p.rope_dims % 8 == 0 && aligned(p.cos_sin, p.rope_dims / 2);
  const int64_t warps = p.batch.num_tokens * (params.q_heads + 2 * p.kv.num_kv_heads);
  params.num_warps = static_cast<int>(warps);
  launch<Kernel>(params, blocks_for(warps, Kernel::kWarps), queue);
}

}  // namespace

void register_rope() {
  add<ops::RopeTableProblem>("rope_table", ops::rejects, rope_table);
  add<ops::RopeProblem>("rope", ops::rejects, rope);
  add<ops::RopeAppendProblem>("rope_append", rejects_append, rope_append);
}

}  // namespace effinfer::cuda
