// The lists that a team kept of each row, as one.
#pragma once

#include <cstddef>

#include "effinfer/compiler.h"
#include "ops/top_list.h"

namespace effinfer::executor {

// `lists` are [members][rows]; member 0's are changed.
void merge_top(ops::TopList* lists, int members, size_t rows, const TopLogits& out);

}  // namespace effinfer::executor
