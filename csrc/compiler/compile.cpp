// compile(): options, passes, weights, memory, calls.
#include <algorithm>
#include <chrono>
#include <limits>
#include <new>

#include "compiler/arithmetic.h"
#include "compiler/compile_halves.h"
#include "compiler/kv_facts.h"
#include "compiler/lowering.h"
#include "compiler/memory_plan.h"
#include "compiler/passes.h"
#include "core/backend.h"
#include "core/log.h"
#include "core/memory.h"
#include "effinfer/device.h"
#include "effinfer/tuning.h"
#include "executor/executable_impl.h"
#include "graph/op_specs.h"
#include "graph/text.h"
#include "kv/groups.h"
#include "weights/calibrate.h"

namespace effinfer {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw InvalidArgument("[compile] " + what);
}

void check_limit(const char* name, int64_t value) {
  if (value < 1 || value > std::numeric_limits<int32_t>::max()) {
    fail(std::string(name) + ": expected a positive 32-bit integer, got " + std::to_string(value));
  }
}

CompileOptions resolve(const CompileOptions& given, const Graph& graph) {
  CompileOptions options = given;
  check_device(options.device, "[compile] device");
  if (options.max_seq_len == 0) {
    const auto entry = graph.metadata.find("context_length");
    if (entry == graph.metadata.end() || !std::holds_alternative<int64_t>(entry->second)) {
      fail("max_seq_len: expected it to be given, as the graph has no context_length");
    }
    options.max_seq_len = std::get<int64_t>(entry->second);
  }
  check_limit("max_tokens", options.max_tokens);
  check_limit("max_sequences", options.max_sequences);
  check_limit("max_rows", options.max_rows);
  fetch_tuning(WeightStream::int8);  // refuses a wrong EFFINFER_TUNING before a kernel would
  check_limit("max_seq_len", options.max_seq_len);
  if (!options.kv_dtype) {
    options.kv_dtype = options.precision == Precision::f32 ? DType::f32 : DType::bf16;
  }
  return options;
}

// An input of the step that is not the batch's own: floats, a row for each token.
bool is_float_input(const Value& value) {
  return value.kind == Value::Kind::input && value.dtype == DType::f32 && value.shape.size() == 2 &&
         value.shape[0].kind == Dim::Kind::tokens && value.shape[1].kind == Dim::Kind::constant &&
         value.shape[1].value > 0;
}

// What run() checks of an input holds only where it is meant to be used: token ids are within the
// embedding table, logit rows within the step.
void check_inputs(const Graph& graph) {
  for (const ValueId id : graph.inputs) {
    const Value& value = graph.value(id);
    const bool rows = value.name == "logit_rows";
    const bool named = rows || value.name == "token_ids" || value.name == "positions";
    if (!named && is_float_input(value)) continue;
    if (!named) {
      fail("input %" + value.name +
           ": expected token_ids, positions, logit_rows, or floats f32[T, size], got " +
           graph::type_to_string(value));
    }
    const Shape shape = {rows ? Dim::rows() : Dim::tokens()};
    if (value.dtype != DType::i32 || value.shape != shape) {
      fail("input %" + value.name + ": expected i32" + graph::to_string(shape) + ", got " +
           graph::type_to_string(value));
    }
  }
  for (const Node& node : graph.nodes) {
    const std::optional<graph::StepInput>& step_input = graph::spec_of(node).step_input;
    if (!step_input) continue;
    const std::string& name = graph.value(node.inputs[step_input->index]).name;
    if (name == step_input->name) continue;
    fail(node.op + ": expected it to read %" + std::string(step_input->name) + ", got %" + name);
  }
}

// Grows the cache by a layer that a handle kv[layer, heads, head_dim] names.
void add_layer(executor::BatchLimits& limits, const Shape& handle) {
  KvCacheConfig& cache = limits.cache;
  const auto layer = static_cast<int32_t>(handle[0].value);
  const auto heads = static_cast<int32_t>(handle[1].value);
  const auto head_dim = static_cast<int32_t>(handle[2].value);
  if (cache.num_layers > 0 && (cache.num_kv_heads != heads || cache.head_dim != head_dim)) {
    fail("graph: expected KV heads of one number and size in all layers");
  }
  cache.num_kv_heads = heads;
  cache.head_dim = head_dim;
  cache.num_layers = std::max(cache.num_layers, layer + 1);
  limits.layers.push_back(layer);
}

