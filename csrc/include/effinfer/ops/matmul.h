// Matrix products with packed, possibly quantised weights.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "effinfer/executor.h"
#include "effinfer/export.h"
#include "effinfer/tensor.h"

namespace effinfer::ops {

// How a product is computed.
//   int8  activations rounded to int8 with a scale for each 16 values, exact integer sums; needs
//         quantised weights. A row's result is the same bits for any number of rows.
//   bf16  weights and activations rounded to bfloat16, sums in float32; needs AVX512-BF16.
//   f32   float32 throughout.
//   int8_token  activations rounded to int8 with one scale for each row, exact integer sums; needs
//         weights packed as t2 or t1_6.
enum class MatmulArithmetic : uint8_t { int8, bf16, f32, int8_token };
EFFINFER_API MatmulArithmetic parse_matmul_arithmetic(std::string_view text);

// How ternary weights (tq1_0, tq2_0, i2_s) are packed: 2 bits or 1.6 bits a weight for int8_token,
// or like any other type of blocks for the rest.
enum class TernaryPacking : uint8_t { none, t2, t1_6 };
EFFINFER_API TernaryPacking parse_ternary_packing(std::string_view text);

// How products of int8_token are computed; all give the same bits. `automatic` is what is faster,
// multiplications of integers at every level that there is now.
enum class TernaryMethod : uint8_t { automatic, integer, lookup };
EFFINFER_API TernaryMethod parse_ternary_method(std::string_view text);

// The kernel that multiplies quantised weights at the current ISA level: "matmul.avx512.bf16".
// Throws Unsupported where there is none.
EFFINFER_API std::string matmul_kernel(MatmulArithmetic arithmetic);

// A weight matrix [rows, cols] in the layout of the kernels. Immutable; copies share the bytes.
class EFFINFER_API PackedMatrix {
 public:
  // Packs a rank-2 tensor of f32, f16, bf16 or any GGUF block type. Throws InvalidArgument on
  // another shape or dtype, a null pointer or `ternary` packing of weights that are not,
  // OutOfMemory.
  PackedMatrix(const TensorView& weight, ThreadPool& pool,
               TernaryPacking ternary = TernaryPacking::none);

  int64_t rows() const;  // outputs
  int64_t cols() const;  // inputs
  DType dtype() const;   // of the tensor it was packed from
  std::string format() const;
  size_t num_bytes() const;
  Device device() const;
  // A copy in the memory of a GPU, which the host waits for; itself where it is there. Throws
  // OutOfMemory.
  PackedMatrix to(Device device) const;
  // The values of the tensor, bit for bit: out[rows * cols]. Of the CPU's; throws InvalidArgument.
  void unpack(float* out) const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<const Impl> impl_;
};

// out[n, rows] = x[n, cols] weight^T + bias[rows] + residual[n, rows], all float32 and contiguous;
// bias and residual may be null, residual may be out. Throws InvalidArgument on a null pointer or
// a negative count, a method of another arithmetic or a matrix on another device, Unsupported when
// no kernel fits (int8 with dense weights, bf16 without AVX512-BF16), OutOfMemory. Products of int8
// and of int8_token have the same bits on GPUs.
EFFINFER_API void matmul(const float* x, int64_t n, const PackedMatrix& weight,
                         MatmulArithmetic arithmetic, const float* bias, const float* residual,
                         float* out, const Executor& executor,
                         TernaryMethod method = TernaryMethod::automatic);

// The int8 operand that `matmul` makes of x [n, cols]: q[n, cols] and a scale for each 16 values of
// a row, scales[n, ceil(cols / 16)]; value = scale * q. What a reference of the int8 arithmetic
// starts from.
EFFINFER_API void quantize_activation(const float* x, int64_t n, int64_t cols, int8_t* q,
                                      float* scales);

// The int8_token operand: q[n, cols] and one scale a row, scales[n].
EFFINFER_API void quantize_tokens(const float* x, int64_t n, int64_t cols, int8_t* q,
                                  float* scales);

}  // namespace effinfer::ops
