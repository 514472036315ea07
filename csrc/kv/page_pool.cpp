#include "kv/page_pool.h"

#include <algorithm>
#include <string>

#include "core/memory.h"
#include "effinfer/error.h"

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

}  // namespace

size_t page_bytes(const KvCacheConfig& config) {
  const size_t head = checked_head_bytes(config) + head_scale_bytes(config);
  return multiply(multiply(2 * head, static_cast<size_t>(config.num_kv_heads)),
                  static_cast<size_t>(config.num_layers));
}

int64_t num_page_ids(const KvCacheConfig& config) {
  const int64_t written = config.num_pages;
  if (config.coding.bits == 0) return written;
  // Pages of layers with a window are not encoded.
  const size_t layers = config.groups.empty() ? static_cast<size_t>(config.num_layers)
                                              : config.groups[0].layers.size();
  const size_t page = page_bytes(config) / static_cast<size_t>(config.num_layers) * layers;
  return written +
         num_coded_pages(config, static_cast<int64_t>(layers), static_cast<size_t>(written) * page);
}

std::string index_kind(const KvCacheConfig& config) {
  if (config.index_bits > 0) return std::to_string(config.index_bits) + " bits";
  return config.index_means ? "means" : "bounds";
}

PagePool::PagePool(const KvCacheConfig& config) : config_(config) {
  head_bytes_ = checked_head_bytes(config);
  require(config.num_pages > 0, "num_pages", "at least 1", config.num_pages);
  const auto num_layers = static_cast<size_t>(config.num_layers);
  const size_t heads =
      multiply(static_cast<size_t>(config.num_pages), static_cast<size_t>(config.num_kv_heads));
  plane_bytes_ = align_up(multiply(heads, head_bytes_));
  scale_bytes_ = align_up(multiply(heads, head_scale_bytes(config)));
  if (plane_bytes_ > SIZE_MAX - scale_bytes_) {
    throw OutOfMemory("[kv_cache] the size of the page pool overflows");
  }
  num_bytes_ = multiply(multiply(plane_bytes_ + scale_bytes_, 2), num_layers);
  for (int32_t i = 0; i < config.num_layers; ++i) {
    Bank& bank = bank_on(config.device_of(i));
    ++bank.num_layers;
    bank_of_.push_back(static_cast<size_t>(&bank - banks_.data()));
  }
  for (Bank& bank : banks_) allocate(bank);
  for (const size_t bank : bank_of_) layers_.push_back(next_layer(banks_[bank]));
  if (config.coding.bits != 0) {
    coded_ = std::make_unique<CodedStore>(config, capacity_bytes());
    for (size_t i = 0; i < num_layers; ++i) layers_[i].coded = coded_->layer(i, layers_);
  }
  if (config.index_unit != 0 || config.index_bits != 0) check_index();
  if (config.index_unit > 1 || config.index_bits > 0) allocate_bounds();
  const size_t count = static_cast<size_t>(config.num_pages);
  references_.assign(count + (coded_ ? static_cast<size_t>(coded_->num_coded()) : 0), 0);
  written_.assign(count, Written::never);
  is_filling_.assign(count, 0);
  free_.resize(count);
  for (size_t i = 0; i < count; ++i) free_[i] = static_cast<int32_t>(count - 1 - i);
}

PagePool::Bank& PagePool::bank_on(Device device) {
  for (Bank& bank : banks_) {
    if (bank.memory.device() == device) return bank;
  }
  return banks_.emplace_back(Bank{memory_of(device)});
}

void PagePool::allocate(Bank& bank) {
  const size_t bytes = (plane_bytes_ + scale_bytes_) * 2 * bank.num_layers;
  // The system maps memory that it could never back; refuse here instead of dying at first use.
  const size_t limit = bank.memory.capacity();
  if (bytes <= limit) bank.region = bank.memory.allocate(bytes, Pages::lazy);
  const Device device = bank.memory.device();
  const bool on_host = device.kind == DeviceKind::cpu;
  if (!bank.region) {
    throw OutOfMemory("[kv_cache] num_pages: a pool of " + std::to_string(config_.num_pages) +
                      " pages takes " + std::to_string(bytes) + " bytes, " +
                      (on_host ? "the machine" : name(device)) + " has " + std::to_string(limit));
  }
  if (on_host) return;
  bank.queue = make_queue(device);
}

