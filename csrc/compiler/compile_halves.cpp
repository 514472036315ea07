#include "compiler/compile_halves.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "compiler/passes.h"
#include "compiler/place_layers.h"
#include "core/copy_rate.h"
#include "core/memory.h"
#include "effinfer/error.h"
#include "effinfer/profile.h"
#include "executor/executable_impl.h"
#include "kv/page_pool.h"
#include "ops/packed_weight.h"
#include "weights/pack_cache.h"

namespace effinfer {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw InvalidArgument("[compile] front: " + what);
}

// A device, the threads that work there or for it, and how its layers are compiled.
struct Place {
  std::shared_ptr<ThreadPool> pool;
  CompileOptions options;
};

DType kv_dtype(const CompileOptions& options) {
  const DType otherwise = options.precision == Precision::f32 ? DType::f32 : DType::bf16;
  return options.kv_dtype.value_or(otherwise);
}

// Bytes of the cache for the layers of a graph.
size_t cache_bytes(const Graph& graph, const CompileOptions& options, int32_t num_pages) {
  KvCacheConfig config;
  config.dtype = kv_dtype(options);
  for (const Node& node : graph.nodes) {
    for (const ValueId id : node.outputs) {
      const Value& value = graph.value(id);
      if (value.dtype != DType::kv) continue;
      config.num_layers = 1;
      config.num_kv_heads = static_cast<int32_t>(value.shape[1].value);
      config.head_dim = static_cast<int32_t>(value.shape[2].value);
    }
  }
  if (config.num_layers == 0) return 0;
  const auto pages = static_cast<size_t>(num_pages);
  return kv::page_bytes(config) * pages * layers_of(graph).size();
}

// What a graph takes on its device: weights as packed, the arena, a step's arrays, the cache.
size_t bytes_of(Graph graph, const WeightSource& weights, const CompileOptions& given,
                int32_t num_pages) {
  CompileOptions options = given;
  options.kv_dtype = kv_dtype(given);
  size_t bytes = cache_bytes(graph, options, num_pages);
  const auto plan = weights::PackPlan::of(graph, weights, options.ternary_packing,
                                          current_target(options.device));
  bytes += plan.num_bytes;
  for (const ValueId id : graph.weights) {
    const Value& value = graph.value(id);
    const auto named = [&](const weights::PackedItem& item) {
      return item.name == value.weight_name;
    };
    if (std::any_of(plan.items.begin(), plan.items.end(), named)) continue;
    const TensorView view = weights.weight(value.weight_name);
    bytes += value.shape.size() == 2
                 ? ops::packed_shape(view).num_bytes()
                 : static_cast<size_t>(view.dims.num_elements()) * sizeof(float);
  }
  const auto row_bytes = [&](int64_t rows, const Value& value) {
    return static_cast<size_t>(rows * value.shape[1].value) * sizeof(float);
  };
  for (const ValueId id : graph.inputs) {
    const Value& value = graph.value(id);
    if (value.shape.size() == 2) bytes += row_bytes(options.max_tokens, value);
  }
  const Value& first = graph.value(graph.outputs[0]);
  if (first.shape[0].kind == Dim::Kind::rows) bytes += row_bytes(options.max_rows, first);
  compiler::run_passes(graph, options);
  return bytes + static_cast<size_t>(std::get<int64_t>(graph.metadata.at("arena_bytes")));
}

// Of a set of cores, measured once in a process: it takes most of a second.
double cpu_read_rate(ThreadPool& pool) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, int>, double> known;
  const std::lock_guard lock(mutex);
  const std::pair cores{pool.reason(), pool.size()};
  const auto found = known.find(cores);
  if (found != known.end()) return found->second;
  return known[cores] = measure_read_bandwidth(pool);
}

double read_rate(const Place& place) {
  const Device device = place.options.device;
  if (device.kind == DeviceKind::cpu) return cpu_read_rate(*place.pool);
  return cuda_copy_rate(device.index);
}

compiler::LayerChoice choose(const Graph& graph, const WeightSource& weights, const Place& front,
                             const Place& back, int32_t num_pages) {
  const auto layers = static_cast<int32_t>(layers_of(graph).size());
  const auto part = [&](int32_t count, bool is_front) {
    if (count == 0 || count == layers) return graph;
    GraphHalves halves = cut_graph(graph, is_front ? count : layers - count);
    return std::move(is_front ? halves.front : halves.back);
  };
  const auto device_of = [&](const Place& place, bool is_front) {
    const Device device = place.options.device;
    compiler::LayerDevice found;
    found.name = name(device);
    found.rate = read_rate(place);
    found.free_bytes = memory_of(device).capacity();
    found.bytes_of = [&, is_front](int32_t count) {
      return bytes_of(part(count, is_front), weights, place.options, num_pages);
    };
    return found;
  };
  return compiler::choose_layers(layers, device_of(front, true), device_of(back, false),
                                 front.options.device == back.options.device);
}

