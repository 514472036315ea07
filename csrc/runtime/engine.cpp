#include "effinfer/engine.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "core/memory.h"
#include "effinfer/error.h"
#include "kv/page_pool.h"
#include "runtime/engine_core.h"
#include "runtime/engine_impl.h"

namespace effinfer {
namespace {

int64_t metadata_int(const Graph& graph, const char* key) {
  const auto entry = graph.metadata.find(key);
  const int64_t* value =
      entry == graph.metadata.end() ? nullptr : std::get_if<int64_t>(&entry->second);
  if (value == nullptr || *value < 1) {
    throw FormatError(std::string("[engine] graph metadata: expected a positive integer \"") + key +
                      "\"");
  }
  return *value;
}

std::vector<int32_t> eos_tokens(const Graph& graph) {
  const auto entry = graph.metadata.find("eos_token_ids");
  if (entry == graph.metadata.end()) return {};
  const auto* ids = std::get_if<std::vector<int64_t>>(&entry->second);
  if (ids == nullptr) throw FormatError("[engine] graph metadata: eos_token_ids: expected a list");
  return {ids->begin(), ids->end()};
}

int64_t checked_option(const char* option, int64_t value, int64_t fallback, int64_t limit) {
  if (value >= 0 && value <= limit) return value == 0 ? fallback : value;
  throw InvalidArgument(std::string("[engine] ") + option + ": expected 0 (default) to " +
                        std::to_string(limit) + ", got " + std::to_string(value));
}

DType kv_dtype(const EngineOptions& options) {
  return options.kv_dtype.value_or(options.precision == Precision::f32 ? DType::f32 : DType::bf16);
}

// That of the options, or of the technique that has some.
KvCoding kv_coding(const EngineOptions& options, std::span<const TechniqueFacts> techniques) {
  KvCoding coding = options.kv_coding;
  for (const TechniqueFacts& technique : techniques) {
    if (technique.coding.bits == 0) continue;
    if (coding.bits != 0) {
      throw ConflictError("[engine] kv_coding: expected one choice of it, got that of " +
                          technique.name + " beside another");
    }
    coding = technique.coding;
  }
  return coding;
}

// One sequence of max_seq_len (of 8192 when nobody asked for a length) and eight of 1024 tokens, in
// at most a quarter of the memory. Pages take memory when they are first written.
int32_t default_pages(const Graph& graph, const EngineOptions& options, int64_t max_seq_len) {
  KvCacheConfig config;
  config.num_layers = static_cast<int32_t>(metadata_int(graph, "num_layers"));
  config.num_kv_heads = static_cast<int32_t>(metadata_int(graph, "num_kv_heads"));
  config.head_dim = static_cast<int32_t>(metadata_int(graph, "head_dim"));
  config.dtype = kv_dtype(options);
  const int64_t longest =
      options.max_seq_len > 0 ? max_seq_len : std::min<int64_t>(max_seq_len, 8192);
  const int64_t wanted = (longest + 8 * 1024 + KvCache::kPageSize - 1) / KvCache::kPageSize;
  size_t memory = memory_of(options.device).capacity();
  if (options.front && options.front->device != options.device) {
    memory += memory_of(options.front->device).capacity();
  }
  const size_t affordable = memory / 4 / kv::page_bytes(config);
  return static_cast<int32_t>(
      std::clamp<size_t>(affordable, 1, static_cast<size_t>(std::min<int64_t>(wanted, INT32_MAX))));
}

// The graph that also returns these values, a row for each of the logits'.
Graph with_outputs(Graph graph, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    ValueId found = -1;
    for (ValueId id = 0; id < static_cast<ValueId>(graph.values.size()); ++id) {
      const Value& value = graph.value(id);
      const bool rows = value.kind == Value::Kind::node && value.dtype == DType::f32 &&
                        value.shape.size() == 2 && value.shape[0].kind == Dim::Kind::rows;
      if (rows && value.name == name) found = id;
    }
    if (found < 0 || found == graph.outputs[0]) {
      throw InvalidArgument("[engine] outputs of a proposer: expected a value f32[R, size] of " +
                            graph.name + " behind its logits, got \"" + name + "\"");
    }
    const bool known =
        std::find(graph.outputs.begin(), graph.outputs.end(), found) != graph.outputs.end();
    if (!known) graph.outputs.push_back(found);
  }
  return graph;
}

}  // namespace

std::string_view name(FinishReason reason) {
  switch (reason) {
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
    case FinishReason::cancelled:
      return "cancelled";
    case FinishReason::error:
      return "error";
    case FinishReason::none:
      break;
  }
  return "none";
}

