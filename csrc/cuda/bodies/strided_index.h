// Lists of a fixed pattern (ops/strided_index.h): a block of threads a list, a thread a word.
#pragma once

#include <cstdint>

#include "cuda/bodies/index_keys.h"
#include "cuda/unit.h"
#include "ops/strided_index.h"

namespace effinfer::cuda {

struct StridedIndexKernel {
  static constexpr const char* kName = "strided_index";
  static constexpr int kThreads = 128;
  using Params = ops::StridedIndexProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int32_t kv_head = unit.block % p.visits.num_kv_heads;
    const int64_t index = unit.block / p.visits.num_kv_heads;
    const ops::VisitBlock block = p.visits.blocks[index];
    if (block.sequence < 0 || p.heads[kv_head] == ops::IndexedHead::other) return;
    const bool all = p.heads[kv_head] == ops::IndexedHead::dense ||
                     block.position + block.num_rows < p.min_tokens;
    // Behind the slot of the last row. A tree's tokens lie behind each other, whatever their
    // positions are.
    const int64_t end = p.batch.step_begin(block.sequence) + block.first_row -
                        p.batch.qo_indptr[block.sequence] + block.num_rows;
    const int64_t local = block.position / ops::kPageSize - ops::local_pages(p);
    uint64_t* const words = p.visits.list(index, kv_head);
    for (int64_t word = unit.thread; word * ops::kPageSize < end; word += kThreads) {
      const bool whole = all || word % p.stride == (kv_head + p.shift) % p.stride;
      words[word] = whole ? ~uint64_t{0}
                          : bits_of_word(word, 0, p.sink_tokens) |
                                bits_of_word(word, local * ops::kPageSize, end);
    }
  }
};

}  // namespace effinfer::cuda
