// What drivers hand to the rope_append kernel of an ISA level.
#pragma once

#include <cstdint>

#include "ops/rope_append.h"

namespace effinfer::cpu {

// Rows of a problem for one KV head and the query heads of its group. Keys and values go to some
// pages of their sequence; those of other pages are left out.
struct RopeAppendRows {
  int64_t head;
  int64_t first;  // flat rows [first, last)
  int64_t last;
  int64_t sequence;    // of the first row
  int64_t first_page;  // [first_page, end_page)
  int64_t end_page;
  float* q_out;          // of the first row: [group, head_dim]
  int64_t q_out_stride;  // floats between rows
};

struct RopeAppendKernel {
  void (*append)(const ops::RopeAppendProblem&, const RopeAppendRows&);
};

}  // namespace effinfer::cpu
