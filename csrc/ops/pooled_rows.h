// Rows of several tokens made one, float32: what scores of blocks are computed from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "effinfer/dtype.h"
#include "ops/cost.h"

namespace effinfer::ops {

// Row g of `out` is the mean of the tokens of group g, or their rows one after the other with zeros
// where there is no token. A group is one chunk.
struct PoolRowsProblem {
  const uint8_t* const* tokens = nullptr;  // [num_groups][group_size] rows; null: no token
  int64_t num_groups = 0;
  int64_t group_size = 0;
  DType dtype = DType::f32;  // f32, f16 or bf16
  int64_t heads = 0;
  int64_t dims = 0;
  int64_t head_stride = 0;    // bytes
  bool concatenates = false;  // else means
  bool reverses = false;      // the last token first
  float* out = nullptr;       // [num_groups, heads, width()]

  int64_t width() const { return concatenates ? group_size * dims : dims; }
};

std::string describe(const PoolRowsProblem& problem);
const char* rejects(const PoolRowsProblem& problem);
Cost cost(const PoolRowsProblem& problem);

}  // namespace effinfer::ops
