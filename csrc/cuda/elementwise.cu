#include "cuda/bodies/elementwise.h"
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
}

}  // namespace effinfer::cuda
