// The highest of a row of scores.
#pragma once

#include <cstdint>

#include "effinfer/top_scores.h"

namespace effinfer::ops {

// Writes the indices of what is chosen of `count` scores to `order`, which has room for all of
// them, in no order; returns how many. NaNs count as the highest.
int64_t choose_top(const float* scores, int64_t count, const TopScores& top, int32_t* order);

}  // namespace effinfer::ops
