#include "ops/row_positions.h"

#include <algorithm>

#include "effinfer/ops/page.h"
#include "effinfer/ops/rope.h"
#include "ops/describe.h"
#include "ops/int32_operand.h"
#include "ops/registry.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

void check_list(const Validator& check, std::string_view argument, const TensorView& view,
                int64_t size) {
  check.dtype(argument, view, DType::i32);
  check.shape(argument, view, {size});
}

// The sequences of a list of their starts.
int64_t count_sequences(const Validator& check, std::string_view argument, const TensorView& view) {
  check.rank(argument, view, 1);
  check.at_least(argument, view.dims[0], 1);
  return view.dims[0] - 1;
}

int32_t* written(const Validator& check, std::string_view argument, const StridedView& view,
                 int64_t size) {
  check.dtype(argument, view, DType::i32);
  check.shape(argument, view, {size});
  check.expect(view.contiguous_rows(), argument, "a C-contiguous array", "strides");
  return static_cast<int32_t*>(view.data);
}

void run_here(const RowPositionsProblem& p) {
  for (int64_t s = 0, row = 0; s <= p.num_sequences; ++s) {
    const bool is_one = s < p.num_sequences;
    const int64_t end = is_one ? p.indptr[s + 1] : p.rows;
    for (; row < end; ++row) {
      if (p.sequences != nullptr) p.sequences[row] = is_one ? static_cast<int32_t>(s) : -1;
      const int64_t first = is_one ? p.indptr[p.are_ends ? s + 1 : s] : row;
      p.positions[row] = static_cast<int32_t>((is_one ? p.offsets[s] : 0) + row - first);
    }
  }
}

}  // namespace

std::string describe(const RowPositionsProblem& problem) {
  return "[row_positions]" + field("rows", problem.rows) +
         field("sequences", problem.num_sequences);
}

std::string describe(const PageLengthsProblem& problem) {
  return "[page_lengths]" + field("sequences", problem.num_sequences);
}

void batch_indices_positions(const TensorView& append_indptr, const TensorView& seq_lens,
                             const StridedView& batch_indices, const StridedView& positions,
                             const Executor& executor) {
  const Validator check("get_batch_indices_positions", executor.device());
  check.dtype("append_indptr", append_indptr, DType::i32);
  RowPositionsProblem p;
  p.num_sequences = count_sequences(check, "append_indptr", append_indptr);
  check_list(check, "seq_lens", seq_lens, p.num_sequences);
  check.rank("batch_indices", batch_indices, 1);
  p.rows = batch_indices.dims[0];
  p.indptr = static_cast<const int32_t*>(append_indptr.data);
  p.offsets = static_cast<const int32_t*>(seq_lens.data);
  p.are_ends = true;
  p.sequences = written(check, "batch_indices", batch_indices, p.rows);
  p.positions = written(check, "positions", positions, p.rows);
  if (executor.queue() != nullptr) return run_alone(p, executor);
  check.indptr("append_indptr", p.indptr, p.num_sequences + 1);
  check.expect(p.indptr[p.num_sequences] <= p.rows, "batch_indices",
               std::to_string(p.indptr[p.num_sequences]) + " values or more",
               std::to_string(p.rows));
  run_here(p);
}

void page_lengths(const TensorView& kv_indptr, const TensorView& kv_last_page_len,
                  int32_t page_size, const StridedView& out, const Executor& executor) {
  const Validator check("get_seq_lens", executor.device());
  check.positive("page_size", page_size);
  check.dtype("kv_indptr", kv_indptr, DType::i32);
  PageLengthsProblem p;
  p.num_sequences = count_sequences(check, "kv_indptr", kv_indptr);
  check_list(check, "kv_last_page_len", kv_last_page_len, p.num_sequences);
  p.indptr = static_cast<const int32_t*>(kv_indptr.data);
  p.last_page_len = static_cast<const int32_t*>(kv_last_page_len.data);
  p.page_size = page_size;
  p.out = written(check, "out", out, p.num_sequences);
  if (executor.queue() != nullptr) return run_alone(p, executor);
  for (int64_t s = 0; s < p.num_sequences; ++s) {
    const int32_t pages = std::max(p.indptr[s + 1] - p.indptr[s] - 1, 0);
    p.out[s] = pages * page_size + p.last_page_len[s];
  }
}

void rope_positions(const TensorView& indptr, const TensorView& offsets, int64_t rows, int32_t* out,
                    const Executor& executor) {
  if (executor.queue() == nullptr) return rope_positions(indptr, offsets, rows, out);
  const Validator check("apply_rope", executor.device());
  const Int32Operand starts(check, "indptr", indptr, 0, INT32_MAX, executor);
  const Int32Operand first(check, "offsets", offsets, INT32_MIN, INT32_MAX, executor);
  RowPositionsProblem p;
  p.num_sequences = count_sequences(check, "indptr", indptr);
  check.shape("offsets", offsets, {p.num_sequences});
  p.indptr = starts.data();
  p.offsets = first.data();
  p.rows = rows;
  p.positions = out;
  run_alone(p, executor);
}

}  // namespace effinfer::ops
