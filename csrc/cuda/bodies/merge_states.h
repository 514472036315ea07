// The weighted mean of attention states (ops/merge_states.h): a warp a token's head.
#pragma once

#include <cmath>

#include "cuda/bodies/row_chunks.h"
#include "cuda/bodies/row_sum.h"

namespace effinfer::cuda {

inline constexpr int kMostStates = 224;  // whose pointers fit into the 4 KB of parameters

struct MergeStatesParams {
  const void* v[kMostStates];
  const float* s[kMostStates];
  void* out_v = nullptr;
  float* out_s = nullptr;
  const uint8_t* mask = nullptr;
  int64_t v_stride = 0;
  int64_t s_stride = 0;
  int num_states = 0;
  int num_vectors = 0;  // tokens x heads
  int heads = 0;
  int head_dim = 0;
  bool natural = false;
  bool vectored = false;
};

template <class T>
struct MergeStatesKernel {
  static constexpr const char* kName = "merge_states";
  static constexpr int kThreads = 128;
  static constexpr int kNumbers = kChunk<T>;
  using Params = MergeStatesParams;
  struct Shared {
    float weights[kThreads / kWarp][kMostStates];
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    const int vector = unit.block * (kThreads / kWarp) + unit.warp;
    if (vector >= p.num_vectors) return;  // whole warps, which meet no other
    const int token = vector / p.heads;
    const int head = vector % p.heads;
    if (p.mask != nullptr && p.mask[token] == 0) return;
    float* weights = shared.weights[unit.warp];
    const float merged = weigh(unit, p, token * p.s_stride + head, weights);
    unit.sync_warp();
    // All of the warp have read s: out_s may be s[0].
    if (unit.lane == 0) p.out_s[vector] = merged;
    const int64_t place = token * p.v_stride + int64_t{head} * p.head_dim;
    T* out = static_cast<T*>(p.out_v) + int64_t{vector} * p.head_dim;
    for (int d = unit.lane * kNumbers; d < p.head_dim; d += kWarp * kNumbers) {
      float sum[kNumbers] = {};
      for (int i = 0; i < p.num_states; ++i) {
        if (weights[i] == 0.0f) continue;
        float v[kNumbers];
        const T* from = static_cast<const T*>(p.v[i]) + place;
        decode<T>(unit, load_chunk(from, d, p.head_dim, p.vectored), v);
        EFFINFER_UNROLL
        for (int e = 0; e < kNumbers; ++e) sum[e] = fmaf(v[e], weights[i], sum[e]);
      }
      store_chunk(out, d, p.head_dim, p.vectored, encode<T>(unit, sum));
    }
  }

 private:
  // Fills `weights`, which add up to 1 (or are all 0), and returns the merged s. A NaN among the s
  // makes everything a NaN: it is left out of the maximum only.
  template <class Unit>
  EFFINFER_DEVICE static float weigh(Unit& unit, const Params& p, int64_t place, float* weights) {
    const float lowest = float_of(0xff800000u);
    float highest = lowest;
    for (int i = unit.lane; i < p.num_states; i += kWarp) {
      const float s = p.s[i][place];
      highest = s > highest ? s : highest;
    }
    EFFINFER_UNROLL
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
      const float other = unit.shfl_xor(highest, mask);
      highest = other > highest ? other : highest;
    }
    // Without a finite state every weight is 0, and not exp(-inf + inf).
    const float shift = highest == lowest ? 0.0f : highest;
    float total = 0.0f;
    for (int i = unit.lane; i < p.num_states; i += kWarp) {
      const float s = p.s[i][place] - shift;
      weights[i] = p.natural ? expf(s) : exp2f(s);
      total += weights[i];
    }
    total = warp_sum(unit, total);
    if (total == 0.0f) return lowest;
    for (int i = unit.lane; i < p.num_states; i += kWarp) weights[i] /= total;
    return shift + (p.natural ? logf(total) : log2f(total));
  }
};

}  // namespace effinfer::cuda
