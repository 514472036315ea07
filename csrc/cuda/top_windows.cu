#include <algorithm>

#include "cuda/bodies/top_windows.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

// Blocks of a grid at most, which go on in strides.
constexpr int64_t kMostBlocks = 4096;

const char* rejects_windows(const ops::WindowRowsProblem& p) {
  return p.dtype == DType::f32 || p.dtype == DType::f16 || p.dtype == DType::bf16
             ? nullptr
             : "rows must be f32, f16 or bf16";
}

void window_rows(const ops::WindowRowsProblem& p, Queue& queue) {
  using Kernel = WindowRowsKernel;
  const int64_t blocks = blocks_for(p.rows * p.windows.width, Kernel::kThreads);
  launch<Kernel>(p, std::min(blocks, kMostBlocks), queue);
}

void place_chosen(const ops::PlaceChosenProblem& p, Queue& queue) {
  using Kernel = PlaceChosenKernel;
  launch<Kernel>(p, blocks_for(p.rows * p.k, Kernel::kThreads), queue);
}

void unmirror(const ops::UnmirrorProblem& p, Queue& queue) {
  using Kernel = UnmirrorKernel;
  const int64_t places = p.sorted ? p.k : (p.k + 1) / 2;
  launch<Kernel>(p, blocks_for(p.rows * places, Kernel::kThreads), queue);
}

}  // namespace

void register_top_windows() {
  add<ops::WindowRowsProblem>("window_rows", rejects_windows, window_rows);
  add<ops::PlaceChosenProblem>("place_chosen", takes_all, place_chosen);
  add<ops::UnmirrorProblem>("unmirror_chosen", takes_all, unmirror);
}

}  // namespace effinfer::cuda
