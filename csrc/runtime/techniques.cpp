#include "runtime/techniques.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>

namespace effinfer {
namespace {

constexpr std::string_view kPrefix = "technique.";

[[noreturn]] void fail(const std::string& key, const std::string& expected) {
  throw FormatError("[engine] graph metadata: " + key + ": expected " + expected);
}

int64_t tokens(const std::string& key, const Attribute& value) {
  const int64_t* count = std::get_if<int64_t>(&value);
  if (count == nullptr || *count < 0) fail(key, "a number of tokens");
  return *count;
}

const std::string& text(const std::string& key, const Attribute& value) {
  const std::string* found = std::get_if<std::string>(&value);
  if (found == nullptr) fail(key, "a text");
  return *found;
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    if (end > begin) parts.push_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

bool flag(const std::string& key, const Attribute& value) {
  const bool* found = std::get_if<bool>(&value);
  if (found == nullptr) fail(key, "true or false");
  return *found;
}

// Four bfloat16 in each of a list's integers, the first in its lowest bits.
std::shared_ptr<const std::vector<uint16_t>> numbers(const std::string& key,
                                                     const Attribute& value) {
  const auto* found = std::get_if<std::vector<int64_t>>(&value);
  if (found == nullptr) fail(key, "a list of integers");
  std::vector<uint16_t> all;
  all.reserve(found->size() * 4);
  for (const int64_t four : *found) {
    for (int i = 0; i < 4; ++i) {
      all.push_back(static_cast<uint16_t>(static_cast<uint64_t>(four) >> 16 * i));
    }
  }
  return std::make_shared<const std::vector<uint16_t>>(std::move(all));
}

void set_fact(TechniqueFacts& facts, std::string_view fact, const std::string& key,
              const Attribute& value) {
  if (fact == "chooses") {
    const std::string& whose = text(key, value);
    if (whose != "prompt" && whose != "output" && whose != "both") {
      fail(key, "\"prompt\", \"output\" or \"both\"");
    }
    facts.chooses_prompt = whose != "output";
    facts.chooses_output = whose != "prompt";
  } else if (fact == "min_tokens") {
    facts.min_tokens = tokens(key, value);
  } else if (fact == "chunk_tokens") {
    facts.chunk_tokens = tokens(key, value);
  } else if (fact == "kv_bits") {
    facts.coding.bits = static_cast<int32_t>(tokens(key, value));
  } else if (fact == "kv_residual") {
    facts.coding.residual = static_cast<int32_t>(std::min<int64_t>(tokens(key, value), INT32_MAX));
  } else if (fact == "kv_rank") {
    facts.coding.rank = static_cast<int32_t>(std::min<int64_t>(tokens(key, value), INT32_MAX));
  } else if (fact == "kv_outliers") {
    facts.coding.outliers = static_cast<int32_t>(std::min<int64_t>(tokens(key, value), INT32_MAX));
  } else if (fact == "kv_features") {
    facts.coding.features = static_cast<int32_t>(std::min<int64_t>(tokens(key, value), INT32_MAX));
  } else if (fact == "kv_shared_layers") {
    facts.coding.shared_layers =
        static_cast<int32_t>(std::min<int64_t>(tokens(key, value), INT32_MAX));
  } else if (fact == "kv_basis") {
    facts.coding.basis = numbers(key, value);
  } else if (fact == "kv_codebooks") {
    facts.coding.codebooks = numbers(key, value);
  } else if (fact == "scores") {
    const std::string& whose = text(key, value);
    if (whose != "prompt" && whose != "output" && whose != "both") {
      fail(key, "\"prompt\", \"output\" or \"both\"");
    }
    facts.scores_prompt = whose != "output";
    facts.scores_output = whose != "prompt";
  } else if (fact == "score_rows") {
    facts.score_rows = tokens(key, value);
  } else if (fact == "noise") {
    facts.noise = text(key, value);
  } else if (fact == "weights") {
    facts.weights = text(key, value);
  } else if (fact == "planes") {
    facts.planes = split(text(key, value));
  } else if (fact == "lossless") {
    facts.lossless = flag(key, value);
  } else if (fact == "layer_groups") {
    facts.layer_groups = tokens(key, value);
  } else if (fact == "key_chunks") {
    facts.key_chunks = flag(key, value);
  } else if (fact == "exclusive") {
    facts.exclusive = split(text(key, value));
  } else {
    fail(key,
         "chooses, min_tokens, chunk_tokens, kv_bits, kv_residual, kv_rank, kv_outliers, "
         "kv_features, kv_shared_layers, kv_basis, kv_codebooks, scores, score_rows, noise, "
         "weights, planes, layer_groups, key_chunks, lossless or exclusive");
  }
}

}  // namespace

std::vector<TechniqueFacts> techniques_of(const Graph& graph) {
  std::map<std::string, TechniqueFacts> found;
  for (const auto& [key, value] : graph.metadata) {
    if (!key.starts_with(kPrefix)) continue;
    const std::string rest = key.substr(kPrefix.size());
    const size_t dot = rest.find('.');
    TechniqueFacts& facts = found[rest.substr(0, dot)];
    if (dot != std::string::npos) {
      set_fact(facts, std::string_view(rest).substr(dot + 1), key, value);
    } else {
      facts.name = rest;
    }
  }
  std::vector<TechniqueFacts> techniques;
  for (auto& [name, facts] : found) {
    if (facts.name.empty()) fail(std::string(kPrefix) + name, "an entry of its own");
    if ((facts.scores_prompt || facts.scores_output) && facts.chunk_tokens == 0) {
      fail(std::string(kPrefix) + name + ".scores", "chunk_tokens beside it");
    }
    const bool scores_all = facts.scores_prompt && facts.scores_output && facts.score_rows == 0;
    if (!facts.noise.empty() && !scores_all) {
      fail(std::string(kPrefix) + name + ".noise", "scores of all rows beside it");
    }
    techniques.push_back(std::move(facts));
  }
  check_conflicts(techniques);
  return techniques;
}

void check_conflicts(const std::vector<TechniqueFacts>& techniques) {
  std::map<std::string_view, std::string_view> owners;
  for (const TechniqueFacts& technique : techniques) {
    for (const std::string& resource : technique.exclusive) {
      const auto [owner, is_new] = owners.emplace(resource, technique.name);
      if (is_new) continue;
      throw ConflictError("[techniques] " + resource +
                          ": expected one technique that decides it, " + "got " +
                          std::string(owner->second) + " and " + technique.name);
    }
  }
}

}  // namespace effinfer

namespace effinfer::runtime {

Techniques::Techniques(std::vector<TechniqueFacts> facts, const StepHooks& hooks,
                       int64_t max_batch_tokens)
    : facts_(std::move(facts)), max_batch_tokens_(max_batch_tokens) {
  check_conflicts(facts_);
  for (const auto& hook : hooks) {
    if (hook == nullptr || hook->technique().empty()) continue;
    const auto is_known = [&](const TechniqueFacts& f) { return f.name == hook->technique(); };
    if (std::any_of(facts_.begin(), facts_.end(), is_known)) continue;
    facts_.emplace_back().name = hook->technique();
  }
  if (facts_.size() > 64) {
    throw InvalidArgument("[engine] techniques: expected at most 64, got " +
                          std::to_string(facts_.size()));
  }
  take_limits(hooks);
}

void Techniques::Limits::add(const StepHook& hook) {
  const int64_t most = hook.most_slots();
  if (most > 0) slots = slots == 0 ? most : std::min(slots, most);
  const Triggers when = hook.triggers();
  if (when.over_budget > 0) prefix = std::min(prefix, when.over_budget);
  if (when.page_filled) prefix = 0;
}

void Techniques::Limits::apply(int64_t step, RequestTechniques& request) const {
  const int64_t peak = slots + step;
  if (slots > 0) {
    request.peak_slots = request.peak_slots == 0 ? peak : std::min(request.peak_slots, peak);
  }
  request.prefix.most = std::min(request.prefix.most, prefix);
}

// A lossless technique changes no key, whenever its hooks run.
void Techniques::take_limits(const StepHooks& hooks) {
  limits_.resize(facts_.size());
  for (const auto& hook : hooks) {
    if (hook == nullptr) continue;
    Limits* limits = &of_all_;
    for (size_t i = 0; i < facts_.size(); ++i) {
      if (facts_[i].name == hook->technique()) limits = facts_[i].lossless ? nullptr : &limits_[i];
    }
    if (limits != nullptr) limits->add(*hook);
  }
}

uint64_t Techniques::bit(std::string_view name) const {
  for (size_t i = 0; i < facts_.size(); ++i) {
    if (facts_[i].name == name) return uint64_t{1} << i;
  }
  return 0;
}

bool Techniques::is_lossless(std::string_view name) const {
  return std::any_of(facts_.begin(), facts_.end(),
                     [&](const TechniqueFacts& f) { return f.name == name && f.lossless; });
}

// Whole pages where a chunk has some, so that blocks of rows and pages lie alike.
int64_t Techniques::chunk_of(const TechniqueFacts& technique) const {
  if (technique.chunk_tokens == 0) return 0;
  const int64_t most = std::min(technique.chunk_tokens, max_batch_tokens_);
  return most < KvCache::kPageSize ? most : most / KvCache::kPageSize * KvCache::kPageSize;
}

bool Techniques::has_chunks() const {
  const auto has = [](const TechniqueFacts& technique) { return technique.chunk_tokens > 0; };
  return std::any_of(facts_.begin(), facts_.end(), has);
}

// Rows that are summed are computed, whatever is cached.
void Techniques::add_scores(int64_t prompt_tokens, RequestTechniques& request) const {
  for (size_t i = 0; i < facts_.size(); ++i) {
    const TechniqueFacts& each = facts_[i];
    if ((request.names >> i & 1) == 0) continue;
    request.planes.insert(request.planes.end(), each.planes.begin(), each.planes.end());
    for (const std::string& plane : {std::cref(each.weights), std::cref(each.noise)}) {
      if (!plane.empty()) request.planes.emplace_back(plane);
    }
    if (!each.weights.empty()) request.weights.emplace_back(each.weights);
    if (!each.scores_prompt && !each.scores_output) continue;
    int64_t rows = each.score_rows == 0 ? prompt_tokens : each.score_rows;
    if (!each.scores_prompt) rows = 0;
    const int64_t first = std::max<int64_t>(prompt_tokens - rows, 0);
    request.scores.push_back({each.name, first, each.scores_output, each.noise});
    request.planes.emplace_back(each.name);
    request.scores_output |= each.scores_output;
    request.prefix.most = std::min(request.prefix.most, first);
  }
}

RequestTechniques Techniques::of(const SamplingParams& params, int64_t prompt_tokens) const {
  uint64_t wanted = ~uint64_t{0};
  if (params.techniques) {
    wanted = 0;
    for (const std::string& name : *params.techniques) {
      const uint64_t known = bit(name);
      if (known == 0) {
        std::string names;
        for (const auto& each : facts_) names += (names.empty() ? "" : ", ") + each.name;
        throw InvalidArgument("[sampling] techniques: expected those of the engine (" +
                              (names.empty() ? "it has none" : names) + "), got \"" + name + "\"");
      }
      wanted |= known;
    }
  }
  RequestTechniques request;
  bool others_prompt = false, others_output = false, prompt = false, output = false;
  bool others_encode = false, encodes = false, others_chunk = false, chunks = false;
  for (size_t i = 0; i < facts_.size(); ++i) {
    const TechniqueFacts& each = facts_[i];
    others_prompt |= each.chooses_prompt;
    others_output |= each.chooses_output;
    others_encode |= each.coding.bits != 0;
    others_chunk |= each.key_chunks;
    const bool only_prompt = each.chooses_prompt && !each.chooses_output;
    const uint64_t own = uint64_t{1} << i;
    if ((wanted & own) == 0 || (only_prompt && prompt_tokens < each.min_tokens)) continue;
    request.names |= own;
    request.plain &= each.lossless;
    prompt |= each.chooses_prompt;
    output |= each.chooses_output;
    encodes |= each.coding.bits != 0;
    chunks |= each.key_chunks;
    const bool only_output = each.chooses_output && !each.chooses_prompt;
    if (!each.lossless && !only_output) request.prefix.methods |= own;
    if (!each.lossless && only_output) request.prefix.most = prompt_tokens;
    const int64_t chunk = chunk_of(each);
    if (chunk == 0) continue;
    request.chunk_tokens =
        request.chunk_tokens == 0 ? chunk : std::min(request.chunk_tokens, chunk);
  }
  request.dense_prompt = others_prompt && !prompt;
  request.dense_output = others_output && !output;
  request.prefix.encodes = encodes || !others_encode;
  request.unchunked = others_chunk && !chunks;
  request.rows_choose = others_output;
  if (request.chunk_tokens > 0) {
    request.prefix.unit = request.chunk_tokens;  // of whole pages, as the cache sees to
    request.prefix.most = prompt_tokens / request.chunk_tokens * request.chunk_tokens;
  }
  add_scores(prompt_tokens, request);
  of_all_.apply(max_batch_tokens_, request);
  for (size_t i = 0; i < facts_.size(); ++i) {
    if ((request.names >> i & 1) != 0) limits_[i].apply(max_batch_tokens_, request);
  }
  return request;
}

}  // namespace effinfer::runtime