std::string range_text(size_t first, size_t last) {
  return first == last ? "layer " + std::to_string(first)
                       : "layers " + std::to_string(first) + " to " + std::to_string(last);
}

// Layers are counted as they run.
std::string placement_text(int32_t layers, int32_t front, const Place& before, const Place& behind,
                           const std::string& reason) {
  const auto count = static_cast<size_t>(layers);
  const auto line = static_cast<size_t>(front);
  std::string text;
  if (line > 0) text = range_text(0, line - 1) + " on " + name(before.options.device);
  if (line > 0 && line < count) text += ", ";
  if (line < count) text += range_text(line, count - 1) + " on " + name(behind.options.device);
  return text + " (" + reason + ")";
}

}  // namespace

std::shared_ptr<Executable> ExecutableHalves::compile(const Graph& graph,
                                                      std::shared_ptr<const WeightSource> weights,
                                                      std::shared_ptr<ThreadPool> pool,
                                                      const CompileOptions& options) {
  using Impl = Executable::Impl;
  const FrontLayers& wanted = *options.front;
  check_device(wanted.device, "[compile] front");
  check_device(options.device, "[compile] device");
  if (!weights) throw InvalidArgument("[compile] weights: expected a source, got none");
  if (wanted.device == options.device && wanted.device.kind != DeviceKind::cpu) {
    fail("expected another device than " + name(options.device));
  }
  graph.verify();
  const auto layers = static_cast<int32_t>(layers_of(graph).size());
  if (layers < 2) {
    fail("expected a graph with at least 2 layers, got " + std::to_string(layers) + " in " +
         graph.name);
  }
  Place front{wanted.pool ? wanted.pool : pool, options};
  Place back{std::move(pool), options};
  front.options.front.reset();
  back.options.front.reset();
  front.options.device = wanted.device;
  compiler::LayerChoice choice{wanted.count.value_or(0), "as asked"};
  if (choice.front < 0 || choice.front > layers) {
    fail("expected 0.." + std::to_string(layers) + " layers, got " + std::to_string(choice.front));
  }
  if (!wanted.count) choice = choose(graph, *weights, front, back, wanted.num_pages);

  std::unique_ptr<Impl> impl;
  if (choice.front == 0 || choice.front == layers) {
    const Place& all = choice.front == 0 ? back : front;
    impl = Impl::build(graph, weights, all.pool, all.options, nullptr);
  } else {
    const GraphHalves halves = cut_graph(graph, choice.front);
    std::unique_ptr<Impl> first =
        Impl::build(halves.front, weights, front.pool, front.options, nullptr, &graph, false);
    const bool one_memory = front.options.device == back.options.device;
    if (one_memory) back.options.tuning_cache.clear();  // the first has measured
    // What both read is packed once in one memory; arenas are apart, as their pools are.
    const bool shares = one_memory && front.pool != back.pool;
    impl = Impl::build(halves.back, weights, back.pool, back.options,
                       shares ? first.get() : nullptr, &graph);
    const KvCacheConfig& needed = impl->limits.cache;
    if (first->limits.cache.num_kv_heads != needed.num_kv_heads ||
        first->limits.cache.head_dim != needed.head_dim) {
      fail("expected KV heads of one number and size in all layers");
    }
    impl->output_names.clear();
    for (size_t i = 1; i < graph.outputs.size(); ++i) {
      impl->output_names.push_back(graph.value(graph.outputs[i]).name);
    }
    impl->front.reset(new Executable(std::move(first)));
    impl->own_inputs.reserve(impl->shared.inputs.size());
    impl->front_inputs.reserve(impl->shared.inputs.size());
  }
  impl->placement = placement_text(layers, choice.front, front, back, choice.reason);
  return std::shared_ptr<Executable>(new Executable(std::move(impl)));
}

const std::string& ExecutableHalves::placement(const Executable& executable) {
  return executable.impl_->placement;
}

void Executable::Impl::add_front_layers(KvCacheConfig& config) const {
  const executor::BatchLimits& first = front->impl_->limits;
  const auto knows_rope = [](const KvCacheConfig& half) {
    return half.rope.size() == static_cast<size_t>(half.num_layers);
  };
  const bool both_know = knows_rope(config) && knows_rope(first.cache);
  config.rope.resize(both_know ? static_cast<size_t>(config.num_layers) : 0);
  for (const int32_t layer : first.layers) {
    if (!both_know) break;
    config.rope[static_cast<size_t>(layer)] = first.cache.rope[static_cast<size_t>(layer)];
  }
  config.fixed_slots |= first.cache.fixed_slots;
  config.index_unit = std::max(config.index_unit, first.cache.index_unit);
  config.index_means |= first.cache.index_means;
  config.index_bits = std::max(config.index_bits, first.cache.index_bits);
  if (first.cache.device == config.device) return;
  config.layer_devices.assign(static_cast<size_t>(config.num_layers), config.device);
  for (const int32_t layer : first.layers) {
    config.layer_devices[static_cast<size_t>(layer)] = first.cache.device;
  }
}

}  // namespace effinfer