Engine::Engine(std::shared_ptr<const Model> model, const EngineOptions& options,
               std::shared_ptr<ThreadPool> pool)
    : impl_(std::make_unique<Impl>()) {
  if (model == nullptr) throw InvalidArgument("[engine] model: expected a model, got null");
  if (options.max_batch_tokens < 1 || options.max_sequences < 1) {
    throw InvalidArgument("[engine] max_batch_tokens, max_sequences: expected at least 1");
  }
  const Graph& graph = model->graph;
  const int64_t context = metadata_int(graph, "context_length");
  const int64_t max_seq_len = checked_option("max_seq_len", options.max_seq_len, context, context);
  const int64_t num_pages = checked_option("num_pages", options.num_pages, 0, INT32_MAX);
  const int32_t pages =
      num_pages > 0 ? static_cast<int32_t>(num_pages) : default_pages(graph, options, max_seq_len);

  runtime::EngineCoreOptions core;
  core.max_seq_len = std::min(max_seq_len, int64_t{pages} * KvCache::kPageSize);
  core.max_batch_tokens = options.max_batch_tokens;
  core.max_sequences = options.max_sequences;
  core.prefix_cache = options.prefix_cache;
  core.mixed_phases = options.deterministic || options.precision == Precision::f32;
  core.eos_token_ids = eos_tokens(graph);
  core.speculation = options.speculation;
  core.hooks = options.hooks;
  core.techniques = techniques_of(graph);

  CompileOptions compile_options{options};
  compile_options.max_tokens = options.max_batch_tokens;
  // Rows of logits: one a sequence; a whole step's let logits() feed steps of full size.
  compile_options.max_rows = std::max(options.max_sequences, options.max_batch_tokens);
  compile_options.max_seq_len = core.max_seq_len;
  compile_options.kv_dtype = kv_dtype(options);
  if (compile_options.front) compile_options.front->num_pages = pages;

  impl_->model = model;
  impl_->pool = pool ? std::move(pool) : std::make_shared<ThreadPool>();
  impl_->executable = compile(with_outputs(graph, runtime::wanted_outputs(options.speculation)),
                              model->weights, impl_->pool, compile_options);
  impl_->pool =
      impl_->executable->pool();  // where all layers are on the front's device, that one's
  for (const auto& proposer : options.speculation.proposers) {
    if (proposer == nullptr) continue;  // refused by the core
    proposer->bind(*impl_->executable);
    impl_->proposers.push_back(proposer);
  }
  KvCacheConfig cache = impl_->executable->kv_config(kv_dtype(options), pages, true);
  cache.coding = kv_coding(options, core.techniques);
  impl_->core = std::make_unique<runtime::EngineCore>(runtime::make_runner(impl_->executable),
                                                      std::make_unique<KvCache>(cache), core);
}

Engine::~Engine() = default;

RequestId Engine::add(std::span<const int32_t> prompt, const SamplingParams& params,
                      std::shared_ptr<TokenConstraint> constraint) {
  return impl_->core->add_answers(prompt, {&params, 1}, {&constraint, 1}).front();
}
std::vector<RequestId> Engine::add_answers(
    std::span<const int32_t> prompt, std::span<const SamplingParams> params,
    std::span<const std::shared_ptr<TokenConstraint>> constraints) {
  return impl_->core->add_answers(prompt, params, constraints);
}
void Engine::cancel(RequestId request) {
  impl_->core->cancel(request);
}

std::vector<int32_t> Engine::generate(std::span<const int32_t> prompt, const SamplingParams& params,
                                      const std::function<bool(int32_t)>& on_token) {
  if (has_work()) {
    throw InvalidArgument("[engine] generate: expected an idle engine; use add() and step()");
  }
  const RequestId request = add(prompt, params);
  std::vector<int32_t> tokens;
  while (has_work()) {
    for (const StepOutput& output : step()) {
      if (output.finish == FinishReason::error) {
        forget(request);
        throw Error(output.error);
      }
      for (const SampledToken& sampled : output.tokens) {
        tokens.push_back(sampled.token);
        if (!on_token || on_token(sampled.token)) continue;
        cancel(request);
        break;
      }
    }
  }
  forget(request);
  return tokens;
}

void Engine::logits(std::span<const int32_t> tokens, std::span<float> out, Phase phase) {
  impl_->core->logits(tokens, out, phase);
}
void Engine::log_likelihoods(std::span<const int32_t> tokens, std::span<double> out, Phase phase) {
  impl_->core->log_likelihoods(tokens, out, phase);
}
RequestMetrics Engine::metrics(RequestId request) const {
  return impl_->core->metrics(request);
}
void Engine::forget(RequestId request) {
  impl_->core->forget(request);
}
EngineStats Engine::stats() const {
  EngineStats stats = impl_->core->stats();
  for (const auto& proposer : impl_->proposers) {
    if (auto drafting = proposer->drafting()) stats.drafters.push_back(*std::move(drafting));
  }
  return stats;
}
void Engine::start_profile(int64_t max_steps) {
  const auto pause = impl_->core->pause();
  impl_->executable->start_profile(max_steps);
  for (const auto& proposer : impl_->proposers) proposer->start_profile(max_steps);
}
std::vector<NamedProfile> Engine::take_draft_profiles() {
  const auto pause = impl_->core->pause();
  std::vector<NamedProfile> profiles;
  for (const auto& proposer : impl_->proposers) {
    if (auto profile = proposer->take_profile()) profiles.push_back(*std::move(profile));
  }
  return profiles;
}
Profile Engine::take_profile() {
  const auto pause = impl_->core->pause();
  return impl_->executable->take_profile();
}
std::optional<Profile> Engine::take_front_profile() {
  const auto pause = impl_->core->pause();
  if (!impl_->executable->front()) return {};
  return impl_->executable->front()->take_profile();
}
int64_t Engine::vocab_size() const {
  return impl_->core->vocab_size();
}
int64_t Engine::max_seq_len() const {
  return impl_->core->max_seq_len();
}
int Engine::threads() const {
  return impl_->pool->size();
}
Executable& Engine::executable() {
  return *impl_->executable;
}
KvCache& Engine::kv_cache() {
  return impl_->core->cache();
}

}  // namespace effinfer
