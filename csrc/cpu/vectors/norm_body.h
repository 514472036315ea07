// The norms, over rows of any float type. Sums, products, quotients and roots are correctly rounded
// and never fused: the same bits at every ISA level.
#pragma once

#include "cpu/vectors/row_vectors.h"
#include "ops/elementwise.h"
#include "ops/operand.h"

namespace effinfer::cpu {

template <class Vector, Isa isa>
struct NormBody : RowVectors<Vector> {
  using RowVectors<Vector>::for_vectors;
  using RowVectors<Vector>::kChunk;

  template <class W>
  struct Weight {
    const W* data;  // null: ones
    float offset;
    float eps;
  };

  // x + add_to is added up in float32 in both passes, so that nothing is rounded before the end.
  template <bool kAdds, class T, class W, class Out>
  static void rms_norm_row(const T* x, const T* add_to, T* sum_out, int64_t cols,
                           const Weight<W>& weight, Out* out) {
    const auto value = [=](int64_t i, auto load) {
      if constexpr (kAdds) {
        return load(x + i) + load(add_to + i);
      } else {
        return load(x + i);
      }
    };
    Vector squares = Vector::set(0.0f);
    for_vectors(cols, [&](int64_t i, auto load, auto) {
      const Vector v = value(i, load);
      squares = squares + v * v;
    });
    const float mean = sum(squares) / static_cast<float>(cols);
    const Vector scale = Vector::set(1.0f / __builtin_sqrtf(mean + weight.eps));
    const Vector offset = Vector::set(weight.offset);
    for_vectors(cols, [&](int64_t i, auto load, auto store) {
      const Vector v = value(i, load);
      if constexpr (kAdds) store(sum_out + i, v);
      Vector y = v * scale;
      if (weight.data != nullptr) y = y * (load(weight.data + i) + offset);
      store(out + i, y);
    });
  }

  template <class T, class W>
  static void rms_norm_of(const ops::RmsNormProblem& p, Team& team) {
    const ops::StoreOperandRow store_operand =
        p.out_operand.data != nullptr ? ops::store_operand_row(isa) : nullptr;
    float* scratch = static_cast<float*>(team.scratch());
    const Weight<W> weight{static_cast<const W*>(p.weight), p.weight_offset, p.eps};
    for_rows(p.rows, p.groups, p.cols, team, [&](int64_t row, int64_t group) {
      const T* x = p.x.template at<const T>(row, group);
      const T* add_to = p.add_to.template at<const T>(row, group);
      T* sum_out = p.sum_out.template at<T>(row, group);
      const bool adds = p.add_to.data != nullptr;
      if (store_operand == nullptr) {
        T* out = p.out.template at<T>(row, group);
        const auto run = adds ? rms_norm_row<true, T, W, T> : rms_norm_row<false, T, W, T>;
        return run(x, add_to, sum_out, p.cols, weight, out);
      }
      const auto run = adds ? rms_norm_row<true, T, W, float> : rms_norm_row<false, T, W, float>;
      run(x, add_to, sum_out, p.cols, weight, scratch);
      store_operand(p.out_operand, row, scratch);
    });
  }

  static void rms_norm(const ops::RmsNormProblem& p, Team& team) {
    with_types(p.dtype, p.weight_dtype, [&]<class T, class W>() { rms_norm_of<T, W>(p, team); });
  }

  template <class T, class W>
  static void layer_norm_row(const ops::LayerNormProblem& p, const T* x, T* out) {
    Vector total = Vector::set(0.0f);
    for_vectors(p.cols, [&](int64_t i, auto load, auto) { total = total + load(x + i); });
    const auto count = static_cast<float>(p.cols);
    const Vector mean = Vector::set(sum(total) / count);
    Vector squares = Vector::set(0.0f);
    // What a partial load pads with is not part of the row: zeros are counted as the mean.
    const int64_t whole = p.cols - p.cols % 16;
    for_vectors(p.cols, [&](int64_t i, auto load, auto) {
      Vector v = load(x + i) - mean;
      if (i == whole) v = keep((1u << (p.cols - whole)) - 1, v, Vector::set(0.0f));
      squares = squares + v * v;
    });
    const Vector scale = Vector::set(1.0f / __builtin_sqrtf(sum(squares) / count + p.eps));
    const W* weight = static_cast<const W*>(p.weight);
    const W* bias = static_cast<const W*>(p.bias);
    for_vectors(p.cols, [&](int64_t i, auto load, auto store) {
      store(out + i, (load(x + i) - mean) * scale * load(weight + i) + load(bias + i));
    });
  }

  static void layer_norm(const ops::LayerNormProblem& p, Team& team) {
    with_types(p.dtype, p.weight_dtype, [&]<class T, class W>() {
      for_rows(p.rows, p.groups, p.cols, team, [&](int64_t row, int64_t group) {
        layer_norm_row<T, W>(p, p.x.template at<const T>(row, group),
                             p.out.template at<T>(row, group));
      });
    });
  }

 private:
  // Weights are float32 or of the rows' own type.
  template <class Visit>
  static void with_types(DType rows, DType weights, Visit&& visit) {
    with_float_type(rows, [&]<class T>() {
      if (weights == rows) {
        visit.template operator()<T, T>();
      } else {
        visit.template operator()<T, float>();
      }
    });
  }

  template <class Visit>
  static void for_rows(int64_t rows, int64_t groups, int64_t cols, Team& team, Visit&& visit) {
    const int64_t count = rows * groups;
    const int64_t chunk_rows = cols < kChunk ? kChunk / cols : 1;
    team.for_chunks((count + chunk_rows - 1) / chunk_rows, [&](int64_t chunk) {
      const int64_t first = chunk * chunk_rows;
      const int64_t last = first + chunk_rows < count ? first + chunk_rows : count;
      for (int64_t i = first; i < last; ++i) visit(i / groups, i % groups);
    });
  }
};

}  // namespace effinfer::cpu
