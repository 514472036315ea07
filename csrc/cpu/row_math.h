// Passes over a row of logits or weights: what selection and sampling are made of. Every level has
// the same 16 lanes, the same order of operations and no fused multiply-add, so that all levels
// give the same bits.
#pragma once

#include <cstdint>

#include "effinfer/dtype.h"

namespace effinfer::cpu {

// Values that share a partial sum, which is one of doubles.
inline constexpr int64_t kRowBlock = 256;
// What a pass that keeps some of the values may write beyond them.
inline constexpr int64_t kRowSlack = 16;
// Buckets of a histogram over order_key(). Each is kept in four parts, side by side in memory of
// [4][kRowBuckets], so that neighbours in a row that fall into one bucket do not wait for each
// other.
inline constexpr int kRowBucketBits = 9;
inline constexpr int64_t kRowBuckets = 1 << kRowBucketBits;

// The head of a row in the order (value descending, index ascending), told by its last element: an
// index before `ties_end` is in it from `least` on, one from there on above `least` only.
struct RowCut {
  float least = 0.0f;
  int64_t ties_end = 0;
};

struct RowExtent {
  float min = 0.0f;
  float max = 0.0f;
  bool has_nan = false;
};

// The passes of a level: kernels_at<RowMath>(isa).
struct RowMath {
  // These convert from f32, f16 or bf16 to float32, and back.
  void (*widen)(const void* x, DType dtype, int64_t n, float* out);
  void (*narrow)(const float* x, DType dtype, int64_t n, void* out);
  // maxima[16 g + j]: the highest of lane j of the g-th `group` vectors of 16. `min` is not set.
  RowExtent (*group_maxima)(const float* x, int64_t n, int64_t group, float* maxima);
  // out[i] = exp((x[i] - max) * factor) within 2 ulp, 0 below e^-87; sums[b] of each kRowBlock. For
  // x <= max. `out` may be x.
  RowExtent (*weights)(const float* x, int64_t n, float max, float factor, float* out,
                       double* sums);
  // sums[b] is that of the b-th block of kRowBlock values.
  RowExtent (*sum)(const float* x, int64_t n, double* sums);
  // The values of the cut and their ids (null: their indices), in the order of the row; returns
  // their number. The outputs may be the inputs.
  int64_t (*keep)(const float* x, const int32_t* ids, int64_t n, RowCut cut, float* out,
                  int32_t* out_ids);
  // The values in [low, high], in the order of the row; returns their number. `out` may be x.
  int64_t (*between)(const float* x, int64_t n, float low, float high, float* out);
  // The index after the `count`-th element that is equal to `value`.
  int64_t (*after_equal)(const float* x, int64_t n, float value, int64_t count);
  // Adds each value to the bucket (order_key(value) - low) >> shift: its number, or its weight.
  void (*count)(const float* x, int64_t n, int32_t low, int shift, uint32_t* buckets);
  void (*weigh)(const float* x, int64_t n, int32_t low, int shift, double* buckets);
  void (*scale)(const float* x, int64_t n, float factor, float* out);
  // out[i] = max(a[i] - b[i], 0)
  void (*excess)(const float* a, const float* b, int64_t n, float* out);
  // Negative infinity where the bit of `mask` is not set, in place; bits are lowest first.
  void (*mask)(void* x, DType dtype, int64_t n, const int32_t* mask);
};

}  // namespace effinfer::cpu
