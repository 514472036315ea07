// Merging the states of attention over disjoint sets of keys: a state is the output v of a part and
// s, the log-sum-exp of its scores (Ye et al., "FlashInfer", arXiv:2501.01005, section 3.1). The
// merge is associative and commutative up to rounding.
#pragma once

#include <cstdint>

#include "effinfer/executor.h"
#include "effinfer/export.h"
#include "effinfer/tensor.h"

namespace effinfer::ops {

enum class LseBase : uint8_t { two, e };  // s = log_base(sum exp(score))

// v: f32, f16 or bf16 [T, S, H, D]; s: f32 [T, S, H]. Writes out_v [T, H, D] of v's dtype and out_s
// float32 [T, H]. A state with s = -infinity is ignored, whatever its v holds; with no other state
// v is 0 and s is -infinity. Throws InvalidArgument.
EFFINFER_API void merge_states(const TensorView& v, const TensorView& s, LseBase base, void* out_v,
                               float* out_s, const Executor& executor);

// The same for two states of [T, H, D] and [T, H]; out_v may be v_a's data and out_s s_a's.
// `mask`: u8 [T] or no data; where it is 0 nothing is written.
EFFINFER_API void merge_state(const TensorView& v_a, const TensorView& s_a, const TensorView& v_b,
                              const TensorView& s_b, const TensorView& mask, LseBase base,
                              void* out_v, float* out_s, const Executor& executor);

}  // namespace effinfer::ops
