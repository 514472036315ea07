// Rotary position embedding (Su et al., "RoFormer", arXiv:2104.09864, section 3.4) and the ways in
// which models stretch it to longer contexts.
#pragma once

#include <cstdint>
#include <vector>

#include "effinfer/executor.h"
#include "effinfer/export.h"
#include "effinfer/tensor.h"

namespace effinfer {

// none    inv_freq[i] = theta^(-2i / dims)
// linear  position interpolation, inv_freq / factor (Chen et al., arXiv:2306.15595)
// llama3  wavelengths above original / low_freq_factor are stretched by `factor`, those below
//         original / high_freq_factor are kept, a linear ramp between (Llama 3.1 release)
// yarn    "NTK by parts", arXiv:2309.00071 section 3.2: a ramp from extrapolation to interpolation
//         between the dimensions that turn beta_fast and beta_slow times within the original
//         context, and section 3.4: cos and sin are scaled by the attention factor
enum class RopeScaling : uint8_t { none, linear, llama3, yarn };

struct RopeParameters {
  float theta = 10000.0f;
  int32_t dims = 0;  // leading dimensions of a head that rotate
  RopeScaling scaling = RopeScaling::none;
  float factor = 1.0f;
  float original_max_position = 0.0f;  // llama3, yarn
  float low_freq_factor = 1.0f;        // llama3
  float high_freq_factor = 4.0f;       // llama3
  float beta_fast = 32.0f;             // yarn
  float beta_slow = 1.0f;              // yarn
  float attention_factor = 0.0f;       // yarn: 0 means 0.1 ln(factor) + 1
};

// "none", "linear", "llama3", "yarn"; throws InvalidArgument otherwise.
EFFINFER_API RopeScaling parse_rope_scaling(std::string_view text);

namespace ops {

struct RopeFrequencies {
  std::vector<float> inv_freq;  // [dims / 2], radians a position
  float factor = 1.0f;          // on cos and sin
};

// Frequencies in float32, operation by operation as the reference implementations compute them.
// `divisors` (float32 [dims / 2], or a view without data) divides them: rope_freqs.weight of GGUF
// files. Throws InvalidArgument for parameters that define no rotation.
EFFINFER_API RopeFrequencies rope_frequencies(const RopeParameters& parameters,
                                              const TensorView& divisors = {});

// out[T, 2, dims / 2] = cos and sin of float32(position * inv_freq), each times `factor`.
// `positions` int32 or int64 [T], within int32.
EFFINFER_API void rope_table(const TensorView& positions, const RopeFrequencies& frequencies,
                             float* out, const Executor& executor);

// The positions of the rows of a batch: row indptr[s] + i stands at offsets[s] + i. `indptr` [S +
// 1] ascends from 0 to `rows`, offsets [S], both int32 or int64; positions must fit in int32.
EFFINFER_API void rope_positions(const TensorView& indptr, const TensorView& offsets, int64_t rows,
                                 int32_t* out);
// The same where the executor's arrays lie; nobody looks at the values of a GPU's.
EFFINFER_API void rope_positions(const TensorView& indptr, const TensorView& offsets, int64_t rows,
                                 int32_t* out, const Executor& executor);

// Rotates the leading `dims` of each head of q [T, *, head_dim] and k [T, *, head_dim] by the
// angles of a table, into q_out and k_out (which may be q and k), and copies the others: pairs
// (i, i + dims / 2), or (2i, 2i + 1) when `interleaved`.
//   q, k           float32, float16 or bfloat16, contiguous heads
//   cos_sin_cache  float32 [N, dims]: dims / 2 cosines, then the sines
//   positions      int32 or int64 [T]: the entry of each row; no data: row t has entry t
// Arithmetic is float32, rounded once at the end. Throws InvalidArgument for other shapes and
// positions outside the table.
EFFINFER_API void apply_rope(const StridedView& q, const StridedView& k,
                             const TensorView& cos_sin_cache, const TensorView& positions,
                             bool interleaved, const StridedView& q_out, const StridedView& k_out,
                             const Executor& executor);
// The same by the angles of the rows' positions, int32 or int64 [T].
EFFINFER_API void apply_rope(const StridedView& q, const StridedView& k,
                             const RopeFrequencies& frequencies, const TensorView& positions,
                             bool interleaved, const StridedView& q_out, const StridedView& k_out,
                             const Executor& executor);

}  // namespace ops
}  // namespace effinfer
