#include "runtime/speculative/draft_setup.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "effinfer/error.h"
#include "runtime/speculative/head_steps.h"

namespace effinfer::runtime {
namespace {

void check_range(const char* what, int32_t value, int32_t least, int32_t most) {
  if (value >= least && value <= most) return;
  throw InvalidArgument(std::string("[draft_model] ") + what + ": expected " +
                        std::to_string(least) + ".." + std::to_string(most) + ", got " +
                        std::to_string(value));
}

std::vector<int32_t> logit_tokens(const Graph& graph) {
  const auto entry = graph.metadata.find("logit_tokens");
  if (entry == graph.metadata.end()) return {};
  const auto* ids = std::get_if<std::vector<int64_t>>(&entry->second);
  if (ids == nullptr) throw FormatError("[draft_model] metadata logit_tokens: expected a list");
  return {ids->begin(), ids->end()};
}

int64_t metadata_int(const Graph& graph, const char* key) {
  const auto entry = graph.metadata.find(key);
  const auto* value =
      entry == graph.metadata.end() ? nullptr : std::get_if<int64_t>(&entry->second);
  if (value != nullptr && *value > 0) return *value;
  throw FormatError(std::string("[draft_model] graph metadata: expected a positive integer \"") +
                    key + "\"");
}

std::shared_ptr<Executable> compile_draft(const DraftModelOptions& options,
                                          const Executable& target, const CompileOptions& compiled,
                                          const std::shared_ptr<ThreadPool>& pool) {
  const Model& model = *options.model;
  if (options.of_target && compiled.device == target.options().device) {
    return compile_beside(target, model.graph, model.weights, pool);
  }
  return compile(model.graph, model.weights, pool, compiled);
}

std::unique_ptr<DraftSteps> make_heads(const DraftModelOptions& options, const Executable& target,
                                       std::shared_ptr<Executable> first, int32_t pages) {
  std::vector<std::shared_ptr<Executable>> by_depth = {std::move(first)};
  for (const auto& model : options.deeper) {  // they share the cut head
    by_depth.push_back(compile_beside(*by_depth.front(), model->graph, model->weights));
  }
  return std::make_unique<HeadSteps>(std::move(by_depth), options.hidden,
                                     target.output(options.hidden).cols, pages,
                                     Draft::kMostCandidates);
}

}  // namespace

std::span<const int32_t> DraftSetup::ids_of(std::span<const int32_t> places,
                                            std::vector<int32_t>& room) const {
  if (tokens.empty()) return places;
  room.clear();
  for (const int32_t place : places) room.push_back(tokens[static_cast<size_t>(place)]);
  return room;
}

std::string DraftSetup::trouble(std::span<const int32_t> fresh, int64_t size) const {
  if (size >= steps->max_seq_len()) {
    return "the text has outgrown the draft model's context of " +
           std::to_string(steps->max_seq_len()) + " tokens";
  }
  const auto is_unknown = [&](int32_t token) { return token >= num_ids; };
  if (std::any_of(fresh.begin(), fresh.end(), is_unknown)) {
    return "a token that the draft model does not have";
  }
  return {};
}

std::string DraftSetup::out_of_pages() const {
  return "no page is left in the draft model's cache of " +
         std::to_string(steps->cache().config().num_pages);
}

void check_options(const DraftModelOptions& options) {
  if (options.model == nullptr) throw InvalidArgument("[draft_model] model: expected one");
  check_range("length", options.length, 1, Draft::kMostNodes);
  check_range("width", options.width, 1, 8);
  check_range("length * width", options.length * options.width, 1, Draft::kMostNodes);
  check_range("num_pages", options.num_pages, 0, INT32_MAX);
  if (options.hidden.empty()) return;
  if (!options.of_target) {
    throw InvalidArgument("[draft_model] hidden: expected heads of the target (of_target)");
  }
  if (!options.device.empty()) {
    throw InvalidArgument(
        "[draft_model] device: expected none, as heads go on from what the target has computed, "
        "got \"" +
        options.device + "\"");
  }
}

DraftSetup set_up_draft(const DraftModelOptions& options, const Executable& target,
                        const JobExecutor* executor, int64_t rows) {
  const Graph& graph = options.model->graph;
  DraftSetup setup;
  setup.tokens = logit_tokens(graph);
  setup.num_ids = metadata_int(graph, "vocab_size");
  CompileOptions compiled = target.options();
  compiled.max_seq_len =
      std::min(metadata_int(graph, "context_length"), target.options().max_seq_len);
  compiled.max_rows = std::max(compiled.max_sequences * rows, int64_t{1});
  compiled.tuning_cache.clear();
  if (executor != nullptr) compiled.device = executor->placement().device;
  std::shared_ptr<Executable> executable = compile_draft(
      options, target, compiled, executor == nullptr ? target.pool() : executor->pool());
  const int64_t longest = std::min<int64_t>(executable->options().max_seq_len, 8192);
  const auto pages =
      options.num_pages > 0
          ? options.num_pages
          : static_cast<int32_t>(KvCache::pages_for(static_cast<size_t>(longest + 8192)));
  setup.steps = options.hidden.empty() ? std::make_unique<DraftSteps>(std::move(executable), pages,
                                                                      Draft::kMostCandidates)
                                       : make_heads(options, target, std::move(executable), pages);
  return setup;
}

}  // namespace effinfer::runtime
