// A step as its calls see it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "effinfer/compiler.h"
#include "ops/attention.h"
#include "ops/attention_mass.h"
#include "ops/kv_layout.h"
#include "ops/top_list.h"
#include "ops/visits.h"

namespace effinfer::executor {

// The work of attention of one shape in a step, and memory for partial results, which all shapes
// share since layers run one by one.
struct AttentionBuffers {
  ops::AttentionWork work;        // on the host
  ops::AttentionWorkView view;    // in the memory of the kernels' device
  std::vector<int32_t> counters;  // of merges, zeros between calls
  int32_t* done = nullptr;        // the same
  float* partial_out = nullptr;
  float* partial_ms = nullptr;
  uint8_t* arranged = nullptr;
};

struct Step {
  const Batch* batch = nullptr;
  float* logits = nullptr;
  ops::TopList* top = nullptr;  // [members][rows]; null: all logits are wanted
  int32_t top_k = 0;
  ops::BatchLayout layout;                      // of the cache's first group of layers
  std::span<const ops::BatchLayout> groups;     // of each; none: there is one
  std::span<const uint8_t> group_of_layer;      // by the number of a layer; none: there is one
  size_t num_whole_groups = 1;                  // the first ones, which are without a window
  std::span<const ops::KvLayer> kv_layers;      // by the number of a layer
  std::span<const AttentionBuffers> attention;  // by the slot of an attention shape
  std::span<const ops::VisitPlan> visits;       // by the slot of a visit shape
  // By the number of a name among Shared::weight_names, then by sequence; null: there are no names.
  const ops::SlotWeights* weighted = nullptr;
  // The weights that attention keeps and attention_mass nodes sum up, or none: these make their
  // own.
  ops::KeptWeights kept;
  ops::DecodedPages decoded;  // on a GPU
  std::byte* own = nullptr;   // a member's own arena in a small step
  // On a GPU, of the batch's scored rows, which are ordered by names there.
  const ops::MassRows* mass_rows = nullptr;
  float* mass_sums = nullptr;

  // On the host.
  std::span<const int32_t> kv_len_of(size_t layer) const {
    const size_t group = group_of_layer.empty() ? 0 : group_of_layer[layer];
    return group == 0 ? batch->kv_len : batch->more_groups[group - 1].kv_len;
  }
  const ops::BatchLayout& layout_of(size_t layer) const {
    return group_of_layer.empty() ? layout : groups[group_of_layer[layer]];
  }
  // Of a layer without a window among these, in whose order planes have their heads.
  size_t place_in_planes(size_t layer) const {
    if (group_of_layer.empty()) return layer;
    const auto is_whole = [&](uint8_t group) { return group < num_whole_groups; };
    return static_cast<size_t>(std::ranges::count_if(group_of_layer.first(layer), is_whole));
  }
  int64_t count(const Dim& dim) const {
    switch (dim.kind) {
      case Dim::Kind::tokens:
        return static_cast<int64_t>(batch->token_ids.size());
      case Dim::Kind::sequences:
        return layout.num_sequences;
      case Dim::Kind::rows:
        return static_cast<int64_t>(batch->logit_rows.size());
      case Dim::Kind::constant:
        break;
    }
    return dim.value;
  }
};

}  // namespace effinfer::executor
