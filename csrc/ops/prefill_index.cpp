#include "ops/prefill_index.h"

#include <algorithm>

#include "effinfer/dtype.h"

namespace effinfer::ops {
namespace {

std::string describe(const PrefillIndexInputs& in) {
  return " heads=" + std::to_string(in.num_qo_heads) +
         " kv_heads=" + std::to_string(in.kv.num_kv_heads) +
         " head_dim=" + std::to_string(in.kv.head_dim) +
         " kv_dtype=" + std::string(name(in.kv.dtype)) + " sinks=" + std::to_string(in.sinks) +
         " window=" + std::to_string(in.window) + "; all keys: fewer than " +
         std::to_string(kSparseRows) + " rows or " + std::to_string(in.min_tokens) + " keys";
}

std::string describe(const TopScores& top) {
  return top.mass > 0.0f ? "mass " + std::to_string(top.mass) : std::to_string(top.count);
}

int64_t key_bytes(const PrefillIndexInputs& in) {
  return int64_t{in.kv.num_kv_heads} * in.kv.head_dim * dtype_info(in.kv.dtype).block_bytes;
}

// Sums rows(block) * keys over the blocks with lists, and the bytes of all keys.
template <class Rows>
Cost cost_of(const PrefillIndexInputs& in, Rows&& rows) {
  Cost cost;
  for (int64_t i = 0; i < in.visits.num_sequences; ++i) {
    const VisitSequence& sequence = in.visits.sequences[i];
    const int64_t length = in.batch.kv_len[sequence.sequence];
    cost.bytes += length * key_bytes(in);
    cost.ops += 2 * rows(sequence) * length * in.num_qo_heads * in.kv.head_dim;
  }
  return cost;
}

}  // namespace

std::string describe(const ColumnIndexProblem& problem) {
  return "[column_index] " +
         (problem.row_stride > 0 ? "every " + std::to_string(problem.row_stride) + ". row"
                                 : "last " + std::to_string(problem.last_rows) + " rows") +
         " columns=" + describe(problem.columns) + " slashes=" + describe(problem.slashes) +
         describe(problem.in);
}

std::string describe(const BlockIndexProblem& problem) {
  return "[block_index] " +
         (problem.stride > 0 ? "antidiagonals of " + std::to_string(problem.stride)
                             : std::string("means")) +
         " pages=" + describe(problem.pages) + describe(problem.in);
}

Cost cost(const ColumnIndexProblem& problem) {
  return cost_of(problem.in, [&](const VisitSequence& s) -> int64_t {
    const int32_t* indptr = problem.in.batch.qo_indptr + s.sequence;
    const int64_t rows = indptr[1] - indptr[0];
    // Maxima and sums first, then probabilities.
    return 2 * (problem.row_stride > 0 ? rows / problem.row_stride
                                       : std::min<int64_t>(rows, problem.last_rows));
  });
}

Cost cost(const BlockIndexProblem& problem) {
  return cost_of(problem.in, [&](const VisitSequence& s) -> int64_t {
    const int32_t* indptr = problem.in.batch.qo_indptr + s.sequence;
    return problem.stride > 0 ? (indptr[1] - indptr[0]) / problem.stride : s.num_blocks;
  });
}

}  // namespace effinfer::ops
