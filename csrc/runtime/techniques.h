// The techniques of an engine, and what they mean for one request.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "effinfer/hooks.h"
#include "effinfer/kv_cache.h"
#include "effinfer/sampling.h"
#include "effinfer/techniques.h"

namespace effinfer::runtime {

// Rows whose attention is summed: of the prompt those from `first` on, and those of the output.
struct ScorePlan {
  std::string_view name;  // of a technique, and of the plane
  int64_t first = 0;
  bool output = false;
  std::string_view noise;  // a plane; empty: none
};

struct RequestTechniques {
  uint64_t names = 0;  // those that it runs with, by their bits
  // Where others' rows visit chosen keys and its own do not.
  bool dense_prompt = false;
  bool dense_output = false;
  bool unchunked = false;    // its keys are in no chunks, where others' are
  bool rows_choose = false;  // its generated rows, or others', visit chosen keys
  int64_t chunk_tokens = 0;  // steps of its prompt end at multiples; 0: anywhere
  std::vector<ScorePlan> scores;
  std::vector<std::string_view> weights;  // planes by which its keys count
  std::vector<std::string_view> planes;   // that its sequence has
  bool scores_output = false;             // any of them
  // Of a step, where hooks bound slots and positions; 0: they grow with the text.
  int64_t peak_slots = 0;
  PrefixKey prefix;
  bool plain = true;  // its keys and values are those of a request without any
};

class Techniques {
 public:
  // Those of a graph, and of hooks. Throws InvalidArgument for more than 64.
  Techniques(std::vector<TechniqueFacts> facts, const StepHooks& hooks, int64_t max_batch_tokens);

  // The bit of a name; 0: the name is empty. It must be known.
  uint64_t bit(std::string_view name) const;
  bool is_lossless(std::string_view name) const;
  // Throws InvalidArgument naming the technique that the engine lacks.
  RequestTechniques of(const SamplingParams& params, int64_t prompt_tokens) const;
  // Whether steps of prompts end at fixed places.
  bool has_chunks() const;

 private:
  // What its hooks mean for a request.
  struct Limits {
    int64_t slots = 0;  // between two steps; 0: none
    // Tokens of a cached prefix: behind more of them a hook would have run.
    int64_t prefix = std::numeric_limits<int64_t>::max();

    void add(const StepHook& hook);
    void apply(int64_t step, RequestTechniques& request) const;
  };

  int64_t chunk_of(const TechniqueFacts& technique) const;
  void take_limits(const StepHooks& hooks);
  void add_scores(int64_t prompt_tokens, RequestTechniques& request) const;

  std::vector<TechniqueFacts> facts_;
  std::vector<Limits> limits_;  // by technique
  Limits of_all_;               // of hooks that run for all requests
  int64_t max_batch_tokens_;
};

}  // namespace effinfer::runtime
