// What compilation makes of a graph: the calls of each phase and what they share.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "effinfer/compiler.h"
#include "effinfer/graph.h"
#include "effinfer/profile.h"
#include "executor/call.h"
#include "ops/hash_tables.h"
#include "weights/weight_store.h"

namespace effinfer::executor {

// Steps of at most this many tokens compute row-wise nodes on every member (fuse_regions): beyond
// it, rows cost more than the barriers that they save.
inline constexpr int64_t kOwnRows = 4;

// The calls of one phase.
struct Program {
  std::vector<std::unique_ptr<Call>> calls;
  std::vector<CallInfo> infos;  // one a call: for explain() and profiles
  // Query heads whose scores attention can keep for what keys get of single rows; 0: it never does.
  int64_t kept_heads = 0;
};

// Where a float input of the graph lies in a step: kernels may read past the end of its last row.
struct InputBuffer {
  std::string name;
  int64_t cols = 0;
  std::shared_ptr<void> memory;  // [max_tokens, cols] and the tail
  // Pinned, [max_tokens, cols], from where it goes to `memory`; null: the host writes that itself.
  std::shared_ptr<std::byte> staged;

  float* values() const { return static_cast<float*>(memory.get()); }
  float* host_values() const {
    return staged == nullptr ? values() : reinterpret_cast<float*>(staged.get());
  }
};

// Where a step leaves what the graph returns behind the logits.
struct OutputBuffer {
  std::string name;
  Dim rows;
  int64_t cols = 0;
  const float* values = nullptr;  // in the arena
  // Pinned, as many rows as the largest step has; null: the host reads the arena.
  std::shared_ptr<std::byte> staged;

  const float* host_values() const {
    return staged == nullptr ? values : reinterpret_cast<const float*>(staged.get());
  }
};

// What keys are hashed with (ops/hash_tables.h), on the executable's device; layers share it.
struct HashConstants {
  ops::HashShape shape;
  int32_t head_dim = 0;
  int64_t seed = 0;
  const float* planes = nullptr;
  const float* chances = nullptr;
};

// What the programs of an executable share.
struct Shared {
  Graph graph;
  CompileOptions options;  // with every default resolved
  Target target;           // that kernels are selected for
  const Memory* memory = nullptr;
  std::shared_ptr<weights::WeightStore> weights;  // other executables may have it as their base
  std::byte* arena = nullptr;
  std::vector<InputBuffer> inputs;                    // the float ones
  std::vector<OutputBuffer> outputs;                  // behind the logits
  std::vector<ops::AttentionShape> attention_shapes;  // distinct ones: the slots of plans
  std::vector<size_t> attention_layers;               // of each the number of a layer
  std::vector<ops::VisitShape> visit_shapes;          // the same
  std::vector<size_t> visit_layers;                   // the same
  std::vector<uint8_t> group_of_layer;                // of the cache; none: there is one
  bool layer_tables = false;  // whether some technique asks for page tables of layers' own
  std::vector<std::string> weight_names;         // distinct ones, of planes that weigh keys
  std::vector<std::shared_ptr<void>> constants;  // such as rotary frequencies
  std::vector<HashConstants> hash_constants;     // distinct ones
  size_t scratch_bytes = 0;                      // of a member
  int32_t max_top = 0;  // logits a row that the head can keep; 0: it writes all of them
};

}  // namespace effinfer::executor
