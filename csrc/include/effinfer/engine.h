// The engine: continuous batching of requests over one model.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "effinfer/compiler.h"
#include "effinfer/constraint.h"
#include "effinfer/export.h"
#include "effinfer/hooks.h"
#include "effinfer/model.h"
#include "effinfer/sampling.h"
#include "effinfer/speculative.h"
#include "effinfer/threads.h"

namespace effinfer {

struct EngineOptions : ModelOptions {
  // 0: enough for one sequence (of max_seq_len, or 8192 tokens when that is not given) and eight of
  // 1024 tokens, in at most a quarter of the memory. A page takes memory when it is first used.
  int32_t num_pages = 0;
  int64_t max_batch_tokens = 512;  // tokens of a step: the prefill chunk
  bool prefix_cache = true;
  // Pages of the cache behind a request's newest tokens are encoded before its next step, but not
  // before its prompt is computed. Prompts alone are cached for reuse, then.
  KvCoding kv_coding = {};
  // Drafts for requests that decode (speculative.h); without proposers there are none.
  Speculation speculation = {};
  // Of techniques (hooks.h, techniques.h): they run in this order.
  StepHooks hooks = {};
};

enum class FinishReason : uint8_t { none, stop, length, cancelled, error };
EFFINFER_API std::string_view name(FinishReason reason);

// What a step did for one request.
struct StepOutput {
  RequestId request = 0;
  std::vector<SampledToken> tokens;  // new tokens, in order; one that stopped it is the last
  FinishReason finish = FinishReason::none;
  bool stop_token = false;  // whether the last token ends the text without being part of it
  std::string error;        // FinishReason::error: why this request (alone) ended
  // Why drafts for this request were refused, the first time; it goes on without them.
  std::string warning;
  // With SamplingParams::prompt_logprobs: the prompt's tokens from the second on, in order, each in
  // the step that computed what comes before it.
  std::vector<SampledToken> prompt;
};

struct RequestMetrics {
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;  // of the prompt, found in the prefix cache or with another answer
  int64_t output_tokens = 0;
  int64_t preemptions = 0;
  double time_to_first_token_s = 0;
  double total_s = 0;
  SpeculationMetrics speculation;
};

struct EngineStats {
  int64_t steps = 0;
  int64_t waiting = 0;
  int64_t running = 0;
  int32_t free_pages = 0;  // without those of cached prefixes, which are freed on demand
  int32_t total_pages = 0;
  int64_t preemptions = 0;
  // Spent on drafts beside their rows: asking, choosing, telling what came of them.
  double drafting_s = 0;
  std::vector<DraftingStats> drafters;  // that have a device of their own
};

// One thread at a time may call step(); the other methods may be called from any thread.
//
// Whole pages (64 tokens) of what was computed before are reused when a prompt begins with the same
// tokens. With Precision::fast, and without `deterministic`, prompts are computed in other
// arithmetic than generated tokens, so a prompt that goes on from generated text may round in
// another way when it finds that text's pages; prefix_cache = false rules that out.
class EFFINFER_API Engine {
 public:
  Engine(std::shared_ptr<const Model> model, const EngineOptions& options = {},
         std::shared_ptr<ThreadPool> pool = nullptr);
  ~Engine();

  // Queues a request. Throws InvalidArgument: empty prompt, ids out of the vocabulary, prompt that
  // leaves no room for a token within max_seq_len, a request that the page pool could never hold.
  // With a constraint of its own every token is one that it allows.
  RequestId add(std::span<const int32_t> prompt, const SamplingParams& params,
                std::shared_ptr<TokenConstraint> constraint = nullptr);
  // Queues several answers to one prompt, a request for each of `params`, ids in order. The first
  // to run computes the prompt, and the others fork its sequence, sharing pages; each has the
  // tokens that it would have alone. `constraints`: none, or one (or null) an answer. Throws as
  // add(), with nothing queued.
  std::vector<RequestId> add_answers(
      std::span<const int32_t> prompt, std::span<const SamplingParams> params,
      std::span<const std::shared_ptr<TokenConstraint>> constraints = {});
  // Ends a request at the next step; unknown or finished ids are ignored.
  void cancel(RequestId request);
  bool has_work() const;
  // Runs one step and returns what each request got. A failure of one request ends that request
  // with FinishReason::error; the others go on.
  std::vector<StepOutput> step();
  // Runs to the end for one prompt: the simple way for C++ programs. `on_token` may return false to
  // stop.
  std::vector<int32_t> generate(std::span<const int32_t> prompt, const SamplingParams& params,
                                const std::function<bool(int32_t)>& on_token = nullptr);

  // float32 logits [tokens.size(), vocab] of a whole sequence, in chunks; for evaluation. `out` is
  // [tokens.size() * vocab_size()]. With `phase` = decode one token is fed at a time.
  void logits(std::span<const int32_t> tokens, std::span<float> out, Phase phase = Phase::prefill);

  // log p(tokens[i + 1] | tokens[0..i]) in nats for each but the first token: `out` is
  // [tokens.size() - 1]. Holds at most 64 MB of logits, or one row.
  void log_likelihoods(std::span<const int32_t> tokens, std::span<double> out,
                       Phase phase = Phase::prefill);

  RequestMetrics metrics(RequestId request) const;  // finished requests are kept until forget()
  void forget(RequestId request);
  EngineStats stats() const;
  // Profiles as Executable's methods do, whoever runs the steps; over the same time, that of the
  // first layers, where they are on a device of their own, and those of proposers that have one.
  void start_profile(int64_t max_steps);
  Profile take_profile();
  std::optional<Profile> take_front_profile();
  std::vector<NamedProfile> take_draft_profiles();
  int64_t vocab_size() const;
  int64_t max_seq_len() const;
  int threads() const;
  Executable& executable();
  KvCache& kv_cache();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace effinfer
