#include "weights/weight_store.h"

#include <algorithm>
#include <filesystem>
#include <new>
#include <system_error>

#include "core/log.h"
#include "effinfer/error.h"
#include "effinfer/gguf.h"

namespace effinfer::weights {
namespace {

Dims dims_of(const Value& value) {
  Dims dims;
  for (const Dim& dim : value.shape) dims.push_back(dim.value);
  return dims;
}

}  // namespace

// The base's weights that the source has as well: the same bytes at the same place.
WeightStore::WeightStore(std::shared_ptr<const WeightSource> source, ThreadPool& pool,
                         const Memory& memory, std::shared_ptr<const WeightStore> base)
    : source_(std::move(source)), pool_(pool), memory_(memory), base_(std::move(base)) {
  if (base_ == nullptr) return;
  const auto is_same = [&](const std::string& name) {
    if (!source_->contains(name)) return false;
    const TensorView ours = source_->weight(name);
    const TensorView theirs = base_->source_->weight(name);
    return ours.data == theirs.data && ours.dtype == theirs.dtype && ours.dims == theirs.dims;
  };
  for (const auto& [name, weight] : base_->packed_) {
    if (is_same(name)) packed_.emplace(name, weight);
  }
  for (const auto& [name, memory_of_floats] : base_->floats_) {
    if (is_same(name)) floats_.emplace(name, memory_of_floats);
  }
}

void WeightStore::check(const Graph& graph) const {
  for (const ValueId id : graph.weights) {
    const Value& value = graph.value(id);
    const std::string label = "[compile] weight " + value.weight_name + ": ";
    if (!source_->contains(value.weight_name)) {
      throw InvalidArgument(label + "the graph needs it, and the source does not have it");
    }
    const TensorView view = source_->weight(value.weight_name);
    const Dims expected = dims_of(value);
    if (view.dtype != value.dtype || !(view.dims == expected)) {
      throw InvalidArgument(label + "expected " + std::string(name(value.dtype)) +
                            expected.to_string() + ", got " + std::string(name(view.dtype)) +
                            view.dims.to_string());
    }
  }
}

void WeightStore::pack(const Graph& graph, const CompileOptions& options) {
  const std::string& folder = options.pack_cache;
  PackPlan plan =
      PackPlan::of(graph, *source_, options.ternary_packing, current_target(memory_.device()));
  if (base_ != nullptr) {
    plan.drop([this](const std::string& name) { return packed_.contains(name); });
    if (plan.items.empty()) return;
  }
  if (!folder.empty()) {
    std::error_code ignored;  // writing to it will fail, and say why
    std::filesystem::create_directories(folder, ignored);
  }
  PackCache cache(plan, folder, pool_);
  const PackCache::Mapping mapping = cache.load();
  const uint8_t* data = mapping.data;
  if (data != nullptr) {
    regions_.push_back(mapping.file);
  } else {
    regions_.push_back(allocate(memory_of({}), plan.num_bytes));
    pack_items(plan, static_cast<uint8_t*>(regions_.back().get()));
    data = static_cast<const uint8_t*>(regions_.back().get());
    cache.store(data);
  }
  data = place(data, plan.num_bytes);
  pack_cache_ = cache.report();
  if (pack_cache_.state == PackCacheState::failed) {
    log(LogLevel::warning, "pack cache: " + pack_cache_.reason);
  } else if (pack_cache_.state != PackCacheState::off) {
    const bool hit = pack_cache_.state == PackCacheState::hit;
    log(LogLevel::info, (hit ? "pack cache: found " : "pack cache: stored ") + pack_cache_.path);
  }
  packed_bytes_ = plan.num_bytes;
  for (const PackedItem& item : plan.items) {
    ops::PackedWeight& weight = packed_.emplace(item.name, item.shape).first->second;
    weight.data = data + item.offset;
  }
}

std::shared_ptr<void> WeightStore::allocate(const Memory& memory, size_t bytes) const {
  std::shared_ptr<void> region = memory.allocate(bytes, Pages::huge);
  if (region) return region;
  throw OutOfMemory("[compile] no memory on " + name(memory.device()) + " for packed weights of " +
                    std::to_string(bytes) + " bytes");
}

// The host's copy is the newest region.
const uint8_t* WeightStore::place(const uint8_t* data, size_t bytes) {
  if (memory_.device() == Device{}) return data;
  const std::shared_ptr<void> there = allocate(memory_, bytes);
  memory_.copy(there.get(), data, bytes);
  regions_.back() = there;
  return static_cast<const uint8_t*>(there.get());
}

const ops::PackedWeight& WeightStore::pack_alone(const Value& value) {
  const TensorView view = source_->weight(value.weight_name);
  ops::PackedWeight weight = ops::packed_shape(view);
  regions_.push_back(allocate(memory_of({}), weight.num_bytes()));
  auto* data = static_cast<uint8_t*>(regions_.back().get());
  const auto done = [&](size_t begin, size_t end) {
    source_->release(value.weight_name, begin, end);
  };
  ops::pack_into(view, pool_, data, done);
  weight.data = place(data, weight.num_bytes());
  packed_bytes_ += weight.num_bytes();
  packed_.emplace(value.weight_name, weight);
  return packed(value);
}

// Items are packed in the order of the file: a disk reads ahead, and each page is read once.
void WeightStore::pack_items(const PackPlan& plan, uint8_t* out) {
  for (const PackedItem& item : plan.items) {
    const auto done = [&](size_t begin, size_t end) { source_->release(item.name, begin, end); };
    ops::pack_into(item.source, pool_, out + item.offset, done, item.form);
  }
}

// Packed weights are released a second time: a fault maps the pages around it as well, also those
// of a neighbour that was released.
void WeightStore::release_source(const Graph& graph) const {
  for (const ValueId id : graph.weights) {
    const std::string& name = graph.value(id).weight_name;
    const auto is_raw = [&](const Use& use) { return use.name == name && use.bytes == 0; };
    if (std::any_of(uses_.begin(), uses_.end(), is_raw)) continue;
    source_->release(name, 0, source_->weight(name).num_bytes());
  }
}

const ops::PackedWeight& WeightStore::packed(const Value& value) {
  const ops::PackedWeight& weight = packed_.at(value.weight_name);
  const auto known = [&](const Use& use) { return use.name == value.weight_name; };
  if (std::none_of(uses_.begin(), uses_.end(), known)) {
    const TensorView view = source_->weight(value.weight_name);
    uses_.push_back({value.weight_name, view.dtype, "packed " + to_string(weight.format),
                     view.num_bytes(), weight.num_bytes()});
  }
  return weight;
}

std::vector<ops::PackedWeight> WeightStore::all_packed() const {
  std::vector<ops::PackedWeight> all;
  for (const auto& [name, weight] : packed_) all.push_back(weight);
  return all;
}

TensorView WeightStore::raw(const Value& value) {
  const TensorView view = source_->weight(value.weight_name);
  const auto known = [&](const Use& use) {
    return use.name == value.weight_name && use.bytes == 0;
  };
  if (std::none_of(uses_.begin(), uses_.end(), known)) {
    uses_.push_back({value.weight_name, view.dtype, "as in the source", view.num_bytes(), 0});
  }
  return view;
}

std::vector<float> WeightStore::host_floats(const Value& value) const {
  const TensorView view = source_->weight(value.weight_name);
  const int64_t count = view.dims.num_elements();
  std::vector<float> values(static_cast<size_t>(count));
  dequantize(view.dtype, view.data, count, values.data());
  return values;
}

const float* WeightStore::floats(const Value& value) {
  auto entry = floats_.find(value.weight_name);
  if (entry == floats_.end()) {
    const TensorView view = source_->weight(value.weight_name);
    const std::vector<float> values = host_floats(value);
    source_->release(value.weight_name, 0, view.num_bytes());
    const size_t bytes = values.size() * sizeof(float);
    std::shared_ptr<void> memory = memory_.allocate(bytes, Pages::heap);
    if (!memory) throw std::bad_alloc();
    memory_.copy(memory.get(), values.data(), bytes);
    uses_.push_back({value.weight_name, view.dtype, "f32", view.num_bytes(), bytes});
    entry = floats_.emplace(value.weight_name, std::move(memory)).first;
  }
  return static_cast<const float*>(entry->second.get());
}

}  // namespace effinfer::weights
