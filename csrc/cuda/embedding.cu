#include "cuda/bodies/embedding.h"
#include "cuda/entry.h"
#include "cuda/register.h"
#include "ops/embedding.h"

namespace effinfer::cuda {
namespace {

template <class Kernel>
void launch_rows(PickRowsParams& params, int64_t rows, Queue& queue) {
  params.parts = static_cast<int>(blocks_for(params.cols, Kernel::kThreads * Kernel::kNumbers));
  launch<Kernel>(params, rows * params.parts, queue);
}

const char* rejects(const ops::EmbeddingProblem& p) {
  if (p.packed != nullptr && ops::is_ternary(p.packed->format)) {
    return "packed ternary rows can only be multiplied";
  }
  if (p.packed == nullptr && dtype_info(p.dtype).quantized) {
    return "a quantised table must be packed";
  }
  return ops::rejects(p);
}

// `packed` is the host's; its data is the device's.
void embedding(const ops::EmbeddingProblem& p, Queue& queue) {
  const bool packed = p.packed != nullptr;
  const int64_t element = packed ? 4 : dtype_info(p.dtype).block_bytes;
  PickRowsParams params;
  params.table = p.table;
  if (packed) params.packed = PackedTable::of(*p.packed);
  params.ids = p.ids;
  params.out = p.out;
  params.cols = static_cast<int>(p.cols);
  params.scale = p.scale;
  params.vectored =
      vectored(p.out, p.cols, 4) && vectored(packed ? nullptr : p.table, p.cols, element);
  if (packed) return launch_rows<PickPackedKernel>(params, p.rows, queue);
  with_elements(p.dtype, [&]<class T>() { launch_rows<PickRowsKernel<T>>(params, p.rows, queue); });
}

void select_rows(const ops::SelectRowsProblem& p, Queue& queue) {
  PickRowsParams params;
  params.table = p.x;
  params.ids = p.rows;
  params.out = p.out;
  params.cols = static_cast<int>(p.cols);
  params.vectored = vectored(p.x, p.cols, 4) && vectored(p.out, p.cols, 4);
  launch_rows<PickRowsKernel<float>>(params, p.num_rows, queue);
}

}  // namespace

void register_embedding() {
  add<ops::EmbeddingProblem>("embedding", rejects, embedding);
  add<ops::SelectRowsProblem>("select_rows", takes_all, select_rows);
}

}  // namespace effinfer::cuda
