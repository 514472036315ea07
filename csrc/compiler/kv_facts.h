// What a KV cache has to know of a graph's layers: which of them read a window only, and how keys
// are rotated.
#pragma once

#include <vector>

#include "effinfer/graph.h"
#include "effinfer/kv_cache.h"
#include "weights/weight_store.h"

namespace effinfer::compiler {

// Of a rope_table: what a position is multiplied with, and the factor on cosines and sines.
struct RopeFrequencies {
  std::vector<float> inv_freq;
  float factor = 1.0f;
};
RopeFrequencies rope_frequencies(const Graph& graph, const weights::WeightStore& weights,
                                 const Node& rope_table);

// By window, the layers that attend to everything first: in one group, or of so many neighbours
// among them as a technique's `layer_groups` says (effinfer/techniques.h). None when all layers are
// in one group, or none attends to everything. A layer with a list of keys to visit counts as one
// that attends to everything, as does one with sink tokens.
std::vector<KvGroup> kv_groups(const Graph& graph, int32_t num_layers);
// Whether a technique asks for page tables of layers' own.
bool asks_for_tables(const Graph& graph);

// By layer, of a graph after its passes; none when some layer's keys are rotated in another way
// than with a rope_table.
std::vector<KvRope> kv_ropes(const Graph& graph, const weights::WeightStore& weights,
                             int32_t num_layers);

}  // namespace effinfer::compiler
