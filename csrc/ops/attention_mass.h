// What keys get of the attention of some rows of a step, added to planes of their sequences: for
// each KV head and slot the softmax probabilities, summed over the head's query heads and the rows.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "effinfer/slot_plane.h"
#include "ops/cost.h"
#include "ops/kv_layout.h"
#include "ops/operand.h"

namespace effinfer::ops {

struct AttentionMassProblem {
  const float* q = nullptr;  // [T, num_qo_heads, head_dim], roped
  int64_t q_stride = 0;      // floats between rows
  int32_t num_qo_heads = 0;
  KvLayer kv;
  BatchLayout batch;
  Arithmetic arithmetic = Arithmetic::f32;  // bf16: queries are rounded to it; of bf16 pages
  float sm_scale = 1.0f;
  float noise = 0.0f;  // as much of the rows' noise is added to logits
  // Row by row, so that several rows of a step give the bits of a step each.
  bool by_row = false;
  std::string_view name;  // of the rows that are added; others are another node's
  const ScoredRows* scored = nullptr;
  int64_t num_scored = 0;
  int32_t first_head = 0;  // of a plane, for KV head 0 of this layer
};

std::string describe(const AttentionMassProblem& problem);
Cost cost(const AttentionMassProblem& problem);

}  // namespace effinfer::ops
