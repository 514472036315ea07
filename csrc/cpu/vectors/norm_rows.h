// RMS norm of a row of any float type.
#pragma once

#include "cpu/vectors/row_vectors.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class W>
struct NormWeight {
  const W* data;  // null: ones
  float offset;
  float eps;
};

// x + add_to is added up in float32 in both passes, so that nothing is rounded before the end.
template <bool kAdds, class T, class W, class Out>
void rms_norm_row(const T* x, const T* add_to, T* sum_out, int64_t cols,
                  const NormWeight<W>& weight, Out* out) {
  const auto value = [=](int64_t i, auto load) {
    if constexpr (kAdds) {
      return load(x + i) + load(add_to + i);
    } else {
      return load(x + i);
    }
  };
  F32x16 squares = F32x16::set(0.0f);
  for_vectors(cols, [&](int64_t i, auto load, auto) {
    const F32x16 v = value(i, load);
    squares = squares + v * v;
  });
  const float mean = sum(squares) / static_cast<float>(cols);
  const F32x16 scale = F32x16::set(1.0f / __builtin_sqrtf(mean + weight.eps));
  const F32x16 offset = F32x16::set(weight.offset);
  for_vectors(cols, [&](int64_t i, auto load, auto store) {
    const F32x16 v = value(i, load);
    if constexpr (kAdds) store(sum_out + i, v);
    F32x16 y = v * scale;
    if (weight.data != nullptr) y = y * (load(weight.data + i) + offset);
    store(out + i, y);
  });
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
