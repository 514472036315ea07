// The rotation of a head of any float type.
#pragma once

#include "cpu/vectors/row_vectors.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// (a, b) -> (a cos - b sin, b cos + a sin).
void rotate(F32x16& a, F32x16& b, const F32x16& cos, const F32x16& sin) {
  const F32x16 first = a * cos - b * sin;
  b = b * cos + a * sin;
  a = first;
}

template <class T>
void rope_head(const T* x, const float* cos, const float* sin, int64_t half, T* out) {
  for_vectors(half, [&](int64_t i, auto load, auto store) {
    F32x16 a = load(x + i);
    F32x16 b = load(x + half + i);
    rotate(a, b, load(cos + i), load(sin + i));
    store(out + i, a);
    store(out + half + i, b);
  });
}

// Pairs are taken apart in local arrays, so that the compiler sees shuffles without aliasing.
template <class T>
void rope_head_interleaved(const T* x, const float* cos, const float* sin, int64_t half, T* out) {
  alignas(64) float pairs[2 * kLanes];
  alignas(64) float even[kLanes];
  alignas(64) float odd[kLanes];
  int64_t i = 0;
  const auto block = [&](int64_t count, auto load, auto store) {
    const int64_t low = 2 * count < kLanes ? 2 * count : kLanes;
    const int64_t high = 2 * count - low;
    load(x + 2 * i, low).store(pairs);
    load(x + 2 * i + low, high).store(pairs + kLanes);
    for (int64_t j = 0; j < kLanes; ++j) {
      even[j] = pairs[2 * j];
      odd[j] = pairs[2 * j + 1];
    }
    F32x16 a = F32x16::load(even);
    F32x16 b = F32x16::load(odd);
    rotate(a, b, load(cos + i, count), load(sin + i, count));
    a.store(even);
    b.store(odd);
    for (int64_t j = 0; j < kLanes; ++j) {
      pairs[2 * j] = even[j];
      pairs[2 * j + 1] = odd[j];
    }
    store(out + 2 * i, F32x16::load(pairs), low);
    store(out + 2 * i + low, F32x16::load(pairs + kLanes), high);
  };
  for (; i + kLanes <= half; i += kLanes) {
    block(
        kLanes, [](const auto* p, int64_t) { return F32x16::load(p); },
        [](auto* p, const F32x16& v, int64_t) { v.store(p); });
  }
  if (i < half) {
    block(
        half - i, [](const auto* p, int64_t count) { return load_some(p, count); },
        [](auto* p, const F32x16& v, int64_t count) { store_some(p, v, count); });
  }
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
