#include <algorithm>

#include "cuda/bodies/convert_rows.h"
#include "cuda/bodies/elementwise.h"
#include "cuda/bodies/pack_bits.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

// Blocks of a grid at most, which go on in strides: enough for several on each multiprocessor.
constexpr int64_t kMostBlocks = 4096;

template <class Kernel>
int64_t blocks(int64_t count) {
  return std::min(blocks_for(count, Kernel::kThreads), kMostBlocks);
}

// Of vectors that threads share in chunks of `numbers`, each to be one load or store, or two.
template <class Void>
bool in_chunks(const ops::RowsOf<Void>& rows, DType dtype, int64_t cols, int64_t numbers) {
  const int64_t chunk = std::min<int64_t>(16, numbers * dtype_info(dtype).block_bytes);
  const auto starts_one = [&](int64_t stride) {
    return stride * dtype_info(dtype).block_bytes % chunk == 0;
  };
  return cols % numbers == 0 && reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 &&
         starts_one(rows.stride) && starts_one(rows.group_stride);
}

void convert_rows(const ops::ConvertRowsProblem& p, Queue& queue) {
  using Kernel = ConvertKernel;
  const ConvertParams params = {p, blocks_for(p.cols, Kernel::kNumbers),
                                in_chunks(p.x, p.from, p.cols, Kernel::kNumbers),
                                in_chunks(p.out, p.to, p.cols, Kernel::kNumbers)};
  launch<Kernel>(params, blocks<Kernel>(p.rows * p.groups * params.chunks), queue);
}

}  // namespace

void register_elementwise() {
  add<ops::UnaryProblem>("unary", ops::rejects, [](const ops::UnaryProblem& p, Queue& queue) {
    launch<UnaryKernel>(p, blocks<UnaryKernel>(p.rows * p.cols), queue);
  });
  add<ops::BinaryProblem>("binary", takes_all, [](const ops::BinaryProblem& p, Queue& queue) {
    launch<BinaryKernel>(p, blocks<BinaryKernel>(p.size), queue);
  });
  add<ops::NarrowProblem>("narrow", takes_all, [](const ops::NarrowProblem& p, Queue& queue) {
    launch<NarrowKernel>(p, blocks<NarrowKernel>(p.size), queue);
  });
  add<ops::PackBitsProblem>("packbits", takes_all, [](const ops::PackBitsProblem& p, Queue& queue) {
    using Kernel = PackBitsKernel;
    launch<Kernel>(p, blocks_for(p.bytes, Kernel::kThreads), queue);
  });
  add<ops::ConvertRowsProblem>("convert_rows", ops::rejects, convert_rows);
}

}  // namespace effinfer::cuda
