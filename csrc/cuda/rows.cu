#include <algorithm>

#include "cuda/bodies/gated.h"
#include "cuda/bodies/merge_states.h"
#include "cuda/bodies/norm.h"
#include "cuda/entry.h"
#include "cuda/register.h"
#include "ops/activation.h"
#include "ops/merge_states.h"
#include "ops/norm.h"

namespace effinfer::cuda {
namespace {

const char* rejects_rms_norm(const ops::RmsNormProblem& p) {
  if (p.out_operand.cols > 0 && !multiplies_on_gpu(p.out_operand.arithmetic)) return kArithmetics;
  return ops::rejects(p);
}

template <template <class, int> class Kernel>
void launch_norm(NormParams& params, DType dtype, Queue& queue) {
  if (params.num_vectors == 0) return;
  const int64_t multiprocessors = num_multiprocessors(queue);
  with_elements(dtype, [&]<class T>() {
    const bool is_warps = params.cols <= kWarpCols;
    params.row_threads = is_warps ? kWarp : norm_threads<T>(params.cols);
    params.is_kept = params.vectored && std::max(params.cols, params.operand.padded) <=
                                            params.row_threads * kNormNumbers;
    if (is_warps) {
      using Warps = Kernel<T, 1>;
      const int64_t blocks = blocks_for(params.num_vectors, Warps::kRowsABlock);
      launch<Warps>(params, std::min(blocks, Warps::kResident * multiprocessors), queue);
    } else {
      using Block = Kernel<T, kNormThreads<T> / kWarp>;
      const int64_t resident = params.row_threads < Block::kThreads ? Block::kResident : 1;
      const int64_t blocks = std::min<int64_t>(params.num_vectors, resident * multiprocessors);
      launch<Block>(params, blocks, queue, sizeof(typename Block::Shared), params.row_threads);
    }
  });
}

template <class Problem>
NormParams norm_params(const Problem& p) {
  const int64_t element = dtype_info(p.dtype).block_bytes;
  NormParams params;
  params.x = p.x;
  params.out = p.out;
  params.weight = p.weight;
  params.num_vectors = static_cast<int>(p.rows * p.groups);
  params.groups = static_cast<int>(p.groups);
  params.cols = static_cast<int>(p.cols);
  params.per_col = 1.0f / static_cast<float>(p.cols);
  params.eps = p.eps;
  params.weight_is_f32 = p.weight_dtype == DType::f32;
  params.vectored = vectored(p.x, p.cols, element) && vectored(p.out, p.cols, element) &&
                    vectored(p.weight, p.cols, element);
  return params;
}

void rms_norm(const ops::RmsNormProblem& p, Queue& queue) {
  const int64_t element = dtype_info(p.dtype).block_bytes;
  NormParams params = norm_params(p);
  params.add_to = p.add_to;
  params.sum_out = p.sum_out;
  params.weight_offset = p.weight_offset;
  params.weight_is_fixed = p.weight_is_fixed;
  if (p.out_operand.data != nullptr) params.operand = OperandRows::of(p.out_operand);
  params.vectored = params.vectored && vectored(p.add_to, p.cols, element) &&
                    vectored(p.sum_out, p.cols, element);
  launch_norm<RmsNormKernel>(params, p.dtype, queue);
}

void layer_norm(const ops::LayerNormProblem& p, Queue& queue) {
  const int64_t element = dtype_info(p.dtype).block_bytes;
  NormParams params = norm_params(p);
  params.bias = p.bias;
  params.vectored = params.vectored && vectored(p.bias, p.cols, element);
  launch_norm<LayerNormKernel>(params, p.dtype, queue);
}

void gated(const ops::GatedProblem& p, Queue& queue) {
  const int64_t element = dtype_info(p.dtype).block_bytes;
  GatedParams params;
  params.x = p.x;
  params.out = p.out;
  params.op = p.op;
  params.groups = static_cast<int>(p.groups);
  params.cols = static_cast<int>(p.cols);
  params.vectored = vectored(p.x, p.cols, element) && vectored(p.out, p.cols, element);
  with_elements(p.dtype, [&]<class T>() {
    using Kernel = GatedKernel<T>;
    params.parts = static_cast<int>(blocks_for(p.cols, Kernel::kThreads * Kernel::kNumbers));
    launch<Kernel>(params, p.rows * p.groups * params.parts, queue);
  });
}

const char* rejects_merge_states(const ops::MergeStatesProblem& p) {
  if (p.num_states > kMostStates) return "num_states is above 224";
  return ops::rejects(p);
}

// The problem's arrays of pointers are the host's; what they point to is the device's.
void merge_states(const ops::MergeStatesProblem& p, Queue& queue) {
  const int64_t element = dtype_info(p.dtype).block_bytes;
  MergeStatesParams params{};
  params.vectored = vectored(p.out_v, p.head_dim, element) && p.v_stride * element % 16 == 0;
  for (int64_t i = 0; i < p.num_states; ++i) {
    params.v[i] = p.v[i];
    params.s[i] = p.s[i];
    params.vectored = params.vectored && vectored(p.v[i], p.head_dim, element);
  }
  params.out_v = p.out_v;
  params.out_s = p.out_s;
  params.mask = p.mask;
  params.v_stride = p.v_stride;
  params.s_stride = p.s_stride;
  params.num_states = static_cast<int>(p.num_states);
  params.num_vectors = static_cast<int>(p.tokens * p.heads);
  params.heads = static_cast<int>(p.heads);
  params.head_dim = static_cast<int>(p.head_dim);
  params.natural = p.natural;
  with_elements(p.dtype, [&]<class T>() {
    using Kernel = MergeStatesKernel<T>;
    launch<Kernel>(params, blocks_for(params.num_vectors, Kernel::kThreads / kWarp), queue);
  });
}

}  // namespace

void register_rows() {
  add<ops::RmsNormProblem>("rms_norm", rejects_rms_norm, rms_norm);
  add<ops::LayerNormProblem>("layer_norm", ops::rejects, layer_norm);
  add<ops::GatedProblem>("gated", ops::rejects, gated);
  add<ops::MergeStatesProblem>("merge_states", rejects_merge_states, merge_states);
}

}  // namespace effinfer::cuda
