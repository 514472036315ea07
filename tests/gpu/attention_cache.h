// Sequences whose keys, values and queries are known, and their pages on the GPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "core/float16.h"
#include "gpu/device_arrays.h"
#include "ops/kv_layout.h"

namespace effinfer {

struct Heads {
  DType kv = DType::bf16;
  int32_t dims = 64;
  int32_t kv_heads = 1;
  int32_t group = 1;
  DType q = DType::f32;

  int32_t qo_heads() const { return kv_heads * group; }
};

inline size_t index_of(int64_t token, int64_t head, int64_t dim, int64_t heads, int64_t dims) {
  return static_cast<size_t>((token * heads + head) * dims + dim);
}

// A sequence's numbers as they are stored: i8 ones times their scales.
struct Sequence {
  int32_t length = 0;
  std::vector<float> k, v;              // [token][kv head][dim]
  std::vector<float> k_scale, v_scale;  // [token][kv head]; 1 but of i8
  std::vector<float> q;                 // [token][qo head][dim]
  std::vector<int32_t> pages;
};

class Cache {
 public:
  Cache(const Heads& heads, uint32_t seed) : heads_(heads), random_(seed) {}

  const Heads& heads() const { return heads_; }
  const Sequence& sequence(int index) const { return sequences_[static_cast<size_t>(index)]; }

  int add(int32_t length, bool exact_queries = true) {
    Sequence s;
    s.length = length;
    const int64_t rows = int64_t{length} * heads_.kv_heads;
    store(rows, s.k, s.k_scale);
    store(rows, s.v, s.v_scale);
    s.q = draw(int64_t{length} * heads_.qo_heads() * heads_.dims);
    if (exact_queries) {
      for (float& x : s.q) x = bf16_to_f32(f32_to_bf16(x));
    }
    sequences_.push_back(std::move(s));
    return static_cast<int>(sequences_.size()) - 1;
  }

  // Whose tokens are all alike.
  int add_constant(int32_t length) {
    const int one = add(length);
    Sequence& s = sequences_.back();
    for (std::vector<float>* values : {&s.k, &s.v, &s.q, &s.k_scale, &s.v_scale}) {
      const size_t width = values->size() / static_cast<size_t>(length);
      for (size_t i = width; i < values->size(); ++i) (*values)[i] = (*values)[i - width];
    }
    return one;
  }

  // The tokens of another sequence, in an order of their own.
  int add_tokens(int from, const std::vector<int32_t>& tokens) {
    const Sequence& source = sequences_[static_cast<size_t>(from)];
    Sequence s;
    s.length = static_cast<int32_t>(tokens.size());
    const int64_t kv = heads_.kv_heads;
    for (const int32_t token : tokens) {
      append(source.k, token, kv * heads_.dims, s.k);
      append(source.v, token, kv * heads_.dims, s.v);
      append(source.k_scale, token, kv, s.k_scale);
      append(source.v_scale, token, kv, s.v_scale);
      append(source.q, token, int64_t{heads_.qo_heads()} * heads_.dims, s.q);
    }
    sequences_.push_back(std::move(s));
    return static_cast<int>(sequences_.size()) - 1;
  }

  // To the device, on shuffled pages.
  void upload() {
    std::vector<int32_t> ids;
    for (const Sequence& s : sequences_) ids.resize(ids.size() + num_pages(s.length));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random_);
    const size_t page_bytes = page_numbers() * static_cast<size_t>(element_bytes());
    // Keys behind the last token may be anything; values are finite.
    std::vector<uint8_t> k(ids.size() * page_bytes, 0xff);
    std::vector<uint8_t> v(k.size(), 0);
    std::vector<float> k_scale(ids.size() * static_cast<size_t>(heads_.kv_heads * 64));
    std::vector<float> v_scale(k_scale.size());
    size_t next = 0;
    for (Sequence& s : sequences_) {
      for (size_t i = 0; i < num_pages(s.length); ++i) s.pages.push_back(ids[next++]);
      for (int32_t token = 0; token < s.length; ++token) {
        put_token(s, token, k, v, k_scale, v_scale);
      }
    }
    k_ = DeviceArray<uint8_t>(k);
    v_ = DeviceArray<uint8_t>(v);
    k_scale_ = DeviceArray<float>(k_scale);
    v_scale_ = DeviceArray<float>(v_scale);
  }