// Those of all layers, also where the executable is a half that has some of them.
void set_groups(KvCacheConfig& cache, const Graph& whole) {
  for (const Node& node : whole.nodes) {
    for (const ValueId id : node.outputs) {
      const Value& value = whole.value(id);
      if (value.dtype != DType::kv) continue;
      cache.num_layers = std::max(cache.num_layers, static_cast<int32_t>(value.shape[0].value) + 1);
    }
  }
  cache.groups = compiler::kv_groups(whole, cache.num_layers);
}

// Outputs behind the logits are floats, a row for each token or each logit row.
void check_outputs(const Graph& graph, bool has_logits) {
  for (size_t i = 0; i < graph.outputs.size(); ++i) {
    const Value& output = graph.value(graph.outputs[i]);
    const bool is_rows = output.kind == Value::Kind::node && output.dtype == DType::f32 &&
                         output.shape.size() == 2 &&
                         (output.shape[0].kind == Dim::Kind::rows ||
                          ((i > 0 || !has_logits) && output.shape[0].kind == Dim::Kind::tokens));
    const bool again = std::count(graph.outputs.begin(), graph.outputs.end(), graph.outputs[i]) > 1;
    if (is_rows && !again) continue;
    fail("graph: expected f32[R, vocab], and f32[T or R, size] of other outputs, each once");
  }
}

// A runnable graph has an output of logits and KV heads of one shape.
executor::BatchLimits make_limits(const Graph& graph, const CompileOptions& options,
                                  bool has_logits) {
  executor::BatchLimits limits;
  limits.max_tokens = options.max_tokens;
  limits.max_sequences = options.max_sequences;
  limits.max_rows = options.max_rows;
  limits.max_seq_len = options.max_seq_len;
  limits.num_ids = std::numeric_limits<int32_t>::max();
  limits.cache.dtype = *options.kv_dtype;
  limits.cache.device = options.device;

  check_outputs(graph, has_logits);
  limits.vocab_size = has_logits ? graph.value(graph.outputs[0]).shape[1].value : 0;
  for (const Node& node : graph.nodes) {
    if (node.op == "embedding") {
      const int64_t rows = graph.value(node.inputs[1]).shape[0].value;
      limits.num_ids = std::min(limits.num_ids, rows);
    }
    limits.chooses_keys |=
        node.op == "attention" && graph::attention_inputs(node).visits.has_value();
    for (const ValueId id : node.outputs) {
      const Value& value = graph.value(id);
      if (value.dtype == DType::kv) add_layer(limits, value.shape);
    }
  }
  return limits;
}

bool phases_differ(const Graph& graph) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const Node& node) {
    for (const std::string_view key :
         {graph::kPrefillProductsKey, graph::kPrefillWeightsKey, graph::kPrefillSumsKey}) {
      if (node.has(key)) return true;
    }
    return node.has(graph::kDecodeKey) &&
           node.get_string(graph::kDecodeKey) != node.get_string(graph::kPrefillKey);
  });
}

}  // namespace

// Lets vector loads of the last row pass its end.
constexpr size_t kTail = 256;

namespace {

size_t row_bytes(int64_t rows, int64_t cols) {
  return static_cast<size_t>(rows) * static_cast<size_t>(cols) * sizeof(float);
}

// The host's memory for what steps bring to a device or fetch there; null: kernels run on the host.
std::shared_ptr<std::byte> staging(const Target& target, size_t bytes) {
  if (target.device.kind == DeviceKind::cpu) return nullptr;
  return cuda_backend()->pinned(target.device.index, bytes);
}

}  // namespace

void Executable::Impl::allocate_inputs(const Graph& graph) {
  for (const ValueId id : graph.inputs) {
    const Value& value = graph.value(id);
    if (!is_float_input(value)) continue;
    const int64_t cols = value.shape[1].value;
    const size_t bytes = row_bytes(limits.max_tokens, cols);
    std::shared_ptr<void> memory = shared.memory->allocate(bytes + kTail, Pages::lazy);
    if (!memory) {
      throw OutOfMemory("[compile] no memory on " + name(shared.target.device) + " for input %" +
                        value.name);
    }
    shared.inputs.push_back({value.name, cols, std::move(memory), staging(shared.target, bytes)});
  }
}

