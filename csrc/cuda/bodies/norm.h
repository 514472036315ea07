// RMS norm and layer norm. A row of up to kWarpCols numbers is a warp's, longer ones a block's:
// the order of sums is a matter of the row's length and type alone.
#pragma once

#include <cmath>

#include "cuda/bodies/operand_rows.h"
#include "cuda/bodies/row_chunks.h"
#include "cuda/bodies/row_sum.h"

namespace effinfer::cuda {

inline constexpr int kWarpCols = 512;     // 16 numbers a lane
inline constexpr int kNormThreads = 512;  // of a row that has a block

struct NormParams {
  ops::ConstRows x;
  ops::ConstRows add_to;
  ops::Rows sum_out;
  ops::Rows out;
  OperandRows operand;
  const void* weight = nullptr;
  const void* bias = nullptr;
  int num_vectors = 0;  // rows x groups
  int groups = 1;
  int cols = 0;
  float weight_offset = 0.0f;
  float eps = 0.0f;
  bool weight_is_f32 = true;
  bool vectored = false;  // all of the above
};

// The chunks of a row that one of its threads has: number `thread`, and every kRowThreads-th from
// there. The first kKept stay in registers, which are all of a warp's row; others are loaded again
// by each pass, which finds them in a cache.
template <class T, int kRowThreads, int kKeptNumbers = 16>
struct RowChunks {
  static constexpr int kNumbers = kChunk<T>;
  static constexpr int kKept = kKeptNumbers / kNumbers;

  const T* x;
  const T* add_to;  // null: none
  int cols;
  int thread;
  bool vectored;
  float kept[kKept][kNumbers];

  EFFINFER_DEVICE int first(int chunk) const { return (thread + chunk * kRowThreads) * kNumbers; }

  // All loads are under way before the first of them is waited for.
  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit) {
    Quad raw[kKept];
    Quad more[kKept] = {};
    load_kept(x, raw);
    if (add_to != nullptr) load_kept(add_to, more);
    EFFINFER_UNROLL
    for (int i = 0; i < kKept; ++i) decode<T>(unit, raw[i], kept[i]);
    if (add_to == nullptr) return;
    EFFINFER_UNROLL
    for (int i = 0; i < kKept; ++i) add<Unit>(unit, more[i], kept[i]);
  }

  // visit(first, numbers) for the thread's chunks that begin before `end`, in order; numbers from
  // `cols` on are zeros.
  template <class Unit, class Visit>
  EFFINFER_DEVICE void for_each(Unit& unit, int end, Visit&& visit) {
    EFFINFER_UNROLL
    for (int i = 0; i < kKept; ++i) {
      if (first(i) < end) visit(first(i), kept[i]);
    }
    if constexpr (kRowThreads > kWarp) {
      for (int i = first(kKept); i < end; i += kRowThreads * kNumbers) {
        float numbers[kNumbers];
        decode<T>(unit, load_chunk(x, i, cols, vectored), numbers);
        if (add_to != nullptr) add(unit, load_chunk(add_to, i, cols, vectored), numbers);
        visit(i, numbers);
      }
    }
  }

 private:
  EFFINFER_DEVICE void load_kept(const T* row, Quad (&raw)[kKept]) const {
    if (vectored) {
      EFFINFER_UNROLL
      for (int i = 0; i < kKept; ++i) raw[i] = load_whole(row, first(i), cols);
    } else {
      EFFINFER_UNROLL
      for (int i = 0; i < kKept; ++i) raw[i] = load_parts(row, first(i), cols);
    }
  }
  template <class Unit>
  EFFINFER_DEVICE static void add(Unit& unit, const Quad& raw, float (&numbers)[kNumbers]) {
    float more[kNumbers];
    decode<T>(unit, raw, more);
    EFFINFER_UNROLL
    for (int e = 0; e < kNumbers; ++e) numbers[e] += more[e];
  }
};

// 1 / sqrt(mean(x^2) + eps).
template <int kRowThreads, class Unit, class Chunks>
EFFINFER_DEVICE float rms_scale(Unit& unit, Chunks& chunks, float eps,
                                float (&partial)[kRowThreads / kWarp]) {
  float squares = 0.0f;
  chunks.for_each(unit, chunks.cols, [&](int, const float (&x)[Chunks::kNumbers]) {
    EFFINFER_UNROLL
    for (int e = 0; e < Chunks::kNumbers; ++e) squares = fmaf(x[e], x[e], squares);
  });
  const float mean = row_sum<kRowThreads>(unit, squares, partial) / static_cast<float>(chunks.cols);
  return 1.0f / sqrtf(mean + eps);
}

// Chunk `first` of weights of either type.
template <class T, class Unit>
EFFINFER_DEVICE void load_weights(Unit& unit, const NormParams& p, const void* weights, int first,
                                  float (&out)[kChunk<T>]) {
  if (p.weight_is_f32) {
    load_floats(unit, static_cast<const float*>(weights), first, p.cols, p.vectored, out);
  } else {
    decode<T>(unit, load_chunk(static_cast<const T*>(weights), first, p.cols, p.vectored), out);
  }
}

