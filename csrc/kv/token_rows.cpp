#include "kv/token_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

#include "core/float16.h"
#include "ops/operand.h"

namespace effinfer::kv {
namespace {

using ops::KvLayer;
using ops::TokenPlace;

// Calls with the unsigned type of the size of an element.
template <class F>
void with_element(DType dtype, F&& f) {
  switch (dtype_info(dtype).block_bytes) {
    case 4:
      return f.template operator()<uint32_t>();
    case 2:
      return f.template operator()<uint16_t>();
    default:
      return f.template operator()<uint8_t>();
  }
}

// Of K a dword of each line, of V an element of each dword.
template <class T>
uint32_t* key_of(const KvLayer& kv, int64_t head, TokenPlace place) {
  constexpr int64_t P = 4 / sizeof(T);
  const int64_t first = ops::k_offset(place.token, 0, kv.head_dim, P);
  return reinterpret_cast<uint32_t*>(kv.k_head(place.page, head)) + first / P;
}
template <class T>
T* value_of(const KvLayer& kv, int64_t head, TokenPlace place) {
  constexpr int64_t P = 4 / sizeof(T);
  const int64_t first = ops::v_offset(place.token, 0, kv.head_dim, P);
  return reinterpret_cast<T*>(kv.v_head(place.page, head)) + first;
}

size_t scale_at(const KvLayer& kv, int64_t head, TokenPlace place) {
  return static_cast<size_t>((place.page * int64_t{kv.num_kv_heads} + head) * ops::kPageSize +
                             place.token);
}

template <class T>
void copy_elements(const TokenRow& from, const TokenRow& to) {
  constexpr int64_t P = 4 / sizeof(T);
  const int64_t dim = from.kv.head_dim;
  const uint32_t* k_from = key_of<T>(from.kv, from.head, from.place);
  uint32_t* k_to = key_of<T>(to.kv, to.head, to.place);
  for (int64_t i = 0; i < dim / P; ++i) k_to[i * 16] = k_from[i * 16];
  const T* v_from = value_of<T>(from.kv, from.head, from.place);
  T* v_to = value_of<T>(to.kv, to.head, to.place);
  for (int64_t d = 0; d < dim; ++d) v_to[d * P] = v_from[d * P];
}

float to_float(DType dtype, uint32_t bits) {
  switch (dtype) {
    case DType::f32:
      return std::bit_cast<float>(bits);
    case DType::f16:
      return f16_to_f32(static_cast<uint16_t>(bits));
    case DType::bf16:
      return bf16_to_f32(static_cast<uint16_t>(bits));
    default:
      return static_cast<float>(static_cast<int8_t>(bits));
  }
}

uint32_t from_float(DType dtype, float value) {
  switch (dtype) {
    case DType::f32:
      return std::bit_cast<uint32_t>(value);
    case DType::f16:
      return f32_to_f16(value);
    case DType::bf16:
      return f32_to_bf16(value);
    default:
      return static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(value)));
  }
}

// Of a row that is stored as i8; 0: zeros, NaN: not finite.
float scale_of(const float* values, int64_t count) {
  float highest = 0.0f;
  for (int64_t d = 0; d < count; ++d) {
    if (!std::isfinite(values[d])) return std::numeric_limits<float>::quiet_NaN();
    highest = std::max(highest, std::abs(values[d]));
  }
  return highest < ops::kSmallestBlock ? 0.0f : highest / 127.0f;
}

// at(d): the element of dimension d.
template <class At>
void read_row(const KvLayer& kv, float scale, float* out, At&& at) {
  for (int64_t d = 0; d < kv.head_dim; ++d) out[d] = to_float(kv.dtype, at(d)) * scale;
}
template <class At>
void write_row(const KvLayer& kv, float* scale, const float* values, At&& at) {
  float inverse = 1.0f;
  if (scale != nullptr) {
    *scale = scale_of(values, kv.head_dim);
    inverse = *scale > 0.0f ? 1.0f / *scale : 0.0f;
  }
  for (int64_t d = 0; d < kv.head_dim; ++d) {
    const float value = inverse == 0.0f ? 0.0f : values[d] * inverse;
    using Element = std::remove_reference_t<decltype(at(d))>;
    at(d) = static_cast<Element>(from_float(kv.dtype, value));
  }
}

}  // namespace

void copy_token(const TokenRow& from, const TokenRow& to) {
  with_element(from.kv.dtype, [&]<class T>() { copy_elements<T>(from, to); });
  if (from.kv.k_scale == nullptr) return;
  const size_t old_place = scale_at(from.kv, from.head, from.place);
  const size_t new_place = scale_at(to.kv, to.head, to.place);
  to.kv.k_scale[new_place] = from.kv.k_scale[old_place];
  to.kv.v_scale[new_place] = from.kv.v_scale[old_place];
}

void read_key(const KvLayer& kv, int64_t head, TokenPlace from, float* out) {
  const float scale = kv.k_scale == nullptr ? 1.0f : kv.k_scale[scale_at(kv, head, from)];
  with_element(kv.dtype, [&]<class T>() {
    constexpr int64_t P = 4 / sizeof(T);
    const T* key = reinterpret_cast<const T*>(key_of<T>(kv, head, from));
    read_row(kv, scale, out, [&](int64_t d) { return key[d / P * 16 * P + d % P]; });
  });
}

void read_value(const KvLayer& kv, int64_t head, TokenPlace from, float* out) {
  const float scale = kv.v_scale == nullptr ? 1.0f : kv.v_scale[scale_at(kv, head, from)];
  with_element(kv.dtype, [&]<class T>() {
    constexpr int64_t P = 4 / sizeof(T);
    const T* value = value_of<T>(kv, head, from);
    read_row(kv, scale, out, [&](int64_t d) { return value[d * P]; });
  });
}

void write_key(const KvLayer& kv, int64_t head, const float* key, TokenPlace to) {
  float* scale = kv.k_scale == nullptr ? nullptr : kv.k_scale + scale_at(kv, head, to);
  with_element(kv.dtype, [&]<class T>() {
    constexpr int64_t P = 4 / sizeof(T);
    T* out = reinterpret_cast<T*>(key_of<T>(kv, head, to));
    write_row(kv, scale, key, [&](int64_t d) -> T& { return out[d / P * 16 * P + d % P]; });
  });
}

void write_value(const KvLayer& kv, int64_t head, const float* value, TokenPlace to) {
  float* scale = kv.v_scale == nullptr ? nullptr : kv.v_scale + scale_at(kv, head, to);
  with_element(kv.dtype, [&]<class T>() {
    constexpr int64_t P = 4 / sizeof(T);
    T* out = value_of<T>(kv, head, to);
    write_row(kv, scale, value, [&](int64_t d) -> T& { return out[d * P]; });
  });
}

}  // namespace effinfer::kv