void Executable::Impl::allocate_arena(const Impl* first) {
  arena_bytes = static_cast<size_t>(std::get<int64_t>(shared.graph.metadata.at("arena_bytes")));
  const bool fits = first != nullptr && first->arena_bytes >= arena_bytes;
  arena = fits ? first->arena : shared.memory->allocate(arena_bytes + kTail, Pages::huge);
  if (!arena) {
    throw OutOfMemory("[compile] no memory on " + name(shared.target.device) + " for an arena of " +
                      std::to_string(arena_bytes) + " bytes");
  }
  shared.arena = static_cast<std::byte*>(arena.get());

  // A lone member needs no barriers, nor what saves them.
  const auto own_peak =
      static_cast<size_t>(std::get<int64_t>(shared.graph.metadata.at("own_bytes")));
  if (own_peak == 0 || pool->size() == 1) return;
  own_bytes = own_peak + kTail;
  own_bytes = (own_bytes + 4095) / 4096 * 4096;
  if (first != nullptr && first->own_bytes >= own_bytes) {
    own = first->own;
    return;
  }
  const size_t all = own_bytes * static_cast<size_t>(pool->size());
  own = shared.memory->allocate(all, Pages::lazy);
  if (!own) {
    throw OutOfMemory("[compile] no memory for arenas of " + std::to_string(all) + " bytes");
  }
}

void Executable::Impl::find_outputs() {
  const Graph& graph = shared.graph;
  for (size_t i = compiler::returns_logits(graph) ? 1 : 0; i < graph.outputs.size(); ++i) {
    const Value& value = graph.value(graph.outputs[i]);
    for (const Node& node : graph.nodes) {
      const auto made = std::find(node.outputs.begin(), node.outputs.end(), graph.outputs[i]);
      if (made == node.outputs.end()) continue;
      const auto place = static_cast<size_t>(made - node.outputs.begin());
      const int64_t offset = node.get_ints(graph::kArenaKey)[place];
      const int64_t rows = compiler::largest(value.shape[0], shared.options);
      const int64_t cols = value.shape[1].value;
      shared.outputs.push_back({output_names[shared.outputs.size()], value.shape[0], cols,
                                reinterpret_cast<const float*>(shared.arena + offset),
                                staging(shared.target, row_bytes(rows, cols))});
    }
  }
}

void Executable::Impl::lower() {
  KvCacheConfig& cache = limits.cache;
  shared.group_of_layer = kv::group_of_layer(cache);
  shared.layer_tables = compiler::asks_for_tables(shared.graph);
  programs.push_back(compiler::Lowering(shared, Phase::decode).run());
  if (phases_differ(shared.graph)) {
    programs.push_back(compiler::Lowering(shared, Phase::prefill).run());
    program_of_phase[static_cast<size_t>(Phase::prefill)] = 1;
  }
  for (const executor::Program& program : programs) {
    active.reserve(std::max(active.capacity(), program.calls.size()));
  }
  pool->reserve_scratch(shared.scratch_bytes);
  compiler::index_keys(shared.graph, cache);
  cache.rope = compiler::kv_ropes(shared.graph, *shared.weights, cache.num_layers);
  cache.fixed_slots = std::ranges::any_of(shared.graph.nodes, [](const Node& node) {
    return node.op == "attention" && node.get_int("chunk") > 0;
  });
}

namespace {

void log_compilation(const std::string& what, size_t calls, size_t weights, size_t arena,
                     std::chrono::steady_clock::time_point started) {
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - started);
  const auto megabytes = [](size_t bytes) { return std::to_string(bytes / 1'000'000) + " MB"; };
  log(LogLevel::info, "compiled " + what + ": " + std::to_string(calls) + " calls, weights of " +
                          megabytes(weights) + ", arena of " + megabytes(arena) + ", " +
                          std::to_string(took.count()) + " ms");
}

}  // namespace

