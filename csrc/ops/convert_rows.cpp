#include "ops/convert_rows.h"

#include <cmath>

#include "effinfer/ops/convert_rows.h"
#include "ops/describe.h"
#include "ops/row_layout.h"
#include "ops/run_rows.h"

namespace effinfer::ops {
namespace {

bool is_float(DType dtype) {
  return is_row_type(dtype) || dtype == DType::f8_e4m3 || dtype == DType::f8_e5m2;
}

void check_floats(const Validator& check, std::string_view argument, const StridedView& view) {
  check.expect(is_float(view.dtype), argument, "dtype f32, f16, bf16, f8_e4m3 or f8_e5m2",
               name(view.dtype));
  check.expect(view.dims.rank() > 0, argument, "at least 1 dimension", "none");
  if (view.dims.num_elements() == 0) return;  // strides mean nothing
  check.expect(view.contiguous_rows(), argument, "a contiguous last dimension", "strides");
  check.data(argument, view);
}

}  // namespace

std::string describe(const ConvertRowsProblem& problem) {
  return "[convert_rows]" + field("rows", problem.rows) + field("groups", problem.groups) +
         field("cols", problem.cols) + " " + std::string(name(problem.from)) + " to " +
         std::string(name(problem.to));
}

const char* rejects(const ConvertRowsProblem& problem) {
  return is_float(problem.from) && is_float(problem.to) ? nullptr : "rows must be floats";
}

Cost cost(const ConvertRowsProblem& problem) {
  const int64_t size = problem.rows * problem.groups * problem.cols;
  const int64_t bytes = dtype_info(problem.from).block_bytes + dtype_info(problem.to).block_bytes;
  return {size * bytes, size};
}

void convert_rows(const StridedView& x, float factor, const StridedView& out,
                  const Executor& executor, const ConvertNames& names, const TensorView& divisor) {
  const Validator check(names.op, executor.device());
  check_floats(check, names.x, x);
  check_floats(check, names.out, out);
  check.shape(names.out, out, x.dims);
  check.expect(std::isfinite(factor), "scale", "a finite number", std::to_string(factor));
  const bool divides = divisor.dims.rank() > 0;
  if (divides) {
    check.dtype("scale", divisor, DType::f32);
    check.shape("scale", divisor, {1});
  }
  if (x.dims.num_elements() == 0) return;
  for (int axis = 0; axis < out.dims.rank(); ++axis) {
    check.expect(out.dims[axis] < 2 || out.stride(axis) != 0, names.out,
                 "an array without broadcast dimensions", "a stride of 0");
  }
  const RowLayout layout = merge_rows(check, names.x, {&x, &out});
  ConvertRowsProblem problem;
  problem.from = x.dtype;
  problem.to = out.dtype;
  problem.factor = factor;
  if (divides && executor.queue() != nullptr) {
    problem.divisor = static_cast<const float*>(divisor.data);
  } else if (divides) {
    problem.factor /= *static_cast<const float*>(divisor.data);
  }
  problem.x = layout.read(x, 0);
  problem.out = layout.of(out, 1);
  problem.rows = layout.rows;
  problem.groups = layout.groups;
  problem.cols = x.dims[x.dims.rank() - 1];
  run_rows(problem, executor);
}

}  // namespace effinfer::ops
