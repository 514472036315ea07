#include "kv/coded_store.h"

#include <algorithm>
#include <limits>
#include <ranges>
#include <string>

#include "core/memory.h"
#include "effinfer/error.h"

namespace effinfer::kv {
namespace {

constexpr size_t kAlignment = 4096;  // layers start on system pages

void check_config(const KvCacheConfig& config) {
  const KvCoding& coding = config.coding;
  if (coding.bits != 4 && coding.bits != 2) {
    throw InvalidArgument("[kv_cache] coding.bits: expected 0, 2 or 4, got " +
                          std::to_string(coding.bits));
  }
  if (coding.residual < 0) {
    throw InvalidArgument("[kv_cache] coding.residual: expected at least 0, got " +
                          std::to_string(coding.residual));
  }
  const auto require_within = [](const char* field, int32_t most, int32_t got) {
    if (got >= 0 && got <= most) return;
    throw InvalidArgument(std::string("[kv_cache] coding.") + field + ": expected 0.." +
                          std::to_string(most) + ", got " + std::to_string(got));
  };
  require_within("rank", ops::CodedPages::kMostRank, coding.rank);
  require_within("outliers", ops::CodedPages::kMostOutliers, coding.outliers);
  check_features(config);
  check_codebooks(config);
  if (config.dtype == DType::bf16 || config.dtype == DType::f32) return;
  throw Unsupported("[kv_cache] coding: expected pages of bf16 or f32, got " +
                    std::string(name(config.dtype)));
}

// Without its memory; `features` and `codebooks` say of which shape they are.
ops::CodedPages layer_of(const KvCacheConfig& config, const ops::PageFeatures& features,
                         const ops::PageCodebooks& codebooks) {
  const bool has = features.count > 0;
  return {config.coding.bits,
          config.num_pages,
          has ? features.num_parts() : config.num_kv_heads,
          has ? features.part_count() : config.head_dim,
          nullptr,
          config.coding.rank,
          config.coding.outliers,
          has ? &features : nullptr,
          config.coding.codebooks ? &codebooks : nullptr};
}

size_t num_stored_layers(const KvCacheConfig& config, int64_t num_layers) {
  const int64_t shared = std::max(config.coding.shared_layers, 1);
  return static_cast<size_t>((num_layers + shared - 1) / shared);
}

bool is_on_host(const KvCacheConfig& config, int32_t layer) {
  return config.device_of(layer).kind == DeviceKind::cpu;
}

// Whether a GPU has any of the layers whose pages are encoded.
bool is_on_gpu(const KvCacheConfig& config) {
  const auto is_there = [&](int32_t layer) { return !is_on_host(config, layer); };
  if (!config.groups.empty()) return std::ranges::any_of(config.groups[0].layers, is_there);
  return std::ranges::any_of(std::views::iota(0, config.num_layers), is_there);
}

// How many coded pages the slot of a layer has room for; 0: they have memory of their own.
int32_t layer_parts_of(const KvCacheConfig& config, const ops::CodedPages& layer) {
  if (!is_on_gpu(config)) return 0;
  const auto parts = static_cast<size_t>(layer.num_kv_heads);
  const size_t slot = static_cast<size_t>(config.num_kv_heads * config.head_dim) * ops::kPageSize *
                      static_cast<size_t>(dtype_info(config.dtype).block_bytes);
  const size_t coded = parts * std::max(layer.key_bytes(), layer.behind_keys());
  if (coded <= slot) return static_cast<int32_t>(slot / coded);
  throw Unsupported("[kv_cache] coding: on a GPU an encoded page lies where one of " +
                    std::to_string(slot) + " bytes a layer was, and takes " +
                    std::to_string(coded));
}

// How many coded pages the slots of a page have room for: those of as many layers as share the
// least.
int32_t parts_of(const KvCacheConfig& config, const ops::CodedPages& layer, int64_t num_layers) {
  const int64_t shared = std::max(config.coding.shared_layers, 1);
  const int64_t last = num_layers % shared;
  return layer_parts_of(config, layer) * static_cast<int32_t>(last == 0 ? shared : last);
}

}  // namespace

int32_t num_coded_pages(const KvCacheConfig& config, int64_t num_layers, size_t pool_bytes) {
  const ops::PageFeatures features = {.count = config.coding.features};
  const ops::PageCodebooks codebooks;
  const ops::CodedPages layer = layer_of(config, features, codebooks);
  const size_t page = num_stored_layers(config, num_layers) *
                      static_cast<size_t>(layer.num_kv_heads) * layer.head_bytes();
  const auto most = static_cast<size_t>(std::numeric_limits<int32_t>::max() - config.num_pages);
  const auto parts = static_cast<size_t>(parts_of(config, layer, num_layers));
  if (parts > 0) {
    const size_t count = static_cast<size_t>(config.num_pages) * parts;
    if (count <= most) return static_cast<int32_t>(count);
    throw OutOfMemory("[kv_cache] coding: pages of that many parts have no ids");
  }
  return static_cast<int32_t>(std::min(pool_bytes / page, most));
}

CodedStore::CodedStore(const KvCacheConfig& config, size_t pool_bytes) {
  check_config(config);
  num_layers_ = num_stored_layers(config, config.num_layers);
  shared_layers_ = static_cast<size_t>(config.coding.shared_layers);
  num_pages_ = config.num_pages;
  num_coded_ = num_coded_pages(config, config.num_layers, pool_bytes);
  if (config.coding.features > 0) {
    features_ = std::make_unique<FeatureTables>(config, num_pages_ + num_coded_);
  }
  if (config.coding.codebooks) {
    codebooks_ = std::make_unique<CodebookTables>(config, num_pages_ + num_coded_);
  }
  static constexpr ops::PageFeatures kNoFeatures;
  static constexpr ops::PageCodebooks kNoCodebooks;
  first_layer_ = layer_of(config, features_ ? features_->layer(0) : kNoFeatures,
                          codebooks_ ? codebooks_->layer(0) : kNoCodebooks);
  partner_.assign(static_cast<size_t>(num_pages_) + static_cast<size_t>(num_coded_), -1);
  layer_parts_ = layer_parts_of(config, first_layer_);
  parts_ = parts_of(config, first_layer_, config.num_layers);
  place_layers(config);
  if (num_on_host_ > 0) allocate();
  set_tables(config);
  if (in_pages()) {
    used_parts_.assign(static_cast<size_t>(num_pages_), -1);
    return;
  }
  for (int32_t i = 0; i < num_coded_; ++i) free_.push_back(num_pages_ + num_coded_ - 1 - i);
}

// Throws Unsupported for layers that share features on two devices: their pages would be on both.
void CodedStore::place_layers(const KvCacheConfig& config) {
  const auto shared = static_cast<int32_t>(shared_layers_);
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    const Device device = config.device_of(layer);
    const Device first = config.device_of(layer / shared * shared);
    if (device != first) {
      throw Unsupported("[kv_cache] coding.shared_layers: expected layers that share features on " +
                        ("one device, got some on " + name(first)) + " and " + name(device));
    }
    if (layer % shared > 0) continue;
    const bool on_host = is_on_host(config, layer);
    host_place_.push_back(on_host ? static_cast<int32_t>(num_on_host_++) : -1);
  }
}