std::unique_ptr<Executable::Impl> Executable::Impl::build(
    const Graph& graph, std::shared_ptr<const WeightSource> weights,
    std::shared_ptr<ThreadPool> pool, const CompileOptions& options, const Impl* first,
    const Graph* whole, bool has_logits) {
  const auto started = std::chrono::steady_clock::now();
  if (!weights) fail("weights: expected a source, got none");
  if (!pool) fail("pool: expected a thread pool, got none");
  graph.verify();
  auto impl = std::make_unique<Executable::Impl>();
  impl->shared.options = resolve(options, graph);
  check_inputs(graph);
  impl->limits = make_limits(graph, impl->shared.options, has_logits);
  set_groups(impl->limits.cache, whole == nullptr ? graph : *whole);
  impl->shared.graph = graph;
  for (size_t i = has_logits ? 1 : 0; i < graph.outputs.size(); ++i) {
    impl->output_names.push_back(graph.value(graph.outputs[i]).name);
  }
  impl->source = std::move(weights);
  impl->pool = std::move(pool);
  impl->shared.target = current_target(options.device);
  impl->shared.memory = &memory_of(options.device);
  impl->isa = std::string(name(impl->shared.target.isa)) + ": " + isa_reason();
  if (options.device.kind != DeviceKind::cpu) {
    impl->isa = name(options.device) + ": " + cuda_backend()->model_name(options.device.index);
  }
  impl->shared.weights =
      std::make_shared<weights::WeightStore>(impl->source, *impl->pool, *impl->shared.memory,
                                             first == nullptr ? nullptr : first->shared.weights);
  impl->skipped = compiler::run_passes(impl->shared.graph, impl->shared.options);
  impl->shared.weights->check(graph);
  try {
    impl->shared.weights->pack(impl->shared.graph, impl->shared.options);
    impl->allocate_inputs(graph);
    // Members of one pool run one executable at a time.
    const bool alone = first != nullptr && first->pool != impl->pool;
    impl->allocate_arena(alone ? nullptr : first);
    impl->find_outputs();
    impl->lower();
    if (options.device.kind != DeviceKind::cpu) {
      // Chosen from what was written, whichever node wrote it.
      impl->shared.max_top =
          static_cast<int32_t>(std::min<int64_t>(impl->limits.vocab_size, ops::kMaxTop));
    }
    impl->shared.weights->release_source(graph);
    impl->reserve_plans();
    const std::string& tuning_cache = impl->shared.options.tuning_cache;
    if (!tuning_cache.empty() && impl->shared.options.precision == Precision::fast &&
        options.device.kind == DeviceKind::cpu) {
      impl->tuning_trouble = weights::tune(impl->shared.weights->all_packed(), *impl->pool,
                                           impl->shared.target, tuning_cache);
    }
  } catch (const std::bad_alloc&) {
    throw OutOfMemory("[compile] no memory on " + name(options.device) +
                      " for the weights and buffers of the executable");
  }
  if (!impl->tuning_trouble.empty()) log(LogLevel::warning, impl->tuning_trouble);
  log_compilation(graph.name + " for " + impl->isa, impl->programs[0].calls.size(),
                  impl->shared.weights->packed_bytes(), impl->arena_bytes, started);
  return impl;
}

std::shared_ptr<Executable> compile(const Graph& graph, std::shared_ptr<const WeightSource> weights,
                                    std::shared_ptr<ThreadPool> pool,
                                    const CompileOptions& options) {
  if (options.front) {
    return ExecutableHalves::compile(graph, std::move(weights), std::move(pool), options);
  }
  return std::shared_ptr<Executable>(new Executable(
      Executable::Impl::build(graph, std::move(weights), std::move(pool), options, nullptr)));
}

std::shared_ptr<Executable> compile_beside(const Executable& first, const Graph& graph,
                                           std::shared_ptr<const WeightSource> weights,
                                           std::shared_ptr<ThreadPool> pool) {
  const Executable::Impl& impl = *first.impl_;
  CompileOptions options = impl.shared.options;
  options.tuning_cache.clear();  // the first has measured
  return std::shared_ptr<Executable>(
      new Executable(Executable::Impl::build(graph, weights ? std::move(weights) : impl.source,
                                             pool ? std::move(pool) : impl.pool, options, &impl)));
}

}  // namespace effinfer
