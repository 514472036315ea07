#include "cuda/bodies/append_pages.h"
#include "cuda/bodies/row_positions.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

const char* rejects(const ops::AppendPagesProblem& p) {
  return p.places != nullptr ? "rows go by lists on the device" : ops::rejects(p);
}

// Whether every head's row begins at a multiple of 16 bytes, on both sides, and ends at one.
bool is_vectored(const ops::PagedRows& x, int64_t element) {
  bool whole = x.dims * element % 16 == 0 && reinterpret_cast<uintptr_t>(x.rows) % 16 == 0 &&
               reinterpret_cast<uintptr_t>(x.cache) % 16 == 0;
  for (const int64_t stride :
       {x.row_stride, x.row_head_stride, x.page_stride, x.slot_stride, x.head_stride}) {
    whole = whole && stride % 16 == 0;
  }
  return whole;
}

void append_pages(const ops::AppendPagesProblem& p, Queue& queue) {
  using Kernel = AppendPagesKernel;
  AppendPagesParams params;
  params.p = p;
  params.heads = static_cast<int>(p.keys.heads + p.values.heads);
  const int64_t warps = p.num_rows * params.heads;
  params.num_warps = static_cast<int>(warps);
  int i = 0;
  for (const ops::PagedRows* x : {&p.keys, &p.values}) {
    const int64_t element = dtype_info(x->rows_dtype).block_bytes;
    params.element_bytes[i] = static_cast<int>(element);
    params.vectored[i++] = is_vectored(*x, element);
  }
  launch<Kernel>(params, blocks_for(warps, Kernel::kWarps), queue);
}

}  // namespace

void register_append_pages() {
  add<ops::AppendPagesProblem>("append_pages", rejects, append_pages);
  add<ops::RowPositionsProblem>("row_positions", takes_all,
                                [](const ops::RowPositionsProblem& p, Queue& queue) {
                                  using Kernel = RowPositionsKernel;
                                  launch<Kernel>(p, blocks_for(p.rows, Kernel::kThreads), queue);
                                });
  add<ops::PageLengthsProblem>(
      "page_lengths", takes_all, [](const ops::PageLengthsProblem& p, Queue& queue) {
        using Kernel = PageLengthsKernel;
        launch<Kernel>(p, blocks_for(p.num_sequences, Kernel::kThreads), queue);
      });
}

}  // namespace effinfer::cuda
