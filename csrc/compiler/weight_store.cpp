#include "compiler/weight_store.h"

#include <algorithm>
#include <functional>
#include <set>

#include "core/huge_memory.h"
#include "effinfer/error.h"
#include "effinfer/gguf.h"
#include "graph/op_specs.h"

namespace effinfer::compiler {
namespace {

Dims dims_of(const Value& value) {
  Dims dims;
  for (const Dim& dim : value.shape) dims.push_back(dim.value);
  return dims;
}

std::set<std::string> matmul_weights(const Graph& graph) {
  std::set<std::string> names;
  for (const Node& node : graph.nodes) {
    if (node.op != "matmul" && node.op != "matmul_glu") continue;
    const graph::MatmulInputs inputs = graph::matmul_inputs(node);
    for (size_t part = 0; part < inputs.parts; ++part) {
      names.insert(graph.value(node.inputs[inputs.weight(part)]).weight_name);
    }
  }
  return names;
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

void WeightStore::pack(const Graph& graph) {
  struct Item {
    kernels::PackedWeight* target;
    std::string name;
    TensorView source;
  };
  std::vector<Item> items;
  for (const std::string& name : matmul_weights(graph)) {
    const TensorView source = source_->weight(name);
    const auto entry = packed_.emplace(name, kernels::packed_shape(source)).first;
    packed_bytes_ += entry->second.num_bytes();
    items.push_back({&entry->second, name, source});
  }
  region_ = allocate_huge(packed_bytes_);
  if (!region_) {
    throw OutOfMemory("[compile] no memory for packed weights of " + std::to_string(packed_bytes_) +
                      " bytes");
  }
  // In the order of the file: a disk reads ahead, and each page is read once.
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return std::less<>()(a.source.data, b.source.data);
  });
  auto* out = static_cast<uint8_t*>(region_.get());
  for (const Item& item : items) {
    kernels::pack_into(item.source, pool_, out,
                       [&](size_t begin, size_t end) { source_->release(item.name, begin, end); });
    item.target->data = out;
    out += item.target->num_bytes();
  }
}

// A second time for the packed ones: a fault maps the pages around it as well, also those of a
// neighbour that was released.
void WeightStore::release_source(const Graph& graph) const {
  for (const ValueId id : graph.weights) {
    const std::string& name = graph.value(id).weight_name;
    const auto is_raw = [&](const Use& use) { return use.name == name && use.bytes == 0; };
    if (std::any_of(uses_.begin(), uses_.end(), is_raw)) continue;
    source_->release(name, 0, source_->weight(name).num_bytes());
  }
}

const kernels::PackedWeight& WeightStore::packed(const Value& value) {
  const kernels::PackedWeight& weight = packed_.at(value.weight_name);
  const auto known = [&](const Use& use) { return use.name == value.weight_name; };
  if (std::none_of(uses_.begin(), uses_.end(), known)) {
    const TensorView view = source_->weight(value.weight_name);
    uses_.push_back({value.weight_name, view.dtype, "packed " + to_string(weight.format),
                     view.num_bytes(), weight.num_bytes()});
  }
  return weight;
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

}  // namespace effinfer::compiler