  // The device's pages of keys, on the host.
  std::vector<uint8_t> key_bytes() const { return k_.values(); }
  std::vector<uint8_t> value_bytes() const { return v_.values(); }
  std::vector<float> key_scales() const { return k_scale_.values(); }

  ops::KvLayer layer() const {
    return {heads_.kv, heads_.kv_heads, heads_.dims,     0, k_.data(),
            v_.data(), k_scale_.data(), v_scale_.data(), {}};
  }

 private:
  static size_t num_pages(int32_t length) { return static_cast<size_t>((length + 63) / 64); }
  size_t page_numbers() const { return static_cast<size_t>(64 * heads_.dims * heads_.kv_heads); }
  int element_bytes() const { return dtype_info(heads_.kv).block_bytes; }

  std::vector<float> draw(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(count));
    for (float& x : values) x = normal(random_);
    return values;
  }
  static void append(const std::vector<float>& from, int64_t token, int64_t count,
                     std::vector<float>& to) {
    to.insert(to.end(), from.begin() + token * count, from.begin() + (token + 1) * count);
  }

  void store(int64_t rows, std::vector<float>& values, std::vector<float>& scales) {
    values = draw(rows * heads_.dims);
    scales.assign(static_cast<size_t>(rows), 1.0f);
    for (size_t row = 0; row < scales.size(); ++row) {
      float* x = values.data() + row * static_cast<size_t>(heads_.dims);
      if (heads_.kv == DType::i8) scales[row] = std::abs(x[0]) * 0.01f + 0.02f;
      for (int d = 0; d < heads_.dims; ++d) {
        if (heads_.kv == DType::bf16) x[d] = bf16_to_f32(f32_to_bf16(x[d]));
        if (heads_.kv == DType::f16) x[d] = f16_to_f32(f32_to_f16(x[d]));
        if (heads_.kv == DType::i8) {
          x[d] = std::clamp(std::nearbyint(x[d] / scales[row]), -128.0f, 127.0f);
        }
      }
    }
  }

  void put(float x, int64_t element, uint8_t* to) const {
    if (heads_.kv == DType::f32) std::memcpy(to + 4 * element, &x, 4);
    if (heads_.kv == DType::i8) to[element] = static_cast<uint8_t>(static_cast<int8_t>(x));
    const uint16_t bits = heads_.kv == DType::f16 ? f32_to_f16(x) : f32_to_bf16(x);
    if (element_bytes() == 2) std::memcpy(to + 2 * element, &bits, 2);
  }

  void put_token(const Sequence& s, int32_t token, std::vector<uint8_t>& k, std::vector<uint8_t>& v,
                 std::vector<float>& k_scale, std::vector<float>& v_scale) const {
    const int64_t per_dword = 4 / element_bytes();
    const int64_t page = s.pages[static_cast<size_t>(token / 64)];
    for (int64_t head = 0; head < heads_.kv_heads; ++head) {
      const int64_t place = page * heads_.kv_heads + head;
      const int64_t bytes = place * 64 * heads_.dims * element_bytes();
      const size_t row = static_cast<size_t>(int64_t{token} * heads_.kv_heads + head);
      k_scale[static_cast<size_t>(place * 64 + token % 64)] = s.k_scale[row];
      v_scale[static_cast<size_t>(place * 64 + token % 64)] = s.v_scale[row];
      for (int64_t dim = 0; dim < heads_.dims; ++dim) {
        const size_t at = row * static_cast<size_t>(heads_.dims) + static_cast<size_t>(dim);
        put(s.k[at], ops::k_offset(token % 64, dim, heads_.dims, per_dword), k.data() + bytes);
        put(s.v[at], ops::v_offset(token % 64, dim, heads_.dims, per_dword), v.data() + bytes);
      }
    }
  }

  Heads heads_;
  std::mt19937 random_;
  std::vector<Sequence> sequences_;
  DeviceArray<uint8_t> k_, v_;
  DeviceArray<float> k_scale_, v_scale_;
};

}  // namespace effinfer
