#include "kv/page_pool.h"

#include <algorithm>
#include <string>

#include "core/memory.h"
#include "effinfer/error.h"
#include "ops/registry.h"

namespace effinfer::kv {
namespace {

constexpr size_t kAlignment = 4096;  // planes start on system pages

void require(bool condition, const char* field, const char* expected, int64_t got) {
  if (condition) return;
  throw InvalidArgument(std::string("[kv_cache] ") + field + ": expected " + expected + ", got " +
                        std::to_string(got));
}

size_t multiply(size_t a, size_t b) {
  size_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) {
    throw OutOfMemory("[kv_cache] the size of the page pool overflows");
  }
  return product;
}

size_t align_up(size_t bytes) {
  return multiply(bytes / kAlignment + (bytes % kAlignment != 0), kAlignment);
}

// Bytes of K (or of V) of one page for one head.
size_t checked_head_bytes(const KvCacheConfig& config) {
  require(config.num_layers > 0, "num_layers", "at least 1", config.num_layers);
  require(config.num_kv_heads > 0, "num_kv_heads", "at least 1", config.num_kv_heads);
  require(config.head_dim > 0 && config.head_dim % 16 == 0, "head_dim", "a positive multiple of 16",
          config.head_dim);
  const DType dtype = config.dtype;
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::i8) {
    throw InvalidArgument("[kv_cache] dtype: expected f32, f16, bf16 or i8, got " +
                          std::string(name(dtype)));
  }
  return static_cast<size_t>(ops::kPageSize) * static_cast<size_t>(config.head_dim) *
         static_cast<size_t>(dtype_info(dtype).block_bytes);
}

size_t head_scale_bytes(const KvCacheConfig& config) {
  return config.dtype == DType::i8 ? static_cast<size_t>(ops::kPageSize) * sizeof(float) : 0;
}

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

// K and V of a token of one head: of K a dword of each line, of V an element of each dword.
template <class T>
void copy_token(const ops::KvLayer& kv, int64_t head, TokenPlace from, TokenPlace to) {
  constexpr int64_t P = 4 / sizeof(T);
  const auto key = [&](TokenPlace place) {
    const int64_t first = ops::k_offset(place.token, 0, kv.head_dim, P);
    return reinterpret_cast<uint32_t*>(kv.k_head(place.page, head)) + first / P;
  };
  const auto value = [&](TokenPlace place) {
    const int64_t first = ops::v_offset(place.token, 0, kv.head_dim, P);
    return reinterpret_cast<T*>(kv.v_head(place.page, head)) + first;
  };
  const uint32_t* k_from = key(from);
  uint32_t* k_to = key(to);
  for (int64_t i = 0; i < kv.head_dim / P; ++i) k_to[i * 16] = k_from[i * 16];
  const T* v_from = value(from);
  T* v_to = value(to);
  for (int64_t d = 0; d < kv.head_dim; ++d) v_to[d * P] = v_from[d * P];
}

void copy_scales(const ops::KvLayer& kv, int64_t head, TokenPlace from, TokenPlace to) {
  if (kv.k_scale == nullptr) return;
  const auto at = [&](TokenPlace place) {
    return (place.page * int64_t{kv.num_kv_heads} + head) * ops::kPageSize + place.token;
  };
  kv.k_scale[at(to)] = kv.k_scale[at(from)];
  kv.v_scale[at(to)] = kv.v_scale[at(from)];
}

void move_on_host(const ops::MoveTokensProblem& p) {
  for (int64_t head = 0; head < p.kv.num_kv_heads; ++head) {
    for (int32_t i = 0; i < p.count; ++i) {
      with_element(p.kv.dtype, [&]<class T>() { copy_token<T>(p.kv, head, p.from[i], p.to[i]); });
      copy_scales(p.kv, head, p.from[i], p.to[i]);
    }
  }
}

}  // namespace

size_t page_bytes(const KvCacheConfig& config) {
  const size_t head = checked_head_bytes(config) + head_scale_bytes(config);
  return multiply(multiply(2 * head, static_cast<size_t>(config.num_kv_heads)),
                  static_cast<size_t>(config.num_layers));
}

PagePool::PagePool(const KvCacheConfig& config)
    : config_(config), memory_(memory_of(config.device)) {
  head_bytes_ = checked_head_bytes(config);
  require(config.num_pages > 0, "num_pages", "at least 1", config.num_pages);
  const size_t heads =
      multiply(static_cast<size_t>(config.num_pages), static_cast<size_t>(config.num_kv_heads));
  plane_bytes_ = align_up(multiply(heads, head_bytes_));
  scale_bytes_ = align_up(multiply(heads, head_scale_bytes(config)));
  if (plane_bytes_ > SIZE_MAX - scale_bytes_) {
    throw OutOfMemory("[kv_cache] the size of the page pool overflows");
  }
  num_bytes_ =
      multiply(multiply(plane_bytes_ + scale_bytes_, 2), static_cast<size_t>(config.num_layers));
  // The system maps memory that it could never back; refuse here instead of dying at first use.
  const size_t limit = memory_.capacity();
  if (num_bytes_ <= limit) region_ = memory_.allocate(num_bytes_, Pages::lazy);
  if (!region_) {
    throw OutOfMemory("[kv_cache] num_pages: a pool of " + std::to_string(config.num_pages) +
                      " pages takes " + std::to_string(num_bytes_) + " bytes, the machine has " +
                      std::to_string(limit));
  }
  for (int32_t i = 0; i < config.num_layers; ++i) layers_.push_back(layer(i));
  if (config.device.kind != DeviceKind::cpu) {
    queue_ = make_queue(config.device);
    move_on_device_ =
        &ops::table<ops::MoveTokensProblem>().select({}, current_target(config.device));
  }
  const size_t count = static_cast<size_t>(config.num_pages);
  references_.assign(count, 0);
  used_before_.assign(count, 0);
  free_.resize(count);
  for (size_t i = 0; i < count; ++i) free_[i] = static_cast<int32_t>(count - 1 - i);
}

