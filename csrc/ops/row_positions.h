// Which sequence a row of a ragged batch is of, and its position there: on GPUs, whose lists the
// host does not look at.
#pragma once

#include <cstdint>
#include <string>

#include "ops/cost.h"

namespace effinfer::ops {

// Row i with indptr[s] <= i < indptr[s + 1] is of sequence s; rows behind the last one are of
// sequence -1 and at position 0.
struct RowPositionsProblem {
  const int32_t* indptr = nullptr;  // [num_sequences + 1]
  // [num_sequences]: the position of each one's first row, or with `are_ends` one more than that of
  // its last row.
  const int32_t* offsets = nullptr;
  bool are_ends = false;
  int64_t num_sequences = 0;
  int64_t rows = 0;
  int32_t* sequences = nullptr;  // [rows]; null: not wanted
  int32_t* positions = nullptr;  // [rows]
};

// out[s] = max(pages - 1, 0) * page_size + last_page_len[s].
struct PageLengthsProblem {
  const int32_t* indptr = nullptr;         // [num_sequences + 1]
  const int32_t* last_page_len = nullptr;  // [num_sequences]
  int32_t page_size = 0;
  int64_t num_sequences = 0;
  int32_t* out = nullptr;
};

std::string describe(const RowPositionsProblem& problem);
std::string describe(const PageLengthsProblem& problem);

}  // namespace effinfer::ops
