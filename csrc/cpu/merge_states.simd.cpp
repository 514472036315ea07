// The weighted mean of attention states, a head at a time: weights first, in float32 with the
// greatest taken out, then the vectors in one pass over each 16 of their elements.
#include "ops/merge_states.h"

#include <string.h>

#include "core/float16.h"
#include "cpu/level.h"
#include "cpu/vectors/float_vector.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

using Problem = ops::MergeStatesProblem;

constexpr int64_t kLanes = 16;
// Elements that a chunk of work reads, roughly: a few microseconds.
constexpr int64_t kChunk = 32768;

// Fills `weights`, which add up to 1 (or are all 0), and returns the merged s. A NaN among the s
// makes everything a NaN.
float weigh(const Problem& p, int64_t token, int64_t head, float* weights) {
  const int64_t place = token * p.s_stride + head;
  float highest = -__builtin_inff();
  for (int64_t i = 0; i < p.num_states; ++i) {
    const float s = p.s[i][place];
    highest = s > highest ? s : highest;
  }
  // Without a finite state every weight is 0, and not exp(-inf + inf).
  const float shift = highest == -__builtin_inff() ? 0.0f : highest;
  float total = 0.0f;
  for (int64_t i = 0; i < p.num_states; ++i) {
    const float s = p.s[i][place] - shift;
    weights[i] = p.natural ? __builtin_expf(s) : __builtin_exp2f(s);
    total += weights[i];
  }
  if (total == 0.0f) return -__builtin_inff();
  for (int64_t i = 0; i < p.num_states; ++i) weights[i] /= total;
  return shift + (p.natural ? __builtin_logf(total) : __builtin_log2f(total));
}

template <class Element>
[[gnu::always_inline]] inline const Element* copy(const Element* from, int64_t count, Element* to) {
  memcpy(to, from, static_cast<size_t>(count) * sizeof(Element));
  return to;
}

template <class Element>
void mean(const Problem& p, int64_t token, int64_t head, const float* weights) {
  const int64_t place = token * p.v_stride + head * p.head_dim;
  Element* out = static_cast<Element*>(p.out_v) + (token * p.heads + head) * p.head_dim;
  for (int64_t d = 0; d < p.head_dim; d += kLanes) {
    const int64_t left = p.head_dim - d < kLanes ? p.head_dim - d : kLanes;
    F32x16 sum = F32x16::set(0.0f);
    for (int64_t i = 0; i < p.num_states; ++i) {
      if (weights[i] == 0.0f) continue;
      const Element* v = static_cast<const Element*>(p.v[i]) + place + d;
      Element rest[kLanes] = {};
      if (left < kLanes) v = copy(v, left, rest);
      sum = fma(F32x16::load(v), F32x16::set(weights[i]), sum);
    }
    if (left == kLanes) {
      sum.store(out + d);
    } else {
      Element rest[kLanes];
      sum.store(rest);
      copy(rest, left, out + d);
    }
  }
}

template <class Element>
void merge(const Problem& p, Team& team) {
  const int64_t rows = p.tokens * p.heads;
  const int64_t size = p.num_states * p.head_dim;
  const int64_t step = size < kChunk ? kChunk / (size + 1) + 1 : 1;
  float* weights = static_cast<float*>(team.scratch());
  team.for_chunks((rows + step - 1) / step, [&](int64_t chunk) {
    const int64_t end = (chunk + 1) * step < rows ? (chunk + 1) * step : rows;
    for (int64_t row = chunk * step; row < end; ++row) {
      const int64_t token = row / p.heads;
      if (p.mask != nullptr && p.mask[token] == 0) continue;
      const int64_t head = row - token * p.heads;
      // The weights are made before s is written: out_s may be s[0].
      p.out_s[row] = weigh(p, token, head, weights);
      mean<Element>(p, token, head, weights);
    }
  });
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
void run<Level::EFFINFER_LEVEL>(const ops::MergeStatesProblem& p, Team& team) {
  if (p.dtype == DType::f32) return EFFINFER_LEVEL::merge<float>(p, team);
  if (p.dtype == DType::f16) return EFFINFER_LEVEL::merge<F16>(p, team);
  EFFINFER_LEVEL::merge<Bf16>(p, team);
}

}  // namespace effinfer::cpu
