// Passes over a row of logits. Each is a plain loop over 16 independent lanes that a compiler turns
// into SIMD, with one order of operations, so that a draw is the same on every machine.
#pragma once

#include <cstdint>
#include <span>

namespace effinfer::runtime {

// The highest logit. Throws InvalidArgument for a NaN, +infinity, or nothing above -infinity.
float checked_max(std::span<const float> logits);
// The first index whose value is `value`, which must occur.
int32_t index_of(std::span<const float> values, float value);
// out[i] = (logits[i] - max) / temperature, at most 0.
void log_weights(std::span<const float> logits, float max, float temperature, float* out);
// out[i] = exp(x[i]) for x <= 0 (0 below -87), within 2 ulp; returns the sum. `out` may be null.
double exp_sum(std::span<const float> x, float shift, float* out);
// exp(x) of the above for one number.
float exp_nonpositive(float x);

}  // namespace effinfer::runtime
