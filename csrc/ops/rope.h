// Rotary position embedding: the angles of a step's positions, and the rotation of heads.
#pragma once

#include <cstdint>
#include <string>

#include "effinfer/dtype.h"
#include "effinfer/ops/rope.h"
#include "ops/cost.h"
#include "ops/kv_layout.h"
#include "ops/rows.h"

namespace effinfer::ops {

// inv_freq[dims / 2] in float32 as the reference implementations compute it; `divisors` (GGUF
// rope_freqs.weight, may be null) divides each frequency. Returns the factor on cos and sin.
float rope_inv_freq(const RopeParameters& parameters, const float* divisors, float* inv_freq);

// What a step's positions become before they are multiplied with frequencies: min(p mod period +
// shift, most). In chunks of `period` tokens (dual chunk attention, An et al., arXiv:2402.17463)
// keys stand at their places in them, and queries at distances that a model was trained for.
struct RopeMap {
  int32_t period = 0;  // 0: positions stay as they are
  int32_t shift = 0;
  int32_t most = -1;  // -1: none
  // Rows of so many tokens or more before them, themselves included, are as much larger as YaRN's
  // temperature (Peng et al., arXiv:2309.00071) makes logits, (0.1 ln(tokens / this) + 1)^2; 0:
  // none.
  int32_t tempered_from = 0;

  constexpr int32_t place(int32_t position) const {
    if (period == 0) return position;
    const int64_t shifted = int64_t{position % period} + shift;
    return static_cast<int32_t>(most < 0 || shifted < most ? shifted : most);
  }
  // log: the natural logarithm of a double.
  template <class Log>
  constexpr float growth(int32_t position, Log&& log) const {
    if (tempered_from == 0 || position < tempered_from) return 1.0f;
    const double root = 0.1 * log((position + 1.0) / tempered_from) + 1.0;
    return static_cast<float>(root * root);
  }
};

// The cosines and sines of a step are computed once and shared by all layers.
struct RopeTableProblem {
  const int32_t* positions = nullptr;  // [rows]
  int64_t rows = 0;
  int32_t dims = 0;
  const float* inv_freq = nullptr;  // [dims / 2]
  float factor = 1.0f;
  RopeMap map;
  BatchLayout batch;     // of a map: whose rows it is for
  float* out = nullptr;  // [rows, 2, dims / 2]: cos, then sin

  constexpr bool maps() const { return map.period > 0 || map.tempered_from > 0; }
  // Whether the map is for the sequence of a row.
  constexpr bool is_mapped(int64_t row) const {
    if (batch.unchunked == nullptr) return true;
    int64_t low = 0;
    for (int64_t high = batch.num_sequences; low < high;) {
      const int64_t middle = (low + high) / 2;
      if (batch.qo_indptr[middle + 1] <= row) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    // Rows of none are those that a GPU's steps are rounded up by.
    return low < batch.num_sequences && !batch.is_unchunked(low);
  }
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

std::string describe(const RopeTableProblem& problem);
std::string describe(const RopeProblem& problem);
const char* rejects(const RopeTableProblem& problem);
const char* rejects(const RopeProblem& problem);
Cost cost(const RopeTableProblem& problem);
Cost cost(const RopeProblem& problem);

}  // namespace effinfer::ops
