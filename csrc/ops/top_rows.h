// The highest numbers of each row, on devices whose memory the host does not touch: what greedy and
// top-k sampling need of a vocabulary. (The CPU keeps them where it computes them: top_list.h.)
#pragma once

#include <cstdint>
#include <string>

#include "ops/cost.h"

namespace effinfer::ops {

// A NaN comes first, then numbers from high to low, both zeros alike, the lower index among equals.
struct TopRowsProblem {
  const float* x = nullptr;  // [rows, cols]
  int64_t rows = 0;
  int64_t cols = 0;
  int32_t k = 0;               // 1..kMaxTop, at most cols
  float* values = nullptr;     // [rows, k]
  int32_t* indices = nullptr;  // [rows, k]
};

std::string describe(const TopRowsProblem& problem);
const char* rejects(const TopRowsProblem& problem);
Cost cost(const TopRowsProblem& problem);

}  // namespace effinfer::ops