ops::KvLayer PagePool::next_layer(Bank& bank) {
  ops::KvLayer layer;
  layer.dtype = config_.dtype;
  layer.num_kv_heads = config_.num_kv_heads;
  layer.head_dim = config_.head_dim;
  layer.num_pages = config_.num_pages;
  bank.layers.stride = static_cast<int64_t>(2 * (plane_bytes_ + scale_bytes_));
  layer.k = static_cast<uint8_t*>(bank.region.get()) + bank.layers.count * bank.layers.stride;
  layer.v = layer.k + plane_bytes_;
  if (scale_bytes_ > 0) {
    layer.k_scale = reinterpret_cast<float*>(layer.v + plane_bytes_);
    layer.v_scale = reinterpret_cast<float*>(layer.v + plane_bytes_ + scale_bytes_);
  }
  if (bank.layers.count++ == 0) bank.layers.first = layer;
  return layer;
}

void PagePool::check_index() const {
  const int64_t unit = config_.index_unit;
  const int64_t bits = config_.index_bits;
  require(bits >= 0 && (bits == 0 || unit == 1), "index_bits", "0, or bits of units of 1", bits);
  require(unit == 1 || ops::is_bounds_unit(unit), "index_unit", "0, 1, 16, 32 or 64", unit);
  if (coded_) throw Unsupported("[kv_cache] index_unit: not beside coding");
}

// Of all layers, beside their pages.
void PagePool::allocate_bounds() {
  const auto heads = static_cast<size_t>(config_.num_kv_heads);
  ops::PageBounds kept;
  kept.unit = config_.index_unit;
  kept.vectors = config_.index_means ? 1 : 2;
  kept.code_bits = config_.index_bits;
  const auto numbers = static_cast<size_t>(kept.page_numbers(config_.head_dim));
  const size_t plane =
      multiply(static_cast<size_t>(config_.num_pages), heads * numbers * sizeof(uint16_t));
  for (Bank& bank : banks_) allocate_bounds(bank, plane);
  std::vector<size_t> next(banks_.size());
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Bank& bank = bank_of(i);
    const size_t place = next[bank_of_[i]]++;
    ops::PageBounds& bounds = layers_[i].bounds;
    bounds.values = static_cast<uint16_t*>(bank.bounds.get()) + place * plane / sizeof(uint16_t);
    bounds.known = bank.known.get() + place * heads;
    bounds.known_stride = static_cast<int64_t>(bank.known_of_page);
    bounds.unit = kept.unit;
    bounds.vectors = kept.vectors;
    bounds.code_bits = kept.code_bits;
  }
}

// `plane`: bytes of a layer.
void PagePool::allocate_bounds(Bank& bank, size_t plane) {
  bank.known_of_page = bank.num_layers * static_cast<size_t>(config_.num_kv_heads);
  const size_t bytes = multiply(plane, bank.num_layers);
  const size_t flags =
      multiply(static_cast<size_t>(config_.num_pages), bank.known_of_page * sizeof(int32_t));
  bank.bounds = bank.memory.allocate(bytes, Pages::lazy);
  bank.known = std::static_pointer_cast<int32_t>(bank.memory.allocate(flags, Pages::lazy));
  if (!bank.bounds || !bank.known) {
    throw OutOfMemory("[kv_cache] index_unit: no memory for " + std::to_string(bytes + flags) +
                      " bytes on " + name(bank.memory.device()));
  }
  num_bytes_ += bytes + flags;
}

void PagePool::forget_bounds(int32_t page) {
  for (const Bank& bank : banks_) {
    if (!bank.known) continue;
    bank.memory.zero(bank.known.get() + static_cast<size_t>(page) * bank.known_of_page,
                     bank.known_of_page * sizeof(int32_t));
  }
}

int32_t PagePool::take() {
  if (free_.empty()) throw InternalError("[kv_cache] no page is free");
  const int32_t page = free_.back();
  free_.pop_back();
  references_[static_cast<size_t>(page)] = 1;
  forget_bounds(page);
  is_filling_[static_cast<size_t>(page)] = 0;
  return page;
}

int32_t PagePool::allocate() {
  const int32_t page = take();
  Written& written = written_[static_cast<size_t>(page)];
  if (written != Written::never) {
    const size_t heads = static_cast<size_t>(config_.num_kv_heads);
    for (size_t i = 0; i < layers_.size(); ++i) {
      if (written == Written::on_devices && is_on_host(i)) continue;
      const ops::KvLayer& kv = layers_[i];
      const Memory& memory = bank_of(i).memory;
      memory.zero(kv.v_head(page, 0), heads * head_bytes_);
      if (kv.v_scale == nullptr) continue;
      memory.zero(kv.v_scale + static_cast<size_t>(page) * heads * ops::kPageSize,
                  heads * ops::kPageSize * sizeof(float));
    }
  }
  written = Written::everywhere;
  return page;
}

