// The small operators between matmuls and attention: problems of one row-parallel pass each.
#pragma once

#include <cstdint>
#include <string>

#include "effinfer/dtype.h"
#include "effinfer/ops/rope.h"
#include "ops/cost.h"
#include "ops/operand.h"
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

// Vectors in a grid of `groups` a row, each contiguous: strides in elements.
template <class Void>
struct RowsOf {
  Void* data = nullptr;
  int64_t stride = 0;
  int64_t group_stride = 0;

  template <class T>
  [[gnu::always_inline]] T* at(int64_t row, int64_t group) const {
    if (data == nullptr) return nullptr;
    return static_cast<T*>(data) + row * stride + group * group_stride;
  }
};
using ConstRows = RowsOf<const void>;
using Rows = RowsOf<void>;

// RMS norm over each group of `cols` values of a row: y = x / sqrt(mean(x^2) + eps) * weight.
// With `add_to`: the row first becomes x + add_to's row, and the sum is written back to `sum_out`
// (fused residual add). The result goes to `out` as floats or to `out_operand` as a matmul operand.
// The mean is accumulated in a fixed order (16 float lanes, then a fixed tree): the same bits at
// every ISA level and team size.
struct RmsNormProblem {
  DType dtype = DType::f32;  // of x, add_to, sum_out and out: f32, f16 or bf16
  ConstRows x;
  int64_t rows = 0;
  int64_t groups = 1;  // heads, for q/k norm; 1 otherwise
  int64_t cols = 0;
  DType weight_dtype = DType::f32;  // f32, or dtype
  const void* weight = nullptr;     // [cols]; null: ones
  float weight_offset = 0.0f;       // added to the weights: 1 in Gemma's files
  float eps = 1e-6f;
  ConstRows add_to;     // no data: none
  Rows sum_out;         // may alias x or add_to
  Rows out;             // may alias x
  Operand out_operand;  // groups == 1 only
};

// y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias, in the same fixed order.
struct LayerNormProblem {
  DType dtype = DType::f32;  // of x and out: f32, f16 or bf16
  ConstRows x;
  int64_t rows = 0;
  int64_t groups = 1;
  int64_t cols = 0;
  DType weight_dtype = DType::f32;  // of weight and bias: f32, or dtype
  const void* weight = nullptr;     // [cols]
  const void* bias = nullptr;       // [cols]
  float eps = 1e-6f;
  Rows out;  // may alias x
};

enum class GatedOp : uint8_t { silu, gelu, gelu_tanh };

// out = op(x[:cols]) * x[cols:]: the middle of a gated MLP.
struct GatedProblem {
  GatedOp op = GatedOp::silu;
  DType dtype = DType::f32;  // of x and out: f32, f16 or bf16
  ConstRows x;               // vectors of 2 * cols
  int64_t rows = 0;
  int64_t groups = 1;
  int64_t cols = 0;
  Rows out;  // vectors of cols
};

enum class UnaryOp : uint8_t { copy, scale, softcap, silu, gelu_tanh, relu_squared };
enum class BinaryOp : uint8_t { add, mul };

// out = op(x), element by element; `parameter` is the factor of scale and the cap of softcap.
struct UnaryProblem {
  UnaryOp op = UnaryOp::copy;
  float parameter = 1.0f;
  const float* x = nullptr;  // [rows, cols] with x_stride
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t x_stride = 0;
  float* out = nullptr;  // [rows, cols] with out_stride; may alias x
  int64_t out_stride = 0;
};

struct BinaryProblem {
  BinaryOp op = BinaryOp::add;
  const float* a = nullptr;  // [size]
  const float* b = nullptr;
  int64_t size = 0;
  float* out = nullptr;  // may alias a or b
};

// out[i] = x[rows[i]]: the rows whose logits are wanted.
struct SelectRowsProblem {
  const float* x = nullptr;  // [*, cols]
  const int32_t* rows = nullptr;
  int64_t num_rows = 0;
  int64_t cols = 0;
  float* out = nullptr;  // [num_rows, cols]
};

// How positions become angles; the cos/sin of a step are computed once and shared by all layers.
using effinfer::RopeParameters;
using effinfer::RopeScaling;
// inv_freq[dims / 2] in float32 as the reference implementations compute it; `divisors` (GGUF
// rope_freqs.weight, may be null) divides each frequency. Returns the factor on cos and sin.
float rope_inv_freq(const RopeParameters& parameters, const float* divisors, float* inv_freq);

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

std::string describe(const EmbeddingProblem& problem);
std::string describe(const RmsNormProblem& problem);
std::string describe(const LayerNormProblem& problem);
std::string describe(const GatedProblem& problem);
std::string describe(const UnaryProblem& problem);
std::string describe(const BinaryProblem& problem);
std::string describe(const SelectRowsProblem& problem);
std::string describe(const RopeTableProblem& problem);
std::string describe(const RopeProblem& problem);

Cost cost(const EmbeddingProblem& problem);
Cost cost(const RmsNormProblem& problem);
Cost cost(const LayerNormProblem& problem);
Cost cost(const GatedProblem& problem);
Cost cost(const UnaryProblem& problem);
Cost cost(const BinaryProblem& problem);
Cost cost(const SelectRowsProblem& problem);
Cost cost(const RopeTableProblem& problem);
Cost cost(const RopeProblem& problem);

}  // namespace effinfer::ops
