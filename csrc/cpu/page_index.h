// What the driver of the page index hands to an ISA level: the bounds of a page's keys, and the
// scores of pages by their bounds.
#pragma once

#include <cstdint>

#include "effinfer/dtype.h"

namespace effinfer::cpu {

// The keys of a full page, of one KV head.
struct PageKeys {
  DType dtype;
  int32_t head_dim;
  const uint8_t* k;
  const float* k_scale;  // i8 only
};

// The query heads of one row and KV head.
struct PageScoreTile {
  const float* q;  // [group][head_dim]
  int32_t group;
  int32_t head_dim;
  int32_t num_pages;
  float sm_scale;
  const uint16_t* const* bounds;  // of each page, as ops::PageBounds has them
  float* scores;   // [group][padded_pages(num_pages)]; the first row gets the pages' scores
  float* scratch;  // page_scratch_floats()
};

struct PageIndexKernels {
  void (*bound)(const PageKeys&, uint16_t* out);
  void (*score)(const PageScoreTile&);
};

inline constexpr int64_t padded_pages(int64_t pages) {
  return (pages + 15) / 16 * 16;
}
// What is positive of the queries, and what is negative.
inline constexpr int64_t page_scratch_floats(int64_t group, int64_t head_dim) {
  return 2 * group * head_dim;
}

}  // namespace effinfer::cpu