ops::KvLayer PagePool::layer(int32_t index) const {
  ops::KvLayer layer;
  layer.dtype = config_.dtype;
  layer.num_kv_heads = config_.num_kv_heads;
  layer.head_dim = config_.head_dim;
  layer.num_pages = config_.num_pages;
  layer.k = static_cast<uint8_t*>(region_.get()) +
            static_cast<size_t>(index) * 2 * (plane_bytes_ + scale_bytes_);
  layer.v = layer.k + plane_bytes_;
  if (scale_bytes_ > 0) {
    layer.k_scale = reinterpret_cast<float*>(layer.v + plane_bytes_);
    layer.v_scale = reinterpret_cast<float*>(layer.v + plane_bytes_ + scale_bytes_);
  }
  return layer;
}

int32_t PagePool::take() {
  if (free_.empty()) throw InternalError("[kv_cache] no page is free");
  const int32_t page = free_.back();
  free_.pop_back();
  references_[static_cast<size_t>(page)] = 1;
  return page;
}

int32_t PagePool::allocate() {
  const int32_t page = take();
  uint8_t& used = used_before_[static_cast<size_t>(page)];
  if (used != 0) {
    const size_t heads = static_cast<size_t>(config_.num_kv_heads);
    for (const ops::KvLayer& kv : layers_) {
      memory_.zero(kv.v_head(page, 0), heads * head_bytes_);
      if (kv.v_scale == nullptr) continue;
      memory_.zero(kv.v_scale + static_cast<size_t>(page) * heads * ops::kPageSize,
                   heads * ops::kPageSize * sizeof(float));
    }
  }
  used = 1;
  return page;
}

int32_t PagePool::allocate_copy(int32_t page) {
  const int32_t copy = take();
  used_before_[static_cast<size_t>(copy)] = 1;
  const size_t heads = static_cast<size_t>(config_.num_kv_heads);
  const size_t scales = heads * ops::kPageSize;
  for (const ops::KvLayer& kv : layers_) {
    memory_.copy(kv.k_head(copy, 0), kv.k_head(page, 0), heads * head_bytes_);
    memory_.copy(kv.v_head(copy, 0), kv.v_head(page, 0), heads * head_bytes_);
    if (kv.k_scale == nullptr) continue;
    const size_t from = static_cast<size_t>(page) * scales;
    const size_t to = static_cast<size_t>(copy) * scales;
    memory_.copy(kv.k_scale + to, kv.k_scale + from, scales * sizeof(float));
    memory_.copy(kv.v_scale + to, kv.v_scale + from, scales * sizeof(float));
  }
  return copy;
}

void PagePool::close_up(std::span<const int32_t> pages, int64_t first,
                        std::span<const int32_t> rows) {
  size_t next = 0;  // the rows before it lie where they belong
  while (next < rows.size() && rows[next] == static_cast<int64_t>(next)) ++next;
  const auto place = [&](int64_t token) {
    return TokenPlace{pages[static_cast<size_t>(token / ops::kPageSize)],
                      static_cast<int32_t>(token % ops::kPageSize)};
  };
  while (next < rows.size()) {
    ops::MoveTokensProblem moves;
    for (; next < rows.size() && moves.count < ops::MoveTokensProblem::kMost; ++next) {
      moves.from[moves.count] = place(first + rows[next]);
      moves.to[moves.count] = place(first + static_cast<int64_t>(next));
      ++moves.count;
    }
    for (const ops::KvLayer& kv : layers_) {
      moves.kv = kv;
      if (queue_) {
        move_on_device_->launch(moves, *queue_);
      } else {
        move_on_host(moves);
      }
    }
  }
  if (queue_) queue_->wait();
}

void PagePool::release(int32_t page) {
  int32_t& count = references_[static_cast<size_t>(page)];
  if (count <= 0) throw InternalError("[kv_cache] a free page was released");
  if (--count == 0) free_.push_back(page);
}

void PagePool::check(std::span<const int32_t> expected) const {
  std::vector<uint8_t> is_free(references_.size(), 0);
  for (const int32_t page : free_) {
    if (is_free[static_cast<size_t>(page)]++ != 0) {
      throw InternalError("[kv_cache] page " + std::to_string(page) + " is free twice");
    }
  }
  for (size_t page = 0; page < references_.size(); ++page) {
    if (references_[page] != expected[page] || (references_[page] == 0) != (is_free[page] != 0)) {
      throw InternalError("[kv_cache] page " + std::to_string(page) + ": " +
                          std::to_string(references_[page]) + " references, " +
                          std::to_string(expected[page]) + " holders, " +
                          (is_free[page] != 0 ? "in" : "not in") + " the free list");
    }
  }
}

}  // namespace effinfer::kv
