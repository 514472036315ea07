// The bodies of the elementwise kernels, over the 16-float vector of an ISA level (simd/math_*.h).
// The vector types of ISA files live in anonymous namespaces, so every instance belongs to the file
// that made it.
//
// Sums, products, quotients and roots are correctly rounded and never fused, so what uses no other
// function (norms, rotations) is the same bits at every level.
//
// The last, partial vector of a row goes through the same vector code from a zero-padded buffer: an
// element's value does not depend on where in a row it stands.
#pragma once

#include <string.h>

#include "cpu/simd/math.h"
#include "kernels/activation.h"
#include "kernels/elementwise.h"

namespace effinfer::cpu {

template <class Vector, Isa isa>
struct ElementwiseBody {
  static constexpr int64_t kWidth = 16;
  // Floats in a chunk: large enough to pay for claiming it (a few tens of ns), small enough that
  // one row of logits is shared by the team.
  static constexpr int64_t kChunk = 4096;

  static Vector load_some(const float* p, int64_t count) {
    alignas(64) float buffer[kWidth] = {};
    memcpy(buffer, p, static_cast<size_t>(count) * sizeof(float));
    return Vector::load(buffer);
  }
  static void store_some(float* p, const Vector& v, int64_t count) {
    alignas(64) float buffer[kWidth];
    v.store(buffer);
    memcpy(p, buffer, static_cast<size_t>(count) * sizeof(float));
  }

