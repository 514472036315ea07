// What the rope_append driver hands to the kernels of an ISA level.
#pragma once

#include <cstdint>

#include "effinfer/dtype.h"
#include "ops/rope_append.h"

namespace effinfer::cpu {

// One token's share of one KV head: its K and V, and the query heads of its group.
struct RopeAppendRow {
  const float* q;  // [group, head_dim]
  float* q_out;    // [group, head_dim]; may be q
  int32_t group;   // 0: no queries
  const float* k;  // [head_dim]; null: queries only
  const float* v;
  int32_t head_dim;

  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  float norm_eps;
  const float* cos_sin;  // [2, rope_dims / 2] or null
  int32_t rope_dims;
  bool interleaved;

  DType kv_dtype;
  uint8_t* k_page;  // this head's part of the page
  uint8_t* v_page;
  float* k_scale;  // [64], i8 only
  float* v_scale;
  int32_t token;  // place in the page
};

struct RopeAppendKernel {
  void (*append)(const RopeAppendRow&);
};

// Rows [first, last) of KV head `head`; keys and values go to pages [first_page, end_page) of their
// sequence, those elsewhere are left out. Queries go to `q_out`, rows `q_out_stride` floats apart.
void rope_append_rows(const RopeAppendKernel& kernel, const ops::RopeAppendProblem& problem,
                      int64_t head, int64_t first, int64_t last, int64_t first_page,
                      int64_t end_page, float* q_out, int64_t q_out_stride);

}  // namespace effinfer::cpu
