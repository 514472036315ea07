// What the attention driver hands to the kernels of an ISA level: plain data and plain functions.
#pragma once

#include <cstdint>

#include "effinfer/dtype.h"

namespace effinfer::cpu {

// One work item: a tile of query rows against pages [first_page, end_page) of one KV head.
struct AttentionTile {
  const float* q;  // first row, first head of the group
  int64_t q_stride;
  int32_t num_tokens;
  int32_t group;  // query heads of the KV head; tile row = token * group + head
  int32_t head_dim;

  const uint8_t* k;  // this KV head in page 0
  const uint8_t* v;
  const float* k_scale;  // i8 only
  const float* v_scale;
  int64_t page_bytes;    // between pages, in k and v
  int64_t page_scales;   // between pages, in k_scale and v_scale
  const int32_t* pages;  // page ids of the sequence
  int32_t first_page;
  int32_t end_page;

  int32_t position;  // of the first token; token i sees keys [position + i - window, position + i]
  int32_t window_left;
  int32_t sinks;              // keys [0, sinks) stay visible behind the window
  int32_t step_start;         // place of the sequence's first token of this step
  const uint64_t* ancestors;  // of the tile's tokens, as in BatchLayout; null: a chain
  const uint64_t* visits;     // a word for each page of the sequence; null: all tokens
  float sm_scale;
  float soft_cap;

  float* out;  // first row, first head of the group
  int64_t out_stride;
  float* partial_out;  // [tile rows, head_dim]; null: write out
  float* partial_ms;   // [tile rows, 2]
  float* scratch;      // attention_scratch_floats()
};

// One row's partial results of `num_partials` chunks.
struct AttentionMerge {
  const float* partial_out;
  const float* partial_ms;
  int64_t stride;  // partials between chunks
  int32_t num_partials;
  int32_t group;
  int32_t head_dim;
  float* out;      // first head of the group
  float* scratch;  // [head_dim]
};

struct AttentionKernels {
  void (*tile)(DType kv_dtype, const AttentionTile&);
  void (*merge)(const AttentionMerge&);
};

namespace portable {
extern const AttentionKernels kAttention;
}
namespace avx2 {
extern const AttentionKernels kAttention;
}
namespace avx512 {
extern const AttentionKernels kAttention;
}

namespace avx512bf16 {
extern const AttentionKernels kAttention;
}
// Only where the compiler knows the instructions (EFFINFER_AMX).
namespace amx {
extern const AttentionKernels kAttention;
}

// Lines of values behind the last token of a page, of the products on tiles.
inline constexpr int64_t attention_spare_floats(int64_t head_dim) {
  return 16 * head_dim;
}

// Query, scores, chunk output, total output; maximum, sum, factor of chunk, maximum and sum of all;
// a page's keys, values and scales. Rows may be padded, to no more than the next multiple of 16.
inline constexpr int64_t attention_scratch_floats(int64_t rows, int64_t head_dim) {
  return (rows + 15) / 16 * 16 * (3 * head_dim + 64 + 5) + attention_spare_floats(head_dim) +
         64 * (2 * head_dim + 2);
}

}  // namespace effinfer::cpu
