// Rows of one KV head: norm, rotation, and the store of K and V into their pages. Norm and rotation
// are those of the unfused operators (norm.simd.cpp, rope.simd.cpp), so fusing changes no bit.
#include "cpu/rope_append.h"

#include "cpu/level.h"
#include "cpu/vectors/norm_rows.h"
#include "cpu/vectors/rope_heads.h"
#include "ops/kv_layout.h"
#include "ops/operand.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

using ops::RopeAppendProblem;

constexpr int64_t kMaxHeadDim = 256;

// Norm and rotation of one head of a row; `out` may be x.
void prepare(const RopeAppendProblem& p, int64_t row, const float* x, const float* norm,
             float* out) {
  const int64_t head_dim = p.kv.head_dim;
  if (norm != nullptr) {
    const NormWeight<float> weight{norm, 0.0f, p.norm_eps};
    rms_norm_row<false, float>(x, nullptr, nullptr, head_dim, weight, out);
    x = out;
  }
  const int64_t dims = p.cos_sin == nullptr ? 0 : p.rope_dims;
  const int64_t half = dims / 2;
  const float* cos = p.cos_sin + row * dims;
  if (p.interleaved) {
    rope_head_interleaved(x, cos, cos + half, half, out);
  } else {
    rope_head(x, cos, cos + half, half, out);
  }
  if (out != x) {
    memcpy(out + dims, x + dims, static_cast<size_t>(head_dim - dims) * sizeof(float));
  }
}

// Where the keys and values of a token go.
struct Target {
  uint8_t* k;  // the head's part of the page
  uint8_t* v;
  float* k_scale;  // [64], i8 only
  float* v_scale;
  int64_t token;  // place in the page
};

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
void append(const float* k, const float* v, int64_t dim, const Target& to, Convert&& convert) {
  T values[kMaxHeadDim];
  for (int64_t d = 0; d < dim; ++d) values[d] = convert(k[d]);
  store_k(values, dim, to.token, to.k);
  for (int64_t d = 0; d < dim; ++d) values[d] = convert(v[d]);
  store_v(values, dim, to.token, to.v);
}

void append_i8(const float* k, const float* v, int64_t dim, const Target& to) {
  int8_t values[kMaxHeadDim];
  to.k_scale[to.token] = quantize(k, dim, values);
  store_k(values, dim, to.token, to.k);
  to.v_scale[to.token] = quantize(v, dim, values);
  store_v(values, dim, to.token, to.v);
}

void append_row(const RopeAppendProblem& p, int64_t row, int64_t head, const Target& to) {
  const int64_t dim = p.kv.head_dim;
  alignas(64) float k[kMaxHeadDim];
  prepare(p, row, p.k + row * p.k_stride + head * dim, p.k_norm, k);
  const float* v = p.v + row * p.v_stride + head * dim;
  switch (p.kv.dtype) {
    case DType::f32:
      return append<float>(k, v, dim, to, [](float x) { return x; });
    case DType::f16:
      return append<uint16_t>(k, v, dim, to, [](float x) { return f32_to_f16(x); });
    case DType::bf16:
      return append<uint16_t>(k, v, dim, to, [](float x) { return f32_to_bf16(x); });
    default:
      return append_i8(k, v, dim, to);
  }
}

void append_rows(const RopeAppendProblem& p, const RopeAppendRows& rows) {
  const ops::BatchLayout& batch = p.batch;
  const int64_t group = p.q == nullptr ? 0 : p.num_qo_heads / p.kv.num_kv_heads;
  int64_t sequence = rows.sequence;
  for (int64_t row = rows.first; row < rows.last; ++row) {
    for (int64_t i = 0; i < group; ++i) {
      const float* q = p.q + row * p.q_stride + (rows.head * group + i) * p.kv.head_dim;
      float* q_out = rows.q_out + (row - rows.first) * rows.q_out_stride + i * p.kv.head_dim;
      prepare(p, row, q, p.q_norm, q_out);
    }
    while (row >= batch.qo_indptr[sequence + 1]) ++sequence;
    const int64_t position = batch.kv_len[sequence] - (batch.qo_indptr[sequence + 1] - row);
    const int64_t index = position / ops::kPageSize;
    if (index < rows.first_page || index >= rows.end_page) continue;
    const int64_t page = batch.kv_indices[batch.kv_indptr[sequence] + index];
    Target to = {p.kv.k_head(page, rows.head), p.kv.v_head(page, rows.head), nullptr, nullptr,
                 position % ops::kPageSize};
    if (p.kv.dtype == DType::i8) {
      const int64_t offset = (page * p.kv.num_kv_heads + rows.head) * ops::kPageSize;
      to.k_scale = p.kv.k_scale + offset;
      to.v_scale = p.kv.v_scale + offset;
    }
    append_row(p, row, rows.head, to);
  }
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
const RopeAppendKernel& kernels<Level::EFFINFER_LEVEL>() {
  static constexpr RopeAppendKernel kKernel = {EFFINFER_LEVEL::append_rows};
  return kKernel;
}

}  // namespace effinfer::cpu