void CodedStore::set_tables(const KvCacheConfig& config) {
  for (size_t i = 0; i < static_cast<size_t>(config.num_layers); ++i) {
    const Device device = config.device_of(static_cast<int32_t>(i));
    const ops::PageFeatures* features = features_ ? &features_->layer(i) : nullptr;
    const ops::PageCodebooks* codebooks = codebooks_ ? &codebooks_->layer(i) : nullptr;
    if (device.kind != DeviceKind::cpu) {
      DeviceTables& there = there_.try_emplace(device.index, memory_of(device)).first->second;
      if (features != nullptr) features = &there.add(*features);
      if (codebooks != nullptr) codebooks = &there.add(*codebooks);
    }
    features_of_.push_back(features);
    codebooks_of_.push_back(codebooks);
  }
}

void CodedStore::allocate() {
  const size_t layer = first_layer_.head_bytes() * static_cast<size_t>(first_layer_.num_kv_heads) *
                       static_cast<size_t>(num_coded_);
  layer_bytes_ = (layer + kAlignment - 1) / kAlignment * kAlignment;
  const size_t bytes = layer_bytes_ * num_on_host_;
  const Memory& memory = memory_of({});
  if (bytes <= memory.capacity() + kAlignment * num_on_host_) {
    region_ = memory.allocate(bytes, Pages::lazy);
  }
  if (!region_) {
    throw OutOfMemory("[kv_cache] coding: " + std::to_string(num_coded_) + " encoded pages take " +
                      std::to_string(bytes) + " bytes, the machine has " +
                      std::to_string(memory.capacity()));
  }
  first_layer_.data = static_cast<uint8_t*>(region_.get());
}

