// The appending of keys and values to the pages of ops/kv_layout.h, with norm and rotation: a warp
// one head of one token, of the queries, the keys or the values.
//
// Where tokens are few what takes time is a chain: a head, its sum, its store. What the host wrote,
// which are the tables of pages and the weights of norms, is looked up before the kernel before has
// ended, and angles are on their way with the head.
#pragma once

#include "cuda/bodies/append_heads.h"
#include "cuda/bodies/rope.h"

namespace effinfer::cuda {

struct RopeAppendKernel {
  static constexpr const char* kName = "rope_append";
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int kChunks = HeadChunks::kPlaces;
  static constexpr bool kWaitsItself = true;
  using Params = RopeAppendParams;
  using Chunks = HeadChunks;
  using Numbers = float[kChunks][4];
  struct Shared {
    alignas(16) float heads[kWarps][kMostHeadDim];
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    const ops::RopeAppendProblem& a = p.problem;
    const int index = unit.block * kWarps + unit.warp;
    if (index >= p.num_warps) return unit.wait_for_inputs();  // whole warps, which meet no other
    const int kv_heads = a.kv.num_kv_heads;
    const int items = p.q_heads + 2 * kv_heads;
    const int row = index / items;
    int item = index % items;
    const int dim = a.kv.head_dim;
    if (item >= p.q_heads + kv_heads) {
      return append_value(unit, p, row, item - p.q_heads - kv_heads);
    }
    const bool is_q = item < p.q_heads;
    if (!is_q) item -= p.q_heads;
    const float* x = (is_q ? a.q + row * a.q_stride : a.k + row * a.k_stride) + item * dim;
    const ops::ConstRows rows = {x, 0, 0};
    const ops::ConstRows none = {};
    Chunks chunks = {rows, none, dim, unit.lane, kWarp, p.vectored};
    const HeadPlace place = is_q ? HeadPlace{} : place_of(unit, a, row, item);
    const float* norms = is_q ? a.q_norm : a.k_norm;
    Numbers weights = {};
    if (norms != nullptr) {
      EFFINFER_UNROLL
      for (int i = 0; i < kChunks; ++i) {
        load_floats(unit, norms, chunks.first(i), dim, p.vectored, weights[i]);
      }
    }
    unit.wait_for_inputs();
    const auto asked = chunks.ask(0, 0);
    Angles angles = {};
    load_angles(unit, p, row, chunks, angles);
    chunks.take(unit, asked);
    if (norms != nullptr) norm(unit, p, weights, chunks);
    rotate(unit, p, angles, shared.heads[unit.warp], chunks);
    if (!is_q) return append_key(unit, p, place, chunks);
    float* out = a.q_out + row * a.q_out_stride + item * dim;
    chunks.for_each(unit, dim, [&](int first, const float (&y)[4], int) {
      store_chunk(out, first, dim, p.vectored, encode<float>(unit, y));
    });
  }

 private:
  // Of a lane's dims; pairs of neighbours have one angle each.
  struct Angles {
    Numbers cos;
    Numbers sin;
  };

  template <class Unit>
  EFFINFER_DEVICE static void load_angles(Unit& unit, const Params& p, int row,
                                          const Chunks& chunks, Angles& out) {
    const int half = p.rope_dims / 2;
    const float* cos = p.problem.cos_sin + int64_t{row} * p.rope_dims;
    EFFINFER_UNROLL
    for (int i = 0; i < kChunks; ++i) {
      const int first = chunks.first(i);
      if (first >= p.rope_dims) continue;
      if (p.whole && !p.problem.interleaved) {
        const int angle = first < half ? first : first - half;
        load_floats(unit, cos, angle, half, true, out.cos[i]);
        load_floats(unit, cos + half, angle, half, true, out.sin[i]);
        continue;
      }
      EFFINFER_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int d = first + e;
        if (d >= p.rope_dims) continue;
        const int angle = p.problem.interleaved ? d / 2 : d < half ? d : d - half;
        out.cos[i][e] = unit.load(cos + angle);
        out.sin[i][e] = unit.load(cos + half + angle);
      }
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void norm(Unit& unit, const Params& p, const Numbers& weights,
                                   Chunks& chunks) {
    RowPartials<1> none;
    const float scale = rms_scale(unit, chunks, p.per_dim, p.problem.norm_eps, none);
    chunks.for_each(unit, chunks.cols, [&](int, float (&y)[4], int chunk) {
      EFFINFER_UNROLL
      for (int e = 0; e < 4; ++e) y[e] = y[e] * scale * weights[chunk][e];
    });
  }

  // `head` is the warp's own memory.
  template <class Unit>
  EFFINFER_DEVICE static void rotate(Unit& unit, const Params& p, const Angles& angles, float* head,
                                     Chunks& chunks) {
    if (p.rope_dims == 0) return;
    if (!p.problem.interleaved) return rotate_halves(unit, p, angles, head, chunks);
    chunks.for_each(unit, p.rope_dims, [&](int first, float (&y)[4], int chunk) {
      EFFINFER_UNROLL
      for (int e = 0; e < 4; e += 2) {
        if (first + e >= p.rope_dims) continue;
        const float c = angles.cos[chunk][e];
        const float s = angles.sin[chunk][e];
        const float a = y[e];
        y[e] = rotated(a, y[e + 1], c, s, true);
        y[e + 1] = rotated(y[e + 1], a, c, s, false);
      }
    });
  }

  // The other halves of pairs are other lanes': all of the head goes through shared memory.
  template <class Unit>
  EFFINFER_DEVICE static void rotate_halves(Unit& unit, const Params& p, const Angles& angles,
                                            float* head, Chunks& chunks) {
    const int half = p.rope_dims / 2;
    chunks.for_each(unit, p.rope_dims, [&](int first, const float (&y)[4], int) {
      *reinterpret_cast<Quad*>(head + first) = encode<float>(unit, y);
    });
    unit.sync_warp();
    chunks.for_each(unit, p.rope_dims, [&](int first, float (&y)[4], int chunk) {
      float other[4];
      if (p.whole) {
        const int at = first < half ? first + half : first - half;
        decode<float>(unit, *reinterpret_cast<const Quad*>(head + at), other);
      } else {
        EFFINFER_UNROLL
        for (int e = 0; e < 4; ++e) {
          const int d = first + e;
          other[e] = d >= p.rope_dims ? 0.0f : head[d < half ? d + half : d - half];
        }
      }
      EFFINFER_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int d = first + e;
        if (d >= p.rope_dims) continue;
        y[e] = rotated(y[e], other[e], angles.cos[chunk][e], angles.sin[chunk][e], d < half);
      }
    });
  }
};

}  // namespace effinfer::cuda
