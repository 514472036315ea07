// The appending of keys and values to the engine's pages, with what precedes it: an optional RMS
// norm of each head (Qwen3, Gemma 3) and rotary embedding.
#pragma once

#include <cstdint>
#include <string>

#include "ops/cost.h"
#include "ops/kv_layout.h"

namespace effinfer::ops {

// With `q` it also norms and rotates the queries: q_out[T, num_qo_heads * head_dim].
struct RopeAppendProblem {
  const float* q = nullptr;  // [T, num_qo_heads * head_dim]; null: append only
  int64_t q_stride = 0;
  const float* k = nullptr;  // [T, num_kv_heads * head_dim]
  int64_t k_stride = 0;
  const float* v = nullptr;
  int64_t v_stride = 0;
  float* q_out = nullptr;
  int64_t q_out_stride = 0;
  int32_t num_qo_heads = 0;
  const float* q_norm = nullptr;  // [head_dim]; null: none
  const float* k_norm = nullptr;
  float norm_eps = 0.0f;
  const float* cos_sin = nullptr;  // [T, 2, rope_dims / 2]; null: no rotation
  int32_t rope_dims = 0;           // leading dimensions of a head that rotate
  bool interleaved = false;        // pairs (2i, 2i+1) as in GGUF llama; else (i, i + rope_dims / 2)
  KvLayer kv;
  BatchLayout batch;
};

std::string describe(const RopeAppendProblem& problem);
Cost cost(const RopeAppendProblem& problem);

// " kv_heads=3 head_dim=64 kv_dtype=bf16"
std::string describe_kv(const KvLayer& kv);
// Bytes of K and V of one token, all heads.
int64_t kv_token_bytes(const KvLayer& kv);

}  // namespace effinfer::ops