ops::CodedPages CodedStore::host_layer(size_t number) const {
  ops::CodedPages layer = first_layer_;
  if (features_) layer.features = &features_->layer(number);
  if (codebooks_) layer.codebooks = &codebooks_->layer(number);
  return layer;
}

ops::CodedPages CodedStore::layer(size_t number, std::span<const ops::KvLayer> pages) const {
  ops::CodedPages layer = first_layer_;
  layer.features = features_of_[number];
  layer.codebooks = codebooks_of_[number];
  const int32_t place = host_place_[number / shared_layers_];
  if (place >= 0) {
    layer.data += static_cast<size_t>(place) * layer_bytes_;
    return layer;
  }
  layer.data = nullptr;
  const size_t first = number / shared_layers_ * shared_layers_;
  const ops::KvLayer& kv = pages[first];
  const auto page = static_cast<int64_t>(kv.head_bytes()) * kv.num_kv_heads;
  const int64_t stride = first + 1 < pages.size() ? pages[first + 1].k - kv.k : 0;
  layer.memory = {kv.k, kv.v, page, stride, layer_parts_, parts_};
  return layer;
}

size_t CodedStore::page_bytes() const {
  return first_layer_.head_bytes() * static_cast<size_t>(first_layer_.num_kv_heads) * num_layers_;
}

int32_t CodedStore::take() {
  if (free_.empty()) throw InternalError("[kv_cache] no coded page is free");
  const int32_t coded = free_.back();
  free_.pop_back();
  ++in_use_;
  if (in_pages()) ++used_parts_[static_cast<size_t>((coded - num_pages_) / parts_)];
  return coded;
}

int32_t CodedStore::put_back(int32_t coded) {
  unlink(coded);
  free_.push_back(coded);
  --in_use_;
  if (!in_pages()) return -1;
  const int32_t page = (coded - num_pages_) / parts_;
  int32_t& used = used_parts_[static_cast<size_t>(page)];
  if (--used > 0) return -1;
  used = -1;
  std::erase_if(free_, [&](int32_t free) { return (free - num_pages_) / parts_ == page; });
  return page;
}

size_t CodedStore::pages_for(size_t count) const {
  const auto parts = static_cast<size_t>(parts_);
  return count <= free_.size() ? 0 : (count - free_.size() + parts - 1) / parts;
}

void CodedStore::add_parts(int32_t page) {
  used_parts_[static_cast<size_t>(page)] = 0;
  for (int32_t part = parts_ - 1; part >= 0; --part) {
    free_.push_back(num_pages_ + page * parts_ + part);
  }
}

int32_t CodedStore::coding_of(int32_t page) const {
  return partner_[static_cast<size_t>(page)];
}

void CodedStore::link(int32_t page, int32_t coded) {
  partner_[static_cast<size_t>(page)] = coded;
  partner_[static_cast<size_t>(coded)] = page;
}

void CodedStore::unlink(int32_t page) {
  int32_t& partner = partner_[static_cast<size_t>(page)];
  if (partner >= 0) partner_[static_cast<size_t>(partner)] = -1;
  partner = -1;
}

void CodedStore::check(std::span<uint8_t> is_free) const {
  for (const int32_t coded : free_) {
    if (is_free[static_cast<size_t>(coded)]++ == 0) continue;
    throw InternalError("[kv_cache] coded page " + std::to_string(coded) + " is free twice");
  }
  for (size_t page = 0; page < used_parts_.size(); ++page) {
    if (used_parts_[page] < 0) {
      const auto first = static_cast<size_t>(num_pages_) + page * static_cast<size_t>(parts_);
      for (uint8_t& part : is_free.subspan(first, static_cast<size_t>(parts_))) ++part;
      continue;
    }
    if (used_parts_[page] > 0 && is_free[page]++ == 0) continue;
    throw InternalError("[kv_cache] page " + std::to_string(page) +
                        " has encoded pages, and is free");
  }
  for (size_t page = 0; page < partner_.size(); ++page) {
    if (partner_[page] < 0) continue;
    const auto partner = static_cast<size_t>(partner_[page]);
    const bool pair =
        partner_[partner] == static_cast<int32_t>(page) &&
        (page < static_cast<size_t>(num_pages_)) != (partner < static_cast<size_t>(num_pages_));
    if (pair && is_free[page] == 0) continue;
    throw InternalError("[kv_cache] page " + std::to_string(page) +
                        " is not what its coded form was made of");
  }
}

}  // namespace effinfer::kv
