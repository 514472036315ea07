// The bodies of the elementwise kernels, over the 16-float vector of an ISA level (simd/math_*.h).
// The vector types of ISA files live in anonymous namespaces, so every instance belongs to the file
// that made it.
//
// Sums, products, quotients and roots are correctly rounded and never fused, so what uses no other
// function is the same bits at every level.
#pragma once

#include "cpu/vectors/math.h"
#include "cpu/vectors/row_vectors.h"
#include "ops/elementwise.h"

namespace effinfer::cpu {

template <class Vector>
struct ElementwiseBody : RowVectors<Vector> {
  using RowVectors<Vector>::for_vectors;
  using RowVectors<Vector>::kChunk;

  // visit(row, begin, count) for the pieces of rows; a chunk is several whole rows, or a part of
  // one.
  template <class Visit>
  static void for_pieces(int64_t rows, int64_t cols, Team& team, Visit&& visit) {
    const int64_t chunk_rows = cols < kChunk ? kChunk / cols : 1;
    const int64_t parts = (cols + kChunk - 1) / kChunk;
    const int64_t row_chunks = (rows + chunk_rows - 1) / chunk_rows;
    team.for_chunks(row_chunks * parts, [&](int64_t chunk) {
      const int64_t first = chunk / parts * chunk_rows;
      const int64_t last = first + chunk_rows < rows ? first + chunk_rows : rows;
      const int64_t begin = chunk % parts * kChunk;
      const int64_t count = cols - begin < kChunk ? cols - begin : kChunk;
      for (int64_t row = first; row < last; ++row) visit(row, begin, count);
    });
  }

  template <ops::UnaryOp op>
  static Vector apply(const Vector& x, [[maybe_unused]] const Vector& parameter) {
    using enum ops::UnaryOp;
    if constexpr (op == copy) return x;
    if constexpr (op == scale) return x * parameter;
    if constexpr (op == softcap) return parameter * simd::tanh(x / parameter);
    if constexpr (op == silu) return simd::silu(x);
    if constexpr (op == gelu_tanh) return simd::gelu_tanh(x);
    if constexpr (op == relu_squared) return simd::relu_squared(x);
  }

  template <ops::UnaryOp op>
  static void unary_op(const ops::UnaryProblem& p, Team& team) {
    if (p.cols == 0) return;
    const Vector parameter = Vector::set(p.parameter);
    for_pieces(p.rows, p.cols, team, [&](int64_t row, int64_t begin, int64_t count) {
      const float* x = p.x + row * p.x_stride + begin;
      float* out = p.out + row * p.out_stride + begin;
      for_vectors(count, [&](int64_t i, auto load, auto store) {
        store(out + i, apply<op>(load(x + i), parameter));
      });
    });
  }

  static void unary(const ops::UnaryProblem& p, Team& team) {
    using enum ops::UnaryOp;
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

  static void binary(const ops::BinaryProblem& p, Team& team) {
    const auto op = p.op == ops::BinaryOp::add ? add : mul;
    team.for_chunks((p.size + kChunk - 1) / kChunk, [&](int64_t chunk) {
      const int64_t begin = chunk * kChunk;
      const int64_t count = p.size - begin < kChunk ? p.size - begin : kChunk;
      op(p.a + begin, p.b + begin, count, p.out + begin);
    });
  }

  template <ops::GatedOp op>
  static Vector apply_gate(const Vector& x) {
    using enum ops::GatedOp;
    if constexpr (op == silu) return simd::silu(x);
    if constexpr (op == gelu) return simd::gelu(x);
    if constexpr (op == gelu_tanh) return simd::gelu_tanh(x);
  }

  template <class T, ops::GatedOp op>
  static void gated_op(const ops::GatedProblem& p, Team& team) {
    if (p.cols == 0) return;
    const int64_t count = p.rows * p.groups;
    for_pieces(count, p.cols, team, [&](int64_t i, int64_t begin, int64_t length) {
      const T* x = p.x.template at<const T>(i / p.groups, i % p.groups) + begin;
      const T* gated = x + p.cols;
      T* out = p.out.template at<T>(i / p.groups, i % p.groups) + begin;
      for_vectors(length, [&](int64_t j, auto load, auto store) {
        store(out + j, apply_gate<op>(load(x + j)) * load(gated + j));
      });
    });
  }

  static void gated(const ops::GatedProblem& p, Team& team) {
    with_float_type(p.dtype, [&]<class T>() {
      using enum ops::GatedOp;
      switch (p.op) {
        case silu:
          return gated_op<T, silu>(p, team);
        case gelu:
          return gated_op<T, gelu>(p, team);
        case gelu_tanh:
          return gated_op<T, gelu_tanh>(p, team);
      }
    });
  }
};

}  // namespace effinfer::cpu
