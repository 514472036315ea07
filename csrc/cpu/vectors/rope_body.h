// The rotation of heads, over rows of any float type; the same bits at every ISA level.
#pragma once

#include "cpu/vectors/row_vectors.h"
#include "ops/elementwise.h"

namespace effinfer::cpu {

template <class Vector>
struct RopeBody : RowVectors<Vector> {
  using RowVectors<Vector>::for_vectors;
  using RowVectors<Vector>::load_some;
  using RowVectors<Vector>::store_some;
  using RowVectors<Vector>::kWidth;

  // (a, b) -> (a cos - b sin, b cos + a sin).
  static void rotate(Vector& a, Vector& b, const Vector& cos, const Vector& sin) {
    const Vector first = a * cos - b * sin;
    b = b * cos + a * sin;
    a = first;
  }

  template <class T>
  static void rope_head(const T* x, const float* cos, const float* sin, int64_t half, T* out) {
    for_vectors(half, [&](int64_t i, auto load, auto store) {
      Vector a = load(x + i);
      Vector b = load(x + half + i);
      rotate(a, b, load(cos + i), load(sin + i));
      store(out + i, a);
      store(out + half + i, b);
    });
  }

  // Pairs are taken apart in local arrays, so that the compiler sees shuffles without aliasing.
  template <class T>
  static void rope_head_interleaved(const T* x, const float* cos, const float* sin, int64_t half,
                                    T* out) {
    alignas(64) float pairs[2 * kWidth];
    alignas(64) float even[kWidth];
    alignas(64) float odd[kWidth];
    int64_t i = 0;
    const auto block = [&](int64_t count, auto load, auto store) {
      const int64_t low = 2 * count < kWidth ? 2 * count : kWidth;
      const int64_t high = 2 * count - low;
      load(x + 2 * i, low).store(pairs);
      load(x + 2 * i + low, high).store(pairs + kWidth);
      for (int64_t j = 0; j < kWidth; ++j) {
        even[j] = pairs[2 * j];
        odd[j] = pairs[2 * j + 1];
      }
      Vector a = Vector::load(even);
      Vector b = Vector::load(odd);
      rotate(a, b, load(cos + i, count), load(sin + i, count));
      a.store(even);
      b.store(odd);
      for (int64_t j = 0; j < kWidth; ++j) {
        pairs[2 * j] = even[j];
        pairs[2 * j + 1] = odd[j];
      }
      store(out + 2 * i, Vector::load(pairs), low);
      store(out + 2 * i + low, Vector::load(pairs + kWidth), high);
    };
    for (; i + kWidth <= half; i += kWidth) {
      block(
          kWidth, [](const auto* p, int64_t) { return Vector::load(p); },
          [](auto* p, const Vector& v, int64_t) { v.store(p); });
    }
    if (i < half) {
      block(
          half - i, [](const auto* p, int64_t count) { return load_some(p, count); },
          [](auto* p, const Vector& v, int64_t count) { store_some(p, v, count); });
    }
  }

  template <class T>
  static void rope_of(const ops::RopeProblem& p, Team& team) {
    const int64_t half = p.dims / 2;
    const auto rotate_head = p.interleaved ? rope_head_interleaved<T> : rope_head<T>;
    team.for_chunks(p.rows, [&](int64_t row) {
      const int64_t angles = p.positions != nullptr ? p.positions[row] : row;
      const float* cos = p.cos_sin + angles * p.dims;
      for (int64_t head = 0; head < p.heads; ++head) {
        const T* x = p.x.template at<const T>(row, head);
        T* out = p.out.template at<T>(row, head);
        rotate_head(x, cos, cos + half, half, out);
        if (out != x) {
          memcpy(out + p.dims, x + p.dims, static_cast<size_t>(p.head_dim - p.dims) * sizeof(T));
        }
      }
    });
  }

  static void rope(const ops::RopeProblem& p, Team& team) {
    with_float_type(p.dtype, [&]<class T>() { rope_of<T>(p, team); });
  }
};

}  // namespace effinfer::cpu
