// Where values lie in the arena: offsets such that values alive at the same time never overlap.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "effinfer/compiler.h"

namespace effinfer::compiler {

inline constexpr int64_t kArenaAlignment = 64;

// Bytes that are in use from node `first` to node `last`, both included.
struct Lifetime {
  int first = 0;
  int last = 0;
  int64_t bytes = 0;
};

struct ArenaPlan {
  std::vector<int64_t> offsets;  // of each lifetime, multiples of kArenaAlignment
  int64_t bytes = 0;             // the peak
};

// Places the largest first, each into the smallest gap that fits between those placed that share
// its time (greedy by size: Pisarchyk and Lee 2020, "Efficient memory management for deep neural
// net inference").
ArenaPlan plan_arena(std::span<const Lifetime> lifetimes);

// Whether every member computes the node in a step of few tokens (executor::kOwnRows).
bool is_own(const Node& node);

// Whether the first output is logits, which go straight to the caller. The front of a model that
// was cut returns none: all its outputs stay in the arena.
bool returns_logits(const Graph& graph);

// A handle orders nodes and has no bytes.
bool is_handle(const Value& value);

// A dimension at the largest step that the options allow.
int64_t largest(const Dim& dim, const CompileOptions& options);

// Bytes of a value at the largest step; of an operand in the larger of its arithmetics, which
// `producer` carries.
int64_t largest_bytes(const Value& value, const Node& producer, const CompileOptions& options);

}  // namespace effinfer::compiler
