// y = x W^T for one operand and one to four weight matrices, with the element-wise work that
// follows.
//
// The operand's arithmetic picks the kernel:
//   int8  exact integer dot products over blocks, float scales added in the order of k. A row's
//         result is the same bits for any number of rows, any team size and any batch.
//   int8_token  ternary weights: out = float(i) * (scale_x * scale_w) with i the exact integer sum;
//         where scales differ between blocks of 256, out = scale_x * s with s = fma(float(i), d, s)
//         over the blocks. The same bits for every packing, kernel and ISA level.
//   bf16  a panel of outputs is dequantised to bfloat16 in cache, products accumulate in float32.
//   f32   the same with float32 panels. A row's result does not depend on the other rows either.
#pragma once

#include <cstdint>
#include <string>

#include "effinfer/ops/elementwise.h"
#include "ops/cost.h"
#include "ops/limits.h"
#include "ops/operand.h"
#include "ops/packed_weight.h"
#include "ops/top_list.h"

namespace effinfer::ops {

struct MatmulPart {
  PackedWeight weight;
  const float* bias = nullptr;      // [N]; null: none
  const float* residual = nullptr;  // [rows, N] with out_stride, added last; may alias out
  float* out = nullptr;             // [rows, N]
  int64_t out_stride = 0;           // floats between rows of out and of residual
};

// The weights of the matmul that runs next. A GPU may ask for some of them, `bytes` at most, while
// this matmul still waits for its operand, so that they then come from its second cache; CPUs do
// not look at them.
struct NextWeights {
  int num_parts = 0;  // 0: none
  PackedWeight parts[kMaxMatmulParts];
  int64_t bytes = 0;
};

struct MatmulProblem {
  Operand x;
  int num_parts = 0;
  MatmulPart parts[kMaxMatmulParts];
  // With two parts of equal size, an activation f: f(part 0) * part 1, written to parts[0].out.
  UnaryOp glu = UnaryOp::none;
  // With glu: write an operand for the next matmul instead of floats when its data is set.
  Operand out_operand;
  // With a bf16 operand on a GPU: weights are rounded to bfloat16, scales included, as CPUs do.
  // False: they are exact.
  bool rounds_weights = false;
  // With one part: its `top_k` highest outputs go to the lists [team][rows], which the caller has
  // cleared, and nothing to `out`, when `top` is set.
  TopList* top = nullptr;
  int32_t top_k = 0;
  NextWeights next;
};

// One row times the smallest matrix that all kernels of an arithmetic take, without data.
MatmulProblem smallest_matmul(Arithmetic arithmetic);

std::string describe(const MatmulProblem& problem);
Cost cost(const MatmulProblem& problem);

}  // namespace effinfer::ops
