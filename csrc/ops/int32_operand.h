// Positions and the like, as the kernels of an executor take them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "effinfer/executor.h"
#include "ops/validate.h"

namespace effinfer::ops {

// to = from, of which the lower 32 bits are kept: on GPUs only.
struct NarrowProblem {
  const int64_t* from = nullptr;
  int32_t* to = nullptr;
  int64_t size = 0;
};

std::string describe(const NarrowProblem& problem);

// An int32 or int64 vector as int32. On the CPU each value is in [low, high]; those of a GPU are
// not looked at, as that would have the host wait for it. Lives until the work that reads it is in
// the executor's queue.
class Int32Operand {
 public:
  Int32Operand(const Validator& check, std::string_view argument, const TensorView& view,
               int64_t low, int64_t high, const Executor& executor);

  const int32_t* data() const { return data_; }

 private:
  std::optional<Int32Values> checked_;
  std::shared_ptr<void> narrowed_;
  const int32_t* data_ = nullptr;
};

}  // namespace effinfer::ops
