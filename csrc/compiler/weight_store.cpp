#include "compiler/weight_store.h"

#include <algorithm>

#include "effinfer/error.h"
#include "effinfer/gguf.h"

namespace effinfer::compiler {
namespace {

Dims dims_of(const Value& value) {
  Dims dims;
  for (const Dim& dim : value.shape) dims.push_back(dim.value);
  return dims;
}

}  // namespace

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

const kernels::PackedWeight& WeightStore::packed(const Value& value) {
  auto entry = packed_.find(value.weight_name);
  if (entry == packed_.end()) {
    const TensorView view = source_->weight(value.weight_name);
    entry = packed_.emplace(value.weight_name, kernels::pack(view, pool_)).first;
    const kernels::PackedWeight& weight = entry->second.view;
    uses_.push_back({value.weight_name, view.dtype, "packed " + to_string(weight.format),
                     view.num_bytes(), weight.num_bytes()});
  }
  return entry->second.view;
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

const float* WeightStore::floats(const Value& value) {
  auto entry = floats_.find(value.weight_name);
  if (entry == floats_.end()) {
    const TensorView view = source_->weight(value.weight_name);
    const int64_t count = view.dims.num_elements();
    std::vector<float> values(static_cast<size_t>(count));
    dequantize(view.dtype, view.data, count, values.data());
    uses_.push_back(
        {value.weight_name, view.dtype, "f32", view.num_bytes(), values.size() * sizeof(float)});
    entry = floats_.emplace(value.weight_name, std::move(values)).first;
  }
  return entry->second.data();
}

size_t WeightStore::packed_bytes() const {
  size_t bytes = 0;
  for (const auto& [name, buffer] : packed_) bytes += buffer.view.num_bytes();
  return bytes;
}

}  // namespace effinfer::compiler
