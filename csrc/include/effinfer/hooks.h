// Code of a technique that runs between an engine's steps, a sequence at a time, when something
// that it waits for has happened to that sequence: to read what is known of its keys, or to change
// which of them are kept.
//
// A hook sees slots: the places of a sequence's keys in the cache, counted from 0. They are the
// positions of its tokens until somebody drops keys.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "effinfer/export.h"
#include "effinfer/kv_cache.h"
#include "effinfer/speculative.h"

namespace effinfer {

// When a hook runs for a sequence: behind a step in which any of these came true. In a StepEvent:
// which of them did.
struct Triggers {
  bool prompt_end = false;   // its prompt's last token was computed
  bool page_filled = false;  // a page's last slot was written, or those of several pages
  int64_t every = 0;         // so many more tokens behind the prompt were computed; 0: off
  int64_t over_budget = 0;   // it holds more slots than this, in prompts too; 0: off
};

struct StepEvent {
  RequestId request = 0;
  Triggers fired;
  // The step's slots, [first, first + count): of a chunk of the prompt, of a generated token, or of
  // several that were drafted and accepted.
  int64_t first = 0;
  int64_t count = 0;
};

// One sequence between two steps; good while StepHook::run() runs.
class EFFINFER_API SequenceState {
 public:
  virtual ~SequenceState();
  virtual SequenceId id() const = 0;  // in the engine's cache
  // Slots whose keys and values are written, in the group without a window that has most.
  virtual int64_t length() const = 0;
  virtual int64_t prompt_tokens() const = 0;  // of the request
  virtual int64_t output_tokens() const = 0;  // generated, the last of which has no slot yet
  virtual int64_t next_position() const = 0;  // of the token that is computed next
  virtual int32_t head_dim() const = 0;       // of keys and values
  // Of the prompt and the output that were computed, those that slots were dropped of, too.
  virtual std::span<const int32_t> tokens() const = 0;
  virtual int32_t num_groups() const = 0;  // of layers
  // The first ones, which are without a window: one, but where a technique asks for more.
  virtual int32_t num_whole_groups() const = 0;
  virtual int32_t num_heads() const = 0;  // (layer, KV head) of these groups
  // Of the heads of a plane those before a group without a window; of num_whole_groups(): all.
  virtual int32_t first_head(int32_t group) const = 0;
  virtual int64_t slots(int32_t group) const = 0;

  // What KvCache has by these names, with what it throws. The prompt's and the output's tokens stay
  // the request's; it is published as a prefix no more.
  virtual void retain(int32_t group, std::span<const std::vector<int32_t>> slots) = 0;
  virtual void reorder(int32_t group, std::span<const std::vector<int32_t>> slots) = 0;
  virtual void evict(int32_t group, int64_t begin, int64_t end) = 0;
  virtual void merge(int32_t group, std::span<const KvMerge> merges) = 0;
  virtual void reposition(std::span<const int64_t> from, int64_t delta) = 0;
  virtual SlotPlane plane(std::string_view name) = 0;
  virtual void read(int32_t group, int32_t head, std::span<float> keys,
                    std::span<float> values) const = 0;
};

// Runs on the thread that steps, which holds the engine: a hook calls no method of it. What it
// throws ends its request with FinishReason::error; the others go on.
class EFFINFER_API StepHook {
 public:
  virtual ~StepHook();
  // Always the same ones. At least one must be set.
  virtual Triggers triggers() const = 0;
  // The technique that requests turn it on and off by; empty: it runs for all of them.
  virtual std::string_view technique() const { return {}; }
  // Slots, and positions, that its requests never exceed between two steps, however long their text
  // is; 0: it knows of no such bound. Where that and a step's tokens are within the engine's
  // max_seq_len, a text may be longer.
  virtual int64_t most_slots() const { return 0; }
  // A request that ends in a step has no event of it.
  virtual void run(const StepEvent& event, SequenceState& sequence) = 0;
  // The request has ended, or lost its pages and begins anew with its first token: what is known of
  // it is void. Of requests that never ran, too; not of one that loses its pages after keys were
  // dropped, which comes back as it was.
  virtual void forget(RequestId) noexcept {}
};

using StepHooks = std::vector<std::shared_ptr<StepHook>>;

}  // namespace effinfer
