// The lists that a team kept of each row, as one.
#pragma once

#include <cstddef>

#include "effinfer/compiler.h"
#include "kernels/top_list.h"

namespace effinfer::compiler {

// `lists` are [members][rows]; member 0's are changed.
void merge_top(kernels::TopList* lists, int members, size_t rows, const TopLogits& out);

}  // namespace effinfer::compiler
