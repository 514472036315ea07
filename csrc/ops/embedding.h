// Rows picked by index: of the embedding table, and of what a step computed.
#pragma once

#include <cstdint>
#include <string>

#include "effinfer/dtype.h"
#include "ops/cost.h"
#include "ops/packed_weight.h"

namespace effinfer::ops {

// out[t] = scale * table[ids[t]], decoded from the file's own block type or, where a head shares
// the table, from its packed form: the bits are the same, and the table is in memory once.
struct EmbeddingProblem {
  const int32_t* ids = nullptr;  // [rows]; checked against vocab_size before the step
  int64_t rows = 0;
  const uint8_t* table = nullptr;  // [vocab_size, cols] in `dtype`; unused with `packed`
  const PackedWeight* packed = nullptr;
  DType dtype = DType::f32;
  int64_t vocab_size = 0;
  int64_t cols = 0;
  float scale = 1.0f;
  float* out = nullptr;  // [rows, cols]
};

// out[i] = x[rows[i]]: the rows whose logits are wanted.
struct SelectRowsProblem {
  const float* x = nullptr;  // [*, cols]
  const int32_t* rows = nullptr;
  int64_t num_rows = 0;
  int64_t cols = 0;
  float* out = nullptr;  // [num_rows, cols]
};

std::string describe(const EmbeddingProblem& problem);
std::string describe(const SelectRowsProblem& problem);
const char* rejects(const EmbeddingProblem& problem);
Cost cost(const EmbeddingProblem& problem);
Cost cost(const SelectRowsProblem& problem);

}  // namespace effinfer::ops