// What both norms have in common: `body(row, group, chunks)` for the row of this thread.
template <class T, int kRowThreads>
struct NormRows {
  static constexpr int kThreads = kRowThreads == kWarp ? 256 : kRowThreads;
  static constexpr int kRowsABlock = kThreads / kRowThreads;
  static constexpr int kNumbers = kChunk<T>;
  using Params = NormParams;
  using Chunks = RowChunks<T, kRowThreads>;
  struct Shared {
    float partial[2][kRowThreads / kWarp];
  };

  template <class Unit, class Body>
  EFFINFER_DEVICE static void for_row(Unit& unit, const Params& p, Body&& body) {
    const int vector = unit.block * kRowsABlock + unit.thread / kRowThreads;
    if (vector >= p.num_vectors) return;  // whole warps, which meet no other
    const int row = vector / p.groups;
    const int group = vector % p.groups;
    Chunks chunks{p.x.template at<const T>(row, group),
                  p.add_to.template at<const T>(row, group),
                  p.cols,
                  unit.thread % kRowThreads,
                  p.vectored,
                  {}};
    chunks.load(unit);
    body(row, group, chunks);
  }
};

template <class T, int kRowThreads>
struct RmsNormKernel : NormRows<T, kRowThreads> {
  static constexpr const char* kName = "rms_norm";
  using Base = NormRows<T, kRowThreads>;
  using typename Base::Chunks;
  using typename Base::Params;
  using typename Base::Shared;
  static constexpr int kNumbers = Base::kNumbers;

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    Base::for_row(unit, p, [&](int row, int group, Chunks& chunks) {
      const float scale = rms_scale<kRowThreads>(unit, chunks, p.eps, shared.partial[0]);
      T* sum_out = p.sum_out.template at<T>(row, group);
      T* out = p.out.template at<T>(row, group);
      const bool to_operand = p.operand.data != nullptr;
      const int end = to_operand ? p.operand.padded : p.cols;
      chunks.for_each(unit, end, [&](int first, const float (&x)[kNumbers]) {
        float y[kNumbers];
        EFFINFER_UNROLL
        for (int e = 0; e < kNumbers; ++e) y[e] = x[e] * scale;
        if (p.weight != nullptr) {
          float w[kNumbers];
          load_weights<T>(unit, p, p.weight, first, w);
          EFFINFER_UNROLL
          for (int e = 0; e < kNumbers; ++e) y[e] *= w[e] + p.weight_offset;
        }
        if (sum_out != nullptr) {
          store_chunk(sum_out, first, p.cols, p.vectored, encode<T>(unit, x));
        }
        if (to_operand) {
          p.operand.store(unit, row, first, y);
        } else {
          store_chunk(out, first, p.cols, p.vectored, encode<T>(unit, y));
        }
      });
    });
  }
};

template <class T, int kRowThreads>
struct LayerNormKernel : NormRows<T, kRowThreads> {
  static constexpr const char* kName = "layer_norm";
  using Base = NormRows<T, kRowThreads>;
  using typename Base::Chunks;
  using typename Base::Params;
  using typename Base::Shared;
  static constexpr int kNumbers = Base::kNumbers;

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    Base::for_row(unit, p, [&](int row, int group, Chunks& chunks) {
      const auto cols = static_cast<float>(p.cols);
      float total = 0.0f;
      chunks.for_each(unit, p.cols, [&](int, const float (&x)[kNumbers]) {
        EFFINFER_UNROLL
        for (int e = 0; e < kNumbers; ++e) total += x[e];
      });
      const float mean = row_sum<kRowThreads>(unit, total, shared.partial[0]) / cols;
      float squares = 0.0f;
      chunks.for_each(unit, p.cols, [&](int first, const float (&x)[kNumbers]) {
        EFFINFER_UNROLL
        for (int e = 0; e < kNumbers; ++e) {
          const float v = first + e < p.cols ? x[e] - mean : 0.0f;
          squares = fmaf(v, v, squares);
        }
      });
      const float variance = row_sum<kRowThreads>(unit, squares, shared.partial[1]) / cols;
      const float scale = 1.0f / sqrtf(variance + p.eps);
      T* out = p.out.template at<T>(row, group);
      chunks.for_each(unit, p.cols, [&](int first, const float (&x)[kNumbers]) {
        float w[kNumbers];
        float b[kNumbers];
        load_weights<T>(unit, p, p.weight, first, w);
        load_weights<T>(unit, p, p.bias, first, b);
        float y[kNumbers];
        EFFINFER_UNROLL
        for (int e = 0; e < kNumbers; ++e) y[e] = fmaf((x[e] - mean) * scale, w[e], b[e]);
        store_chunk(out, first, p.cols, p.vectored, encode<T>(unit, y));
      });
    });
  }
};

}  // namespace effinfer::cuda
