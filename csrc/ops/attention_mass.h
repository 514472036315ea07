// What keys get of the attention of some rows of a step, in planes of their sequences: for each KV
// head and slot the softmax probabilities that the head's query heads give, row after row.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "effinfer/slot_plane.h"
#include "ops/attention.h"
#include "ops/cost.h"
#include "ops/kv_layout.h"
#include "ops/mass_rule.h"
#include "ops/operand.h"

namespace effinfer::ops {

// On a GPU, whose kernels are launched for up to kMassPairs rows and query heads of a KV head at a
// time; blocks have kMassKeys keys each.
inline constexpr int32_t kMassPairs = 64;
inline constexpr int32_t kMassKeys = 1024;
inline constexpr int32_t kMostMassDims = 256;

// Floats of AttentionMassProblem::sums.
constexpr int64_t mass_sums(int64_t sequences, int64_t kv_heads, int64_t max_kv_len) {
  const int64_t parts = (max_kv_len + kMassKeys - 1) / kMassKeys;
  return sequences * kv_heads * parts * kMassPairs * 2;
}

// ScoredRows without their name.
struct MassRows {
  float* plane = nullptr;
  int64_t plane_stride = 0;
  const float* noise = nullptr;  // null: none
  int64_t noise_stride = 0;
  int32_t sequence = 0;
  int32_t count = 0;  // the sequence's last ones
};

struct AttentionMassProblem {
  const float* q = nullptr;  // [T, num_qo_heads, head_dim], roped
  int64_t q_stride = 0;      // floats between rows
  int32_t num_qo_heads = 0;
  KvLayer kv;
  BatchLayout batch;
  Arithmetic arithmetic = Arithmetic::f32;  // bf16: queries are rounded to it; of bf16 pages
  float sm_scale = 1.0f;
  float noise = 0.0f;  // as much of the rows' noise is added to logits
  // Row by row, so that several rows of a step give the bits of a step each, and those of what
  // attention has kept.
  bool by_row = false;
  std::string_view name;  // of the rows that are added; others are another node's
  MassRule rule;
  const ScoredRows* scored = nullptr;
  int64_t num_scored = 0;
  int32_t first_head = 0;  // of a plane, for KV head 0 of this layer
  // What the step's attention has kept of its rows (AttentionProblem::mass), each the only one of
  // its sequence: the sums are made of that.
  KeptWeights kept;

  int32_t max_kv_len = 0;  // of the sequences that have rows, at most

  // On a GPU: the rows of this name in its memory, planes in memory that it shares with the host.
  const MassRows* rows = nullptr;
  int32_t num_rows = 0;    // MassRows
  int32_t most_count = 0;  // of them
  float* sums = nullptr;   // mass_sums() of them
};

std::string describe(const AttentionMassProblem& problem);
Cost cost(const AttentionMassProblem& problem);

}  // namespace effinfer::ops
