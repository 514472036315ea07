// Lists of a fixed pattern, made on the GPU: the CPU's, of blocks of prompts, of generated rows and
// of trees.
#include <vector>

#include "cpp/check.h"
#include "gpu/index_step.h"
#include "ops/strided_index.h"

namespace effinfer {
namespace {

using ops::IndexedHead;
using ops::StridedIndexProblem;

void expect_lists(IndexStep& step, StridedIndexProblem p, bool of_rows) {
  const std::vector<uint64_t> expected =
      step.on_cpu(p, [&](ThreadPool& pool) { ops::run_alone(p, pool); });
  const std::vector<uint64_t> got = step.on_gpu(p, {{-1, 0, 0, 0}}, [&] {
    ++(of_rows ? p.visits.num_rows : p.visits.num_blocks);
    run_on_gpu(p);
  });
  CHECK(got == expected);
}

TEST("patterns are the CPU's") {
  Cache cache({DType::bf16, 16, 5, 2, DType::f32}, 3);
  cache.add(1000);
  cache.add(300);
  cache.upload();
  IndexStep rows(cache, {{0, 1000, 3}, {1, 300, 4, {1, 3, 5, 11}}, {0, 64, 1}, {1, 1, 1}}, true);
  IndexStep blocks(cache, {{0, 1000, 130}, {1, 300, 300}, {0, 64, 64}}, false);
  rows.indexed()[1] = blocks.indexed()[1] = IndexedHead::other;
  rows.indexed()[3] = blocks.indexed()[3] = IndexedHead::dense;
  for (int turn = 0; turn < 12; ++turn) {
    StridedIndexProblem p;
    p.stride = 1 + turn % 7;
    p.shift = turn % 5;
    p.sink_tokens = turn % 3 * 50;
    p.local_tokens = turn * 37;
    p.min_tokens = turn % 4 == 0 ? 400 : 0;
    expect_lists(rows, p, true);
    expect_lists(blocks, p, false);
  }
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
