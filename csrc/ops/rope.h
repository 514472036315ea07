// Rotary position embedding: the angles of a step's positions, and the rotation of heads.
#pragma once

#include <cstdint>
#include <string>

#include "effinfer/dtype.h"
#include "effinfer/ops/rope.h"
#include "ops/cost.h"
#include "ops/rows.h"

namespace effinfer::ops {

// inv_freq[dims / 2] in float32 as the reference implementations compute it; `divisors` (GGUF
// rope_freqs.weight, may be null) divides each frequency. Returns the factor on cos and sin.
float rope_inv_freq(const RopeParameters& parameters, const float* divisors, float* inv_freq);

// The cosines and sines of a step are computed once and shared by all layers.
struct RopeTableProblem {
  const int32_t* positions = nullptr;  // [rows]
  int64_t rows = 0;
  int32_t dims = 0;
  const float* inv_freq = nullptr;  // [dims / 2]
  float factor = 1.0f;
  float* out = nullptr;  // [rows, 2, dims / 2]: cos, then sin
};

// Rotates the leading `dims` of each head; unfused form of RopeAppendProblem.
struct RopeProblem {
  DType dtype = DType::f32;  // of x and out: f32, f16 or bf16
  ConstRows x;               // a head is a group
  int64_t rows = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;
  int32_t dims = 0;
  bool interleaved = false;
  const float* cos_sin = nullptr;      // [*, 2, dims / 2]
  const int32_t* positions = nullptr;  // [rows]: entries of cos_sin; null: 0, 1, ...
  Rows out;                            // may alias x
};

std::string describe(const RopeTableProblem& problem);
std::string describe(const RopeProblem& problem);
const char* rejects(const RopeTableProblem& problem);
const char* rejects(const RopeProblem& problem);
Cost cost(const RopeTableProblem& problem);
Cost cost(const RopeProblem& problem);

}  // namespace effinfer::ops
