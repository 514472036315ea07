// What tests of operators on rows of logits share.
#pragma once

#include <limits>

#include "cpp/arrays.h"
#include "cpp/check.h"
#include "effinfer/threads.h"
#include "gpu/float_rows.h"
#include "gpu/mutations.h"
#include "ops/row_sampling.h"

namespace effinfer {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Of the CPU's operators, which the device's are compared with.
inline ThreadPool& pool() {
  static ThreadPool threads(2);
  return threads;
}

}  // namespace effinfer
