// The pages of one KV head of one of several layers, as numbers of T's size.
#pragma once

#include <cstdint>

#include "cuda/unit.h"
#include "ops/kv_layers.h"

namespace effinfer::cuda {

// Bytes of a number of a page.
EFFINFER_DEVICE int element_bytes(DType dtype) {
  return dtype == DType::f32 ? 4 : dtype == DType::i8 ? 1 : 2;
}

template <class T>
class HeadPages {
 public:
  // Head `index` of (layer, KV head).
  EFFINFER_DEVICE HeadPages(const ops::KvLayers& layers, int index)
      : dims_(layers.first.head_dim), heads_(layers.first.num_kv_heads) {
    const int64_t begin = index / heads_ * layers.stride;
    const int64_t head = index % heads_;
    k_ = reinterpret_cast<T*>(layers.first.k + begin) + head * ops::kPageSize * dims_;
    v_ = reinterpret_cast<T*>(layers.first.v + begin) + head * ops::kPageSize * dims_;
    if (layers.first.k_scale == nullptr) return;
    const int64_t scale = begin / static_cast<int64_t>(sizeof(float)) + head * ops::kPageSize;
    k_scale_ = layers.first.k_scale + scale;
    v_scale_ = layers.first.v_scale + scale;
  }

  EFFINFER_DEVICE int dims() const { return dims_; }
  EFFINFER_DEVICE bool has_scales() const { return k_scale_ != nullptr; }
  EFFINFER_DEVICE T& key(ops::TokenPlace place, int dim) const {
    return k_[page(place) * dims_ + ops::k_offset(place.token, dim, dims_, kShare)];
  }
  EFFINFER_DEVICE T& value(ops::TokenPlace place, int dim) const {
    return v_[page(place) * dims_ + ops::v_offset(place.token, dim, dims_, kShare)];
  }
  EFFINFER_DEVICE float& key_scale(ops::TokenPlace place) const {
    return k_scale_[page(place) + place.token];
  }
  EFFINFER_DEVICE float& value_scale(ops::TokenPlace place) const {
    return v_scale_[page(place) + place.token];
  }

 private:
  static constexpr int64_t kShare = 4 / static_cast<int64_t>(sizeof(T));  // of a dword

  // Tokens of the head before the page.
  EFFINFER_DEVICE int64_t page(ops::TokenPlace place) const {
    return int64_t{place.page} * heads_ * ops::kPageSize;
  }

  const int dims_;
  const int heads_;
  T* k_;
  T* v_;
  float* k_scale_ = nullptr;
  float* v_scale_ = nullptr;
};

}  // namespace effinfer::cuda
