// Operators that make each number of one or two: a thread a number, blocks in strides of the grid.
#pragma once

#include "cuda/bodies/activation.h"
#include "cuda/unit.h"
#include "ops/elementwise.h"
#include "ops/int32_operand.h"

namespace effinfer::cuda {

struct UnaryKernel {
  static constexpr const char* kName = "unary";
  static constexpr int kThreads = 256;
  using Params = ops::UnaryProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int64_t size = p.rows * p.cols;
    const int64_t step = int64_t{unit.num_blocks} * kThreads;
    EFFINFER_NO_UNROLL
    for (int64_t i = int64_t{unit.block} * kThreads + unit.thread; i < size; i += step) {
      const int64_t row = i / p.cols;
      const int64_t col = i % p.cols;
      p.out[row * p.out_stride + col] = apply(p.op, p.x[row * p.x_stride + col], p.parameter);
    }
  }
};

struct BinaryKernel {
  static constexpr const char* kName = "binary";
  static constexpr int kThreads = 256;
  using Params = ops::BinaryProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int64_t step = int64_t{unit.num_blocks} * kThreads;
    for (int64_t i = int64_t{unit.block} * kThreads + unit.thread; i < p.size; i += step) {
      p.out[i] = p.op == ops::BinaryOp::add ? p.a[i] + p.b[i] : p.a[i] * p.b[i];
    }
  }
};

struct NarrowKernel {
  static constexpr const char* kName = "narrow";
  static constexpr int kThreads = 256;
  using Params = ops::NarrowProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int64_t step = int64_t{unit.num_blocks} * kThreads;
    for (int64_t i = int64_t{unit.block} * kThreads + unit.thread; i < p.size; i += step) {
      p.to[i] = static_cast<int32_t>(p.from[i]);
    }
  }
};

}  // namespace effinfer::cuda
