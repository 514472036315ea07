#include "ops/elementwise.h"

#include <string_view>

namespace effinfer::ops {
namespace {

std::string field(std::string_view name, int64_t value) {
  return std::string(" ").append(name).append("=").append(std::to_string(value));
}

std::string_view name(UnaryOp op) {
  switch (op) {
    case UnaryOp::copy:
      return "copy";
    case UnaryOp::scale:
      return "scale";
    case UnaryOp::softcap:
      return "softcap";
    case UnaryOp::silu:
      return "silu";
    case UnaryOp::gelu_tanh:
      return "gelu_tanh";
    case UnaryOp::relu_squared:
      return "relu_squared";
  }
  return "?";
}

}  // namespace

std::string describe(const EmbeddingProblem& problem) {
  return "[embedding]" + field("rows", problem.rows) + field("vocab_size", problem.vocab_size) +
         field("cols", problem.cols) + " dtype=" + std::string(effinfer::name(problem.dtype)) +
         (problem.packed != nullptr ? " from the packed head" : "");
}

std::string describe(const RmsNormProblem& problem) {
  std::string text = "[rms_norm]" + field("rows", problem.rows) + field("groups", problem.groups) +
                     field("cols", problem.cols);
  if (problem.add_to.data != nullptr) text += " +residual";
  if (problem.out_operand.data != nullptr) {
    text += " out=" + std::string(name(problem.out_operand.arithmetic));
  }
  return text;
}

std::string describe(const LayerNormProblem& problem) {
  return "[layer_norm]" + field("rows", problem.rows) + field("groups", problem.groups) +
         field("cols", problem.cols);
}

std::string describe(const GatedProblem& problem) {
  constexpr std::string_view kNames[] = {"silu", "gelu", "gelu_tanh"};
  return std::string("[").append(kNames[static_cast<size_t>(problem.op)]).append("_and_mul]") +
         field("rows", problem.rows * problem.groups) + field("cols", problem.cols);
}

std::string describe(const UnaryProblem& problem) {
  return std::string("[").append(name(problem.op)).append("]") + field("rows", problem.rows) +
         field("cols", problem.cols);
}

std::string describe(const BinaryProblem& problem) {
  return std::string(problem.op == BinaryOp::add ? "[add]" : "[mul]") + field("size", problem.size);
}

std::string describe(const SelectRowsProblem& problem) {
  return "[select_rows]" + field("rows", problem.num_rows) + field("cols", problem.cols);
}

std::string describe(const RopeTableProblem& problem) {
  return "[rope_table]" + field("rows", problem.rows) + field("dims", problem.dims);
}

std::string describe(const RopeProblem& problem) {
  return "[rope]" + field("rows", problem.rows) + field("heads", problem.heads) +
         field("head_dim", problem.head_dim) + field("dims", problem.dims) +
         (problem.interleaved ? " interleaved" : "");
}

// A row of a packed table lies in every line of its group.
Cost cost(const EmbeddingProblem& problem) {
  const DTypeInfo& info = dtype_info(problem.dtype);
  const int64_t row = problem.packed != nullptr ? problem.packed->group_bytes
                                                : problem.cols / info.block_size * info.block_bytes;
  return {problem.rows * (4 + row + problem.cols * 4), problem.rows * problem.cols};
}

Cost cost(const RmsNormProblem& problem) {
  const int64_t size = problem.rows * problem.groups * problem.cols;
  const bool adds = problem.add_to.data != nullptr;
  const int64_t row_bytes = size * dtype_info(problem.dtype).block_bytes;
  Cost cost{row_bytes * (adds ? 3 : 1), size * (adds ? 5 : 4)};
  if (problem.weight != nullptr) {
    cost.bytes += problem.cols * dtype_info(problem.weight_dtype).block_bytes;
  }
  cost.bytes += problem.out_operand.data != nullptr ? problem.rows * problem.out_operand.row_bytes()
                                                    : row_bytes;
  return cost;
}

Cost cost(const LayerNormProblem& problem) {
  const int64_t size = problem.rows * problem.groups * problem.cols;
  return {size * 2 * dtype_info(problem.dtype).block_bytes +
              problem.cols * 2 * dtype_info(problem.weight_dtype).block_bytes,
          size * 8};
}

Cost cost(const GatedProblem& problem) {
  const int64_t size = problem.rows * problem.groups * problem.cols;
  return {size * 3 * dtype_info(problem.dtype).block_bytes, size * 2};
}

Cost cost(const UnaryProblem& problem) {
  const int64_t size = problem.rows * problem.cols;
  return {size * 8, size};
}

Cost cost(const BinaryProblem& problem) {
  return {problem.size * 12, problem.size};
}

Cost cost(const SelectRowsProblem& problem) {
  return {problem.num_rows * (4 + problem.cols * 8), 0};
}

Cost cost(const RopeTableProblem& problem) {
  return {problem.rows * (4 + problem.dims * 4) + problem.dims * 2, problem.rows * problem.dims};
}

Cost cost(const RopeProblem& problem) {
  const int64_t size = problem.rows * problem.heads * problem.head_dim;
  const int64_t rotated = problem.rows * problem.heads * problem.dims;
  const int64_t element = dtype_info(problem.dtype).block_bytes;
  return {size * 2 * element + problem.rows * problem.dims * 4, rotated * 3};
}

}  // namespace effinfer::ops
