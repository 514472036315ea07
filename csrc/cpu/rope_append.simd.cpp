// One token of one KV head: norm, rotation, and the store of K and V into their page. Norm and
// rotation are those of the unfused operators (norm.simd.cpp, rope.simd.cpp), so fusing changes no
// bit.
#include "cpu/rope_append.h"

#include "cpu/level.h"
#include "cpu/vectors/norm_rows.h"
#include "cpu/vectors/rope_heads.h"
#include "ops/kv_layout.h"
#include "ops/operand.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

constexpr int64_t kMaxHeadDim = 256;

// Norm and rotation of one head; `out` may be x.
void prepare(const RopeAppendRow& p, const float* x, const float* norm, float* out) {
  if (norm != nullptr) {
    const NormWeight<float> weight{norm, 0.0f, p.norm_eps};
    rms_norm_row<false, float>(x, nullptr, nullptr, p.head_dim, weight, out);
    x = out;
  }
  const int64_t dims = p.cos_sin == nullptr ? 0 : p.rope_dims;
  const int64_t half = dims / 2;
  if (p.interleaved) {
    rope_head_interleaved(x, p.cos_sin, p.cos_sin + half, half, out);
  } else {
    rope_head(x, p.cos_sin, p.cos_sin + half, half, out);
  }
  if (out != x) {
    memcpy(out + dims, x + dims, static_cast<size_t>(p.head_dim - dims) * sizeof(float));
  }
}

// K: a dword of P dims every 16 tokens. V: the token's element of every dword of P tokens.
template <class T>
void store_k(const T* values, int64_t dim, int64_t token, uint8_t* page) {
  constexpr int64_t P = 4 / sizeof(T);
  uint8_t* to = page + static_cast<size_t>(ops::k_offset(token, 0, dim, P)) * sizeof(T);
  for (int64_t d = 0; d < dim; d += P) memcpy(to + d / P * 64, values + d, 4);
}
template <class T>
void store_v(const T* values, int64_t dim, int64_t token, uint8_t* page) {
  constexpr int64_t P = 4 / sizeof(T);
  T* to = reinterpret_cast<T*>(page) + ops::v_offset(token, 0, dim, P);
  for (int64_t d = 0; d < dim; ++d) to[d * P] = values[d];
}

// value = scale * q with scale = max|x| / 127 and q rounded to nearest even. A head that holds an
// infinity or a NaN has a NaN scale.
float quantize(const float* x, int64_t dim, int8_t* q) {
  uint32_t bits = 0;  // of |x|: they order as the numbers do, NaNs on top
  for (int64_t d = 0; d < dim; ++d) {
    const uint32_t magnitude = __builtin_bit_cast(uint32_t, x[d]) & 0x7fffffffu;
    bits = magnitude > bits ? magnitude : bits;
  }
  const float highest = __builtin_bit_cast(float, bits);
  const bool finite = bits < 0x7f800000u;
  if (!finite || highest < ops::kSmallestBlock) {
    memset(q, 0, static_cast<size_t>(dim));
    return finite ? 0.0f : __builtin_nanf("");
  }
  const float inverse = 127.0f / highest;
  for (int64_t d = 0; d < dim; ++d) {
    const float rounded = x[d] * inverse + simd::kRound;
    q[d] = static_cast<int8_t>(static_cast<int32_t>(rounded - simd::kRound));
  }
  return highest / 127.0f;
}

template <class T, class Convert>
void append(const RopeAppendRow& p, const float* k, Convert&& convert) {
  T values[kMaxHeadDim];
  for (int64_t d = 0; d < p.head_dim; ++d) values[d] = convert(k[d]);
  store_k(values, p.head_dim, p.token, p.k_page);
  for (int64_t d = 0; d < p.head_dim; ++d) values[d] = convert(p.v[d]);
  store_v(values, p.head_dim, p.token, p.v_page);
}

void append_i8(const RopeAppendRow& p, const float* k) {
  int8_t values[kMaxHeadDim];
  p.k_scale[p.token] = quantize(k, p.head_dim, values);
  store_k(values, p.head_dim, p.token, p.k_page);
  p.v_scale[p.token] = quantize(p.v, p.head_dim, values);
  store_v(values, p.head_dim, p.token, p.v_page);
}

void append_row(const RopeAppendRow& p) {
  for (int32_t head = 0; head < p.group; ++head) {
    const int64_t offset = static_cast<int64_t>(head) * p.head_dim;
    prepare(p, p.q + offset, p.q_norm, p.q_out + offset);
  }
  if (p.k == nullptr) return;
  alignas(64) float k[kMaxHeadDim];
  prepare(p, p.k, p.k_norm, k);
  switch (p.kv_dtype) {
    case DType::f32:
      return append<float>(p, k, [](float x) { return x; });
    case DType::f16:
      return append<uint16_t>(p, k, [](float x) { return f32_to_f16(x); });
    case DType::bf16:
      return append<uint16_t>(p, k, [](float x) { return f32_to_bf16(x); });
    default:
      return append_i8(p, k);
  }
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
const RopeAppendKernel& kernels<Level::EFFINFER_LEVEL>() {
  static constexpr RopeAppendKernel kKernel = {EFFINFER_LEVEL::append_row};
  return kKernel;
}

}  // namespace effinfer::cpu
