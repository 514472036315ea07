// Forbidden tokens' logits, in place: a thread a logit, the threads of a warp one word of the mask.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/unit.h"
#include "ops/row_sampling.h"

namespace effinfer::cuda {

struct TokenBitmaskParams {
  ops::TokenBitmaskProblem problem;
  int64_t parts;  // blocks of a row
};

struct TokenBitmask {
  static constexpr const char* kName = "token_bitmask";
  static constexpr int kThreads = 256;
  static constexpr int kLogits = 4096;  // of a block
  using Params = TokenBitmaskParams;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared&) {
    const ops::TokenBitmaskProblem& p = params.problem;
    const int64_t output = unit.block / params.parts;
    const int64_t row = p.row_of(output);
    const int32_t* mask = p.bitmask + row * ((p.vocab + 31) / 32);
    const int64_t begin = unit.block % params.parts * kLogits;
    EFFINFER_UNROLL
    for (int i = 0; i < kLogits / kThreads; ++i) {
      const int64_t token = begin + i * kThreads + unit.thread;
      if (token >= p.vocab) continue;
      const auto word = static_cast<uint32_t>(unit.load(mask + token / 32));
      if ((word >> token % 32 & 1) != 0) continue;
      if (p.dtype == DType::f32) {
        static_cast<float*>(p.logits)[row * p.vocab + token] = -INFINITY;
      } else {
        static_cast<uint16_t*>(p.logits)[row * p.vocab + token] =
            p.dtype == DType::f16 ? 0xfc00 : 0xff80;
      }
    }
  }
};

}  // namespace effinfer::cuda