  // visit(offset, load, store) for each vector of n floats; load(p) and store(p, v) are whole or
  // partial as the place demands.
  template <class Visit>
  static void for_vectors(int64_t n, Visit&& visit) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
      visit(
          i, [](const float* p) { return Vector::load(p); },
          [](float* p, const Vector& v) { v.store(p); });
    }
    if (i < n) {
      const int64_t rest = n - i;
      visit(
          i, [rest](const float* p) { return load_some(p, rest); },
          [rest](float* p, const Vector& v) { store_some(p, v, rest); });
    }
  }

  static float sum_of_squares(const float* x, int64_t cols) {
    Vector squares = Vector::set(0.0f);
    for_vectors(cols, [&](int64_t i, auto load, auto) {
      const Vector v = load(x + i);
      squares = squares + v * v;
    });
    return sum(squares);
  }

  static void rms_norm_group(const float* x, const float* weight, int64_t cols, float eps,
                             float* out) {
    const float mean = sum_of_squares(x, cols) / static_cast<float>(cols);
    const Vector scale = Vector::set(1.0f / __builtin_sqrtf(mean + eps));
    if (weight == nullptr) {
      for_vectors(cols,
                  [&](int64_t i, auto load, auto store) { store(out + i, load(x + i) * scale); });
    } else {
      for_vectors(cols, [&](int64_t i, auto load, auto store) {
        store(out + i, load(x + i) * scale * load(weight + i));
      });
    }
  }

  static void rms_norm_row(const kernels::RmsNormProblem& p, int64_t row, float* scratch,
                           kernels::StoreActivationRow store_operand) {
    const int64_t size = p.groups * p.cols;
    const float* x = p.x + row * size;
    if (p.add_to != nullptr) {
      float* sum = p.sum_out + row * size;
      add(x, p.add_to + row * size, size, sum);
      x = sum;
    }
    if (store_operand != nullptr) {
      rms_norm_group(x, p.weight, p.cols, p.eps, scratch);
      store_operand(p.out_act, row, scratch);
      return;
    }
    for (int64_t group = 0; group < p.groups; ++group) {
      const int64_t offset = group * p.cols;
      rms_norm_group(x + offset, p.weight, p.cols, p.eps, p.out + row * size + offset);
    }
  }

  static void rms_norm(const kernels::RmsNormProblem& p, Team& team) {
    const kernels::StoreActivationRow store_operand =
        p.out_act.data != nullptr ? kernels::store_activation_row(isa) : nullptr;
    float* scratch = static_cast<float*>(team.scratch());
    const int64_t size = p.groups * p.cols;
    const int64_t chunk_rows = size < kChunk ? kChunk / size : 1;
    team.for_chunks((p.rows + chunk_rows - 1) / chunk_rows, [&](int64_t chunk) {
      const int64_t first = chunk * chunk_rows;
      const int64_t last = first + chunk_rows < p.rows ? first + chunk_rows : p.rows;
      for (int64_t row = first; row < last; ++row) rms_norm_row(p, row, scratch, store_operand);
    });
  }

  template <kernels::UnaryOp op>
  static Vector apply(const Vector& x, [[maybe_unused]] const Vector& parameter) {
    using enum kernels::UnaryOp;
    if constexpr (op == copy) return x;
    if constexpr (op == scale) return x * parameter;
    if constexpr (op == softcap) return parameter * simd::tanh(x / parameter);
    if constexpr (op == silu) return simd::silu(x);
    if constexpr (op == gelu_tanh) return simd::gelu_tanh(x);
    if constexpr (op == relu_squared) {
      const Vector positive = max(Vector::set(0.0f), x);  // the second operand where that is a NaN
      return positive * positive;
    }
  }

  template <kernels::UnaryOp op>
  static void unary_op(const kernels::UnaryProblem& p, Team& team) {
    if (p.cols == 0) return;
    const Vector parameter = Vector::set(p.parameter);
    // A chunk is several whole rows, or a part of one row.
    const int64_t chunk_rows = p.cols < kChunk ? kChunk / p.cols : 1;
    const int64_t parts = (p.cols + kChunk - 1) / kChunk;
    const int64_t row_chunks = (p.rows + chunk_rows - 1) / chunk_rows;
    team.for_chunks(row_chunks * parts, [&](int64_t chunk) {
      const int64_t first = chunk / parts * chunk_rows;
      const int64_t last = first + chunk_rows < p.rows ? first + chunk_rows : p.rows;
      const int64_t begin = chunk % parts * kChunk;
      const int64_t count = p.cols - begin < kChunk ? p.cols - begin : kChunk;
      for (int64_t row = first; row < last; ++row) {
        const float* x = p.x + row * p.x_stride + begin;
        float* out = p.out + row * p.out_stride + begin;
        for_vectors(count, [&](int64_t i, auto load, auto store) {
          store(out + i, apply<op>(load(x + i), parameter));
        });
      }
    });
  }

  static void unary(const kernels::UnaryProblem& p, Team& team) {
    using enum kernels::UnaryOp;
    switch (p.op) {
      case copy:
        return unary_op<copy>(p, team);
      case scale:
        return unary_op<scale>(p, team);
      case softcap:
        return unary_op<softcap>(p, team);
      case silu:
        return unary_op<silu>(p, team);
      case gelu_tanh:
        return unary_op<gelu_tanh>(p, team);
      case relu_squared:
        return unary_op<relu_squared>(p, team);
    }
  }

  static void add(const float* a, const float* b, int64_t n, float* out) {
    for_vectors(
        n, [&](int64_t i, auto load, auto store) { store(out + i, load(a + i) + load(b + i)); });
  }
  static void mul(const float* a, const float* b, int64_t n, float* out) {
    for_vectors(
        n, [&](int64_t i, auto load, auto store) { store(out + i, load(a + i) * load(b + i)); });
  }

  static void binary(const kernels::BinaryProblem& p, Team& team) {
    const auto op = p.op == kernels::BinaryOp::add ? add : mul;
    team.for_chunks((p.size + kChunk - 1) / kChunk, [&](int64_t chunk) {
      const int64_t begin = chunk * kChunk;
      const int64_t count = p.size - begin < kChunk ? p.size - begin : kChunk;
      op(p.a + begin, p.b + begin, count, p.out + begin);
    });
  }

  // (a, b) -> (a cos - b sin, b cos + a sin).
  static void rotate(Vector& a, Vector& b, const Vector& cos, const Vector& sin) {
    const Vector first = a * cos - b * sin;
    b = b * cos + a * sin;
    a = first;
  }

  static void rope_head(const float* x, const float* cos, const float* sin, int64_t half,
                        float* out) {
    for_vectors(half, [&](int64_t i, auto load, auto store) {
      Vector a = load(x + i);
      Vector b = load(x + half + i);
      rotate(a, b, load(cos + i), load(sin + i));
      store(out + i, a);
      store(out + half + i, b);
    });
  }

  // Pairs are taken apart in local arrays, so that the compiler sees shuffles without aliasing.
  static void rope_head_interleaved(const float* x, const float* cos, const float* sin,
                                    int64_t half, float* out) {
    alignas(64) float even[kWidth];
    alignas(64) float odd[kWidth];
    int64_t i = 0;
    for (; i + kWidth <= half; i += kWidth) {
      for (int64_t j = 0; j < kWidth; ++j) {
        even[j] = x[2 * (i + j)];
        odd[j] = x[2 * (i + j) + 1];
      }
      Vector a = Vector::load(even);
      Vector b = Vector::load(odd);
      rotate(a, b, Vector::load(cos + i), Vector::load(sin + i));
      a.store(even);
      b.store(odd);
      for (int64_t j = 0; j < kWidth; ++j) {
        out[2 * (i + j)] = even[j];
        out[2 * (i + j) + 1] = odd[j];
      }
    }
    for (; i < half; ++i) {
      const float a = x[2 * i];
      const float b = x[2 * i + 1];
      out[2 * i] = a * cos[i] - b * sin[i];
      out[2 * i + 1] = b * cos[i] + a * sin[i];
    }
  }

  static void rope(const kernels::RopeProblem& p, Team& team) {
    const int64_t half = p.dims / 2;
    const auto rotate_head = p.interleaved ? rope_head_interleaved : rope_head;
    team.for_chunks(p.rows, [&](int64_t row) {
      const float* cos = p.cos_sin + row * p.dims;
      for (int64_t head = 0; head < p.heads; ++head) {
        const float* x = p.x + row * p.x_stride + head * p.head_dim;
        float* out = p.out + (row * p.heads + head) * p.head_dim;
        rotate_head(x, cos, cos + half, half, out);
        if (out != x) {
          memcpy(out + p.dims, x + p.dims,
                 static_cast<size_t>(p.head_dim - p.dims) * sizeof(float));
        }
      }
    });
  }
};

}  // namespace effinfer::cpu
