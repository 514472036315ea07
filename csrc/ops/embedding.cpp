#include "effinfer/ops/embedding.h"

#include <cstdint>
#include <numeric>
#include <vector>

#include "ops/attention_tensors.h"
#include "ops/describe.h"
#include "ops/embedding.h"
#include "ops/run_rows.h"
#include "ops/validate.h"
#include "ops/workplace.h"

namespace effinfer::ops {
namespace {

bool is_weight(const DTypeInfo& info, DType dtype) {
  return info.quantized || is_row_type(dtype);
}

}  // namespace

std::string describe(const EmbeddingProblem& problem) {
  return "[embedding]" + field("rows", problem.rows) + field("vocab_size", problem.vocab_size) +
         field("cols", problem.cols) + " dtype=" + std::string(name(problem.dtype)) +
         (problem.packed != nullptr ? " from the packed head" : "");
}

std::string describe(const SelectRowsProblem& problem) {
  return "[select_rows]" + field("rows", problem.num_rows) + field("cols", problem.cols);
}

const char* rejects(const EmbeddingProblem& problem) {
  const DTypeInfo& info = dtype_info(problem.dtype);
  if (!is_weight(info, problem.dtype)) return "the table must be f32, f16, bf16 or quantised";
  return problem.cols % info.block_size == 0 ? nullptr : "cols must be a whole number of blocks";
}

// A row of a packed table lies in every line of its group.
Cost cost(const EmbeddingProblem& problem) {
  const DTypeInfo& info = dtype_info(problem.dtype);
  const int64_t row = problem.packed != nullptr ? problem.packed->group_bytes
                                                : problem.cols / info.block_size * info.block_bytes;
  return {problem.rows * (4 + row + problem.cols * 4), problem.rows * problem.cols};
}

Cost cost(const SelectRowsProblem& problem) {
  return {problem.num_rows * (4 + problem.cols * 8), 0};
}

void embedding(const TensorView& ids, const TensorView& table, float scale, float* out,
               const Executor& executor) {
  const Validator check("embedding", executor.device());
  check.rank("table", table, 2);
  check.data("table", table);
  check.indices("ids", ids, table.dims[0]);
  check.data("out", out, {ids.dims[0], table.dims[1]});
  EmbeddingProblem problem;
  problem.ids = static_cast<const int32_t*>(ids.data);
  problem.rows = ids.dims[0];
  problem.table = static_cast<const uint8_t*>(table.data);
  problem.dtype = table.dtype;
  problem.vocab_size = table.dims[0];
  problem.cols = table.dims[1];
  problem.scale = scale;
  problem.out = out;
  const DTypeInfo& info = dtype_info(table.dtype);
  check.expect(is_weight(info, table.dtype), "table", "dtype f32, f16, bf16 or a quantised one",
               info.name);
  check.expect(problem.cols % info.block_size == 0, "table",
               "rows of whole blocks of " + std::to_string(info.block_size),
               "shape " + table.dims.to_string());
  run_rows(problem, executor);
}

void select_rows(const TensorView& x, const TensorView& rows, float* out,
                 const Executor& executor) {
  const Validator check("select_rows", executor.device());
  check.dtype("x", x, DType::f32);
  check.rank("x", x, 2);
  check.indices("rows", rows, x.dims[0]);
  check.data("out", out, {rows.dims[0], x.dims[1]});
  SelectRowsProblem problem;
  problem.x = static_cast<const float*>(x.data);
  problem.rows = static_cast<const int32_t*>(rows.data);
  problem.num_rows = rows.dims[0];
  problem.cols = x.dims[1];
  problem.out = out;
  run_rows(problem, executor);
}

// Pieces of words, as many of them as divide all strides.
void take_rows(const StridedView& x, const TensorView& rows, void* out, Queue& queue) {
  const Validator check("take_rows", queue.device());
  check.data("x", x);
  check.rank("x", x, 3);
  check.expect(x.contiguous_rows(), "x", "a contiguous last dimension",
               "stride " + std::to_string(x.stride(2)));
  check_aligned(check, "x", x);
  const Validator here("take_rows");
  here.indices("rows", rows, x.dims[0]);
  const int64_t size = dtype_info(x.dtype).block_bytes;
  const int64_t row_bytes = x.dims[2] * size;
  const int64_t piece =
      std::gcd(row_bytes, std::gcd(x.stride(0) * size, x.dims[1] > 1 ? x.stride(1) * size : 0));
  if (rows.dims[0] == 0 || x.dims[1] == 0 || row_bytes == 0) return;
  check.expect(piece % 4 == 0, "x", "rows of whole words of 4 bytes", x.dims.to_string());
  const int64_t end =
      ((x.dims[0] - 1) * x.stride(0) + (x.dims[1] - 1) * x.stride(1)) * size + row_bytes;
  check.expect(end / piece <= INT32_MAX, "x",
               "at most 2^31 - 1 pieces of " + std::to_string(piece) +
                   " bytes, which divide rows and strides",
               std::to_string(end / piece));
  std::vector<int32_t> pieces;
  pieces.reserve(static_cast<size_t>(rows.dims[0] * x.dims[1] * (row_bytes / piece)));
  for (const int32_t row : here.ints("rows", rows)) {
    for (int64_t head = 0; head < x.dims[1]; ++head) {
      const int64_t first = (row * x.stride(0) + head * x.stride(1)) * size / piece;
      for (int64_t i = 0; i < row_bytes / piece; ++i) {
        pieces.push_back(static_cast<int32_t>(first + i));
      }
    }
  }
  Workplace place(queue);
  SelectRowsProblem problem;
  problem.x = static_cast<const float*>(x.data);
  problem.rows = place.place(pieces);
  problem.num_rows = static_cast<int64_t>(pieces.size());
  problem.cols = piece / 4;
  problem.out = static_cast<float*>(out);
  run_rows(problem, queue);
}

}  // namespace effinfer::ops
