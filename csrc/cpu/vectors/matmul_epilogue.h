// What follows the sums of a unit: bias, GLU, residual, and the store as floats, as an operand or
// into lists of the highest outputs.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/matmul_units.h"
#include "cpu/vectors/activation.h"
#include "cpu/vectors/operand_rows.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

struct MatmulEpilogue {
  static constexpr int kWidth = static_cast<int>(kUnitOutputs);
  using Sums = float[kWidth];

  // Tokens [first_token, first_token + count): sums[i] of part 0 and, with GLU, gates[i] of part 1.
  static void run(const ops::MatmulProblem& problem, const MatmulUnit& unit, int64_t first_token,
                  int64_t count, const Sums* sums, const Sums* sums1) {
    float bias[2][kWidth];
    for (int i = 0; i < unit.num_parts; ++i) {
      const float* source = unit.parts[i].bias;
      load(source == nullptr ? nullptr : source + unit.first_output, unit.num_outputs, bias[i]);
    }
    const ops::MatmulPart& part = unit.parts[0];
    for (int64_t i = 0; i < count; ++i) {
      float values[kWidth];
      for (int j = 0; j < kWidth; ++j) values[j] = sums[i][j] + bias[0][j];
      if (unit.num_parts == 2) {
        activate(problem.glu, values, sums1[i], bias[1]);
      }
      const int64_t token = first_token + i;
      if (part.residual != nullptr) {
        float residual[kWidth];
        load(part.residual + token * part.out_stride + unit.first_output, unit.num_outputs,
             residual);
        for (int j = 0; j < kWidth; ++j) values[j] += residual[j];
      }
      store(problem, unit, token, values);
    }
  }

 private:
  // values = f(values) * (sums + bias), with the f of the activation kernels.
  [[gnu::always_inline]] static void activate(ops::UnaryOp glu, float* values, const float* sums,
                                              const float* bias) {
    with_activation(glu, [&](auto function) {
      for (int j = 0; j < kWidth; j += F32x16::kWidth) {
        const F32x16 linear = F32x16::load(sums + j) + F32x16::load(bias + j);
        (function(F32x16::load(values + j)) * linear).store(values + j);
      }
    });
  }

  [[gnu::always_inline]] static void load(const float* source, int64_t count, float* out) {
    if (source == nullptr) {
      std::memset(out, 0, sizeof(Sums));
    } else if (count == kWidth) {
      std::memcpy(out, source, sizeof(Sums));
    } else {
      std::memset(out, 0, sizeof(Sums));
      std::memcpy(out, source, static_cast<size_t>(count) * sizeof(float));
    }
  }

  [[gnu::always_inline]] static void store(const ops::MatmulProblem& problem,
                                           const MatmulUnit& unit, int64_t token, float* values) {
    if (problem.top != nullptr) {
      keep_top(problem.top[unit.member * problem.x.rows + token], problem.top_k, unit, values);
      return;
    }
    if (problem.out_operand.data == nullptr) {
      const ops::MatmulPart& part = unit.parts[0];
      float* out = part.out + token * part.out_stride + unit.first_output;
      if (unit.num_outputs == kWidth) {
        std::memcpy(out, values, sizeof(Sums));
      } else {
        std::memcpy(out, values, static_cast<size_t>(unit.num_outputs) * sizeof(float));
      }
      return;
    }
    // Rows of zeros times a NaN are not zeros: the padding is written, not computed.
    for (int64_t j = unit.num_outputs; j < kWidth; ++j) values[j] = 0.0f;
    OperandRows::store_block(problem.out_operand, token, unit.index, values);
    if (unit.first_output + kWidth >= problem.out_operand.cols) {
      OperandRows::store_padding(problem.out_operand, token);
    }
  }

  // Almost all blocks hold nothing for the list and end at the first test.
  [[gnu::always_inline]] static void keep_top(ops::TopList& list, int32_t k, const MatmulUnit& unit,
                                              float* values) {
    for (int64_t j = unit.num_outputs; j < kWidth; ++j) {
      values[j] = -std::numeric_limits<float>::infinity();
    }
    int32_t highest = std::numeric_limits<int32_t>::min();
    int32_t magnitude = 0;
    for (int j = 0; j < kWidth; ++j) {
      const int32_t key = ops::order_key(values[j]);
      const int32_t bits = std::bit_cast<int32_t>(values[j]) & 0x7fffffff;
      highest = key > highest ? key : highest;
      magnitude = bits > magnitude ? bits : magnitude;
    }
    if (magnitude > 0x7f800000) list.nans = 1;
    if (highest < list.least) return;
    for (int j = 0; j < unit.num_outputs; ++j) {
      if (ops::order_key(values[j]) < list.least) continue;
      list.add({values[j], static_cast<int32_t>(unit.first_output) + j}, k);
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