int32_t PagePool::allocate_copy(int32_t page) {
  const int32_t copy = take();
  written_[static_cast<size_t>(copy)] = Written::everywhere;
  const size_t heads = static_cast<size_t>(config_.num_kv_heads);
  const size_t scales = heads * ops::kPageSize;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const ops::KvLayer& kv = layers_[i];
    const Memory& memory = bank_of(i).memory;
    memory.copy(kv.k_head(copy, 0), kv.k_head(page, 0), heads * head_bytes_);
    memory.copy(kv.v_head(copy, 0), kv.v_head(page, 0), heads * head_bytes_);
    if (kv.k_scale == nullptr) continue;
    const size_t from = static_cast<size_t>(page) * scales;
    const size_t to = static_cast<size_t>(copy) * scales;
    memory.copy(kv.k_scale + to, kv.k_scale + from, scales * sizeof(float));
    memory.copy(kv.v_scale + to, kv.v_scale + from, scales * sizeof(float));
  }
  return copy;
}

// A GPU has the keys of all heads apart from their values.
template <class F>
void PagePool::for_coded_parts(int32_t page, F&& f) const {
  for (size_t i = 0; i < layers_.size(); i += coded_->shared_layers()) {
    const Memory& memory = bank_of(i).memory;
    const ops::CodedPages& coded = layers_[i].coded;
    if (is_on_host(i)) {
      f(memory, coded.head(page, 0), coded_->layer_page_bytes());
      continue;
    }
    for (int32_t head = 0; head < coded.num_kv_heads; ++head) {
      f(memory, coded.keys_of(page, head), coded.key_bytes());
      f(memory, coded.values_of(page, head), coded.behind_keys());
    }
  }
}

template <class F>
void PagePool::for_parts(int32_t page, F&& f) const {
  if (is_coded(page)) return for_coded_parts(page, f);
  const auto heads = static_cast<size_t>(config_.num_kv_heads);
  const size_t scales = heads * ops::kPageSize;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const ops::KvLayer& kv = layers_[i];
    const Memory& memory = bank_of(i).memory;
    f(memory, kv.k_head(page, 0), heads * head_bytes_);
    f(memory, kv.v_head(page, 0), heads * head_bytes_);
    if (kv.k_scale == nullptr) continue;
    f(memory, kv.k_scale + static_cast<size_t>(page) * scales, scales * sizeof(float));
    f(memory, kv.v_scale + static_cast<size_t>(page) * scales, scales * sizeof(float));
  }
}

size_t PagePool::capacity_bytes() const {
  return static_cast<size_t>(config_.num_pages) * page_bytes();
}

int32_t PagePool::free_pages() const {
  if (!coded_ || coded_->in_pages()) return static_cast<int32_t>(free_.size());
  const size_t used = used_bytes();
  const size_t page = page_bytes();
  if (used <= capacity_bytes()) return static_cast<int32_t>((capacity_bytes() - used) / page);
  return -static_cast<int32_t>((used - capacity_bytes() + page - 1) / page);
}

size_t PagePool::pages_of(size_t plain, size_t coded) const {
  if (coded_ && coded_->in_pages()) return plain + coded_->pages_for(coded);
  return plain + (coded * coded_page_bytes() + page_bytes() - 1) / page_bytes();
}

size_t PagePool::used_bytes() const {
  const size_t plain = static_cast<size_t>(config_.num_pages) - free_.size();
  if (coded_ && coded_->in_pages()) return plain * page_bytes();
  return plain * page_bytes() + static_cast<size_t>(num_coded()) * coded_page_bytes();
}

void PagePool::read_page(int32_t page, std::byte* out) const {
  for_parts(page, [&](const Memory& memory, const void* part, size_t bytes) {
    memory.copy(out, part, bytes);
    out += bytes;
  });
}

void PagePool::write_page(int32_t page, const std::byte* from) {
  for_parts(page, [&](const Memory& memory, void* part, size_t bytes) {
    memory.copy(part, from, bytes);
    from += bytes;
  });
}

void PagePool::release(int32_t page) {
  int32_t& count = references_[static_cast<size_t>(page)];
  if (count <= 0) throw InternalError("[kv_cache] a free page was released");
  if (--count > 0) return;
  forget_coding(page);
  if (is_coded(page)) page = coded_->put_back(page);
  if (page >= 0) free_.push_back(page);
}

void PagePool::check(std::span<const int32_t> expected) const {
  std::vector<uint8_t> is_free(references_.size(), 0);
  for (const int32_t page : free_) {
    if (is_free[static_cast<size_t>(page)]++ != 0) {
      throw InternalError("[kv_cache] page " + std::to_string(page) + " is free twice");
    }
  }
  if (coded_) coded_->check(is_free);
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
