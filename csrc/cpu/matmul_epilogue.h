// What follows the sums of a unit: bias, GLU, residual, and the store as floats or as an operand.
// Written once and compiled for each ISA level (see activation_rows.h); every operation is an IEEE
// single operation or a fused multiply-add, so the bits agree at all levels.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "cpu/activation_rows.h"
#include "cpu/matmul_units.h"

namespace effinfer::cpu {

template <class Level>
struct MatmulEpilogue {
  static constexpr int kWidth = static_cast<int>(kUnitOutputs);
  using Sums = float[kWidth];

  // Tokens [first_token, first_token + count): sums[i] of part 0 and, with GLU, gates[i] of part 1.
  static void run(const kernels::MatmulProblem& problem, const MatmulUnit& unit,
                  int64_t first_token, int64_t count, const Sums* sums, const Sums* sums1) {
    float bias[2][kWidth];
    for (int i = 0; i < unit.num_parts; ++i) {
      const float* source = unit.parts[i].bias;
      load(source == nullptr ? nullptr : source + unit.first_output, unit.num_outputs, bias[i]);
    }
    const kernels::MatmulPart& part = unit.parts[0];
    for (int64_t i = 0; i < count; ++i) {
      float values[kWidth];
      for (int j = 0; j < kWidth; ++j) values[j] = sums[i][j] + bias[0][j];
      if (unit.num_parts == 2) {
        float linear[kWidth];
        for (int j = 0; j < kWidth; ++j) linear[j] = sums1[i][j] + bias[1][j];
        if (problem.glu == kernels::Glu::silu) {
          for (int j = 0; j < kWidth; ++j) values[j] = silu(values[j]) * linear[j];
        } else {
          for (int j = 0; j < kWidth; ++j) values[j] = gelu_tanh(values[j]) * linear[j];
        }
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

  [[gnu::always_inline]] static void store(const kernels::MatmulProblem& problem,
                                           const MatmulUnit& unit, int64_t token, float* values) {
    if (problem.out_act.data == nullptr) {
      const kernels::MatmulPart& part = unit.parts[0];
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
    ActivationRows<Level>::store_block(problem.out_act, token, unit.index, values);
    if (unit.first_output + kWidth >= problem.out_act.cols) {
      ActivationRows<Level>::store_padding(problem.out_act, token);
    }
  }

  // e^x for |x| <= 87, clamped there: x = n ln 2 + r with |r| <= ln 2 / 2, a Taylor series of
  // degree 7 (its remainder r^8 / 8! is below 2^-27), times 2^n.
  [[gnu::always_inline]] static float exp(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 87.0f ? 87.0f : x;
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
    const float shifted = __builtin_fmaf(x, 0x1.715476p+0f, kRound);
    const float n = shifted - kRound;
    float r = __builtin_fmaf(n, -0x1.62e4p-1f, x);  // ln 2 in two parts: n * high is exact
    r = __builtin_fmaf(n, -0x1.7f7d1cp-20f, r);
    float p = 1.0f / 5040.0f;
    p = __builtin_fmaf(p, r, 1.0f / 720.0f);
    p = __builtin_fmaf(p, r, 1.0f / 120.0f);
    p = __builtin_fmaf(p, r, 1.0f / 24.0f);
    p = __builtin_fmaf(p, r, 1.0f / 6.0f);
    p = __builtin_fmaf(p, r, 0.5f);
    p = __builtin_fmaf(p, r, 1.0f);
    p = __builtin_fmaf(p, r, 1.0f);
    const uint32_t exponent = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound);
    return p * std::bit_cast<float>((exponent + 127u) << 23);
  }

  [[gnu::always_inline]] static float silu(float x) { return x / (1.0f + exp(-x)); }

  // x / 2 (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
  [[gnu::always_inline]] static float gelu_tanh(float x) {
    const float cubic = __builtin_fmaf(0.044715f * x * x, x, x);
    return x / (1.0f + exp(-1.5957691216f * cubic));
  }
};

}  // namespace effinfer::cpu
