// Attention over parts of the keys, put together: each part gives a state (v, s), its output and
// the log-sum-exp of its scores, and the states' weighted mean is attention over all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "effinfer/dtype.h"

namespace effinfer::ops {

// v = sum_i w_i v_i / sum_i w_i with w_i = base^(s_i), and s = log_base(sum_i w_i), for each token
// and head. A state with s = -infinity weighs nothing and its v is not read; when all do, v = 0 and
// s = -infinity.
struct MergeStatesProblem {
  const void* const* v = nullptr;   // [num_states], each [tokens, heads, head_dim] with v_stride
  const float* const* s = nullptr;  // [num_states], each [tokens, heads] with s_stride
  int64_t num_states = 0;
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t v_stride = 0;  // elements from token to token
  int64_t s_stride = 0;
  DType dtype = DType::f32;       // of all v: f32, f16 or bf16
  bool natural = false;           // s in base e, else in base 2
  const uint8_t* mask = nullptr;  // [tokens]; where 0 the outputs stay as they are; null: all ones
  void* out_v = nullptr;          // [tokens, heads, head_dim]; may be v[0]
  float* out_s = nullptr;         // [tokens, heads]; may be s[0]
};

std::string describe(const MergeStatesProblem& problem);
const char* rejects(const MergeStatesProblem& problem);
size_t scratch_bytes(const MergeStatesProblem& problem);  // the weights of one head's states

}  // namespace effinfer::ops
