// Rows of int8 operands (ops/operand.h): a thread 32 numbers, with the bits that the CPU writes.
#pragma once

#include "cuda/bodies/int8_scale.h"
#include "cuda/bodies/row_chunks.h"
#include "cuda/unit.h"
#include "ops/operand.h"

namespace effinfer::cuda {

struct Int8RowsParams {
  const float* x = nullptr;
  int64_t x_stride = 0;
  uint8_t* out = nullptr;
  int64_t row_bytes = 0;
  int64_t rows = 0;
  int cols = 0;
  int padded = 0;
  bool vectored = false;
};

struct Int8RowsKernel {
  static constexpr const char* kName = "to_operand_int8";
  static constexpr int kThreads = 128;
  static constexpr int kBlock = static_cast<int>(ops::kOperandBlock);
  static constexpr int kScale = static_cast<int>(ops::kScaleBlock);
  using Params = Int8RowsParams;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int blocks = p.padded / kBlock;
    const int64_t index = int64_t{unit.block} * kThreads + unit.thread;
    if (index >= p.rows * blocks) return;
    const int block = static_cast<int>(index % blocks);
    const float* x = p.x + index / blocks * p.x_stride;
    uint8_t* record = p.out + index / blocks * p.row_bytes;
    auto* scales = reinterpret_cast<float*>(record + p.padded);
    auto* biases = reinterpret_cast<int32_t*>(record + p.padded + p.padded / 4);
    auto* scaled = reinterpret_cast<float*>(record + p.padded + p.padded / 2);
    float sum = 0.0f;
    EFFINFER_NO_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int first = block * kBlock + half * kScale;
      const Rounded rounded = round(unit, p, x, first, record);
      scales[2 * block + half] = rounded.scale;
      biases[2 * block + half] = -128 * rounded.sum;
      sum += unit.mul(rounded.scale, static_cast<float>(rounded.sum));
    }
    scaled[block] = sum;
  }

 private:
  struct Rounded {
    float scale;
    int32_t sum;
  };

  // Numbers first .. first + 15 of a row, zeros behind its end.
  template <class Unit>
  EFFINFER_DEVICE static Rounded round(Unit& unit, const Params& p, const float* x, int first,
                                       uint8_t* record) {
    float values[kScale];
    load_floats(unit, x, first, p.cols, p.vectored, values);
    uint32_t bits = 0;
    EFFINFER_UNROLL
    for (int i = 0; i < kScale; ++i) {
      const uint32_t own = magnitude_bits(values[i]);
      bits = first + i < p.cols && own > bits ? own : bits;
    }
    const Int8Scale scale(bits);
    Quad packed = {};
    int32_t sum = 0;
    EFFINFER_UNROLL
    for (int i = 0; i < kScale; ++i) {
      const int32_t q = first + i < p.cols ? scale.round(values[i]) : 0;
      packed.words[i / 4] |= static_cast<uint32_t>(q & 255) << 8 * (i % 4);
      sum += q;
    }
    *reinterpret_cast<Quad*>(record + first) = packed;
    return {scale.scale, sum};
  }
};

}  // namespace effinfer::cuda
