// Writing rows of keys and values to the pages of a caller's cache.
#pragma once

#include <cstdint>
#include <string>

#include "effinfer/dtype.h"
#include "ops/cost.h"

namespace effinfer::ops {

struct PagePlace {
  int64_t page;
  int64_t slot;
};

// Rows [N, heads, dims] and the pages that they go to; strides in bytes.
struct PagedRows {
  const uint8_t* rows = nullptr;
  DType rows_dtype = DType::f32;
  int64_t row_stride = 0;
  int64_t row_head_stride = 0;
  uint8_t* cache = nullptr;
  DType cache_dtype = DType::f32;
  int64_t page_stride = 0;
  int64_t slot_stride = 0;
  int64_t head_stride = 0;
  int64_t heads = 0;
  int64_t dims = 0;

  int64_t row_bytes() const { return heads * dims * dtype_info(rows_dtype).block_bytes; }
};

// Where rows go, by the lists of effinfer/ops/page.h: of a GPU, whose values the host has not seen.
struct PageLists {
  const int32_t* batch_indices = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* kv_indices = nullptr;
  const int32_t* kv_indptr = nullptr;
  int64_t page_size = 0;
};

// Row i of keys and values goes to places[i], no two to the same one. Copied where the dtypes are
// the same; else both are floats of 32, 16 or 8 bits, rounded to nearest even.
struct AppendPagesProblem {
  PagedRows keys;
  PagedRows values;
  const PagePlace* places = nullptr;  // [num_rows]; null: by the lists
  int64_t num_rows = 0;
  PageLists lists;  // rows of a sequence below 0 go nowhere
};

std::string describe(const AppendPagesProblem& problem);
const char* rejects(const AppendPagesProblem& problem);
Cost cost(const AppendPagesProblem& problem);

}  // namespace effinfer::ops
