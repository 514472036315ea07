// Rows of float32, binary16 or bfloat16 as vectors of 16 floats: widened on the way in, rounded to
// nearest even on the way out.
//
// The last, partial vector of a row goes through the same vector code from a zero-padded buffer: an
// element's value does not depend on where in a row it stands. Sums, products, quotients and roots
// are correctly rounded and never fused, so what uses no other function is the same bits at every
// level.
#pragma once

#include <string.h>

#include <cstdint>

#include "core/float16.h"
#include "cpu/vectors/float_vector.h"
#include "effinfer/dtype.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

constexpr int64_t kLanes = 16;
// Elements in a chunk: large enough to pay for claiming it (a few tens of ns), small enough that
// one row of logits is shared by the team.
constexpr int64_t kRowChunk = 4096;

template <class T>
F32x16 load_some(const T* p, int64_t count) {
  alignas(64) T buffer[kLanes] = {};
  memcpy(buffer, p, static_cast<size_t>(count) * sizeof(T));
  return F32x16::load(buffer);
}
template <class T>
void store_some(T* p, const F32x16& v, int64_t count) {
  alignas(64) T buffer[kLanes];
  v.store(buffer);
  memcpy(p, buffer, static_cast<size_t>(count) * sizeof(T));
}

// Calls visit(offset, load, store) for each vector of n elements; load(p) and store(p, v) are whole
// or partial as the place demands.
template <class Visit>
void for_vectors(int64_t n, Visit&& visit) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    visit(
        i, [](const auto* p) { return F32x16::load(p); },
        [](auto* p, const F32x16& v) { v.store(p); });
  }
  if (i < n) {
    const int64_t rest = n - i;
    visit(
        i, [rest](const auto* p) { return load_some(p, rest); },
        [rest](auto* p, const F32x16& v) { store_some(p, v, rest); });
  }
}

// Calls visit.operator()<T>() with the element type of f32, f16 or bf16.
template <class Visit>
[[gnu::always_inline]] inline void with_float_type(DType dtype, Visit&& visit) {
  if (dtype == DType::f16) {
    visit.template operator()<F16>();
  } else if (dtype == DType::bf16) {
    visit.template operator()<Bf16>();
  } else {
    visit.template operator()<float>();
  }
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
