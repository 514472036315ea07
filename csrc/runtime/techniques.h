// The techniques of an engine, and what they mean for one request.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "effinfer/hooks.h"
#include "effinfer/kv_cache.h"
#include "effinfer/sampling.h"
#include "effinfer/techniques.h"

namespace effinfer::runtime {

struct RequestTechniques {
  uint64_t names = 0;  // those that it runs with, by their bits
  // Where others' rows visit chosen keys and its own do not.
  bool dense_prompt = false;
  bool dense_output = false;
  bool rows_choose = false;  // its generated rows, or others', visit chosen keys
  int64_t chunk_tokens = 0;  // steps of its prompt end at multiples; 0: anywhere
  PrefixKey prefix;
  bool plain = true;  // its keys and values are those of a request without any
};

class Techniques {
 public:
  // Those of a graph, and of hooks. Throws InvalidArgument for more than 64.
  Techniques(std::vector<TechniqueFacts> facts, const StepHooks& hooks, int64_t max_batch_tokens);

  // The bit of a name; 0: the name is empty. It must be known.
  uint64_t bit(std::string_view name) const;
  // Throws InvalidArgument naming the technique that the engine lacks.
  RequestTechniques of(const SamplingParams& params, int64_t prompt_tokens) const;
  // Whether steps of prompts end at fixed places.
  bool has_chunks() const;

 private:
  int64_t chunk_of(const TechniqueFacts& technique) const;

  std::vector<TechniqueFacts> facts_;
  int64_t max_batch_tokens_;
};

}  // namespace effinfer::runtime
