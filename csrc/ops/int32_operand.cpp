#include "ops/int32_operand.h"

#include "ops/describe.h"
#include "ops/registry.h"

namespace effinfer::ops {

std::string describe(const NarrowProblem& problem) {
  return "[narrow]" + field("size", problem.size);
}

Int32Operand::Int32Operand(const Validator& check, std::string_view argument,
                           const TensorView& view, int64_t low, int64_t high,
                           const Executor& executor) {
  Queue* const queue = executor.queue();
  if (queue == nullptr) {
    data_ = checked_.emplace(check, argument, view, low, high).data();
    return;
  }
  const bool wide = view.dtype == DType::i64;
  if (!wide) check.dtype(argument, view, DType::i32);
  check.data(argument, view);
  check.rank(argument, view, 1);
  data_ = static_cast<const int32_t*>(view.data);
  const int64_t size = view.dims[0];
  if (!wide || size == 0) return;
  narrowed_ = queue->allocate(static_cast<size_t>(size) * sizeof(int32_t));
  auto* narrow = static_cast<int32_t*>(narrowed_.get());
  run_alone(NarrowProblem{static_cast<const int64_t*>(view.data), narrow, size}, executor);
  data_ = narrow;
}

}  // namespace effinfer::ops
