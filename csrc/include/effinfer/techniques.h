// What an engine knows of the techniques that a graph was made with, from its metadata:
//
//   meta technique.minference = "..."                  its name, and its fields as JSON
//   meta technique.minference.chooses = "prompt"       whose rows visit chosen keys: "prompt",
//                                                      "output", or "both"; none: nobody's
//   meta technique.minference.min_tokens = 2048        shorter prompts stay as they are
//   meta technique.minference.chunk_tokens = 2048      where steps of a prompt end
//   meta technique.kivi.kv_bits = 4                    pages behind the newest tokens are encoded
//   meta technique.kivi.kv_residual = 128              (KvCoding)
//   meta technique.gear.kv_rank = 2                    with factors, and outliers, of what the
//   meta technique.gear.kv_outliers = 48               bits lack
//   meta technique.cskv.kv_features = 128              of features in a basis, four bfloat16 in
//   meta technique.cskv.kv_basis = [...]               each integer
//   meta technique.xkv.kv_shared_layers = 3            features that so many layers share
//   meta technique.comm_vq.kv_codebooks = [...]        numbers of vectors in codebooks, packed so
//   meta technique.snapkv.scores = "prompt"            whose rows attention_mass nodes add to the
//                                                      plane of this name: "prompt", "output",
//                                                      "both"
//   meta technique.snapkv.score_rows = 32              of a prompt the last so many; 0: all
//   meta technique.keyformer.noise = "keyformer.noise" a plane that attention_mass nodes add to
//                                                      logits: Gumbel noise of the prompt, the
//                                                      key's position and the head
//   meta technique.chelsea.weights = "chelsea.weights" a plane by which attention nodes with this
//                                                      name count keys, e to the power of it
//   meta technique.kv_compose.layer_groups = 1         so many neighbouring layers without a window
//                                                      have a page table of their own
//   meta technique.raas.planes = "raas.stamps"         more planes that its sequences have, commas
//                                                      between
//   meta technique.qwen_1m.key_chunks = true           the chunks of keys that nodes know
//   (rope_table,
//                                                      attention) are of its requests alone
//   meta technique.minference.lossless = true          it changes no key or value
//   meta technique.minference.exclusive = "prefill.visits"     what it decides alone, commas
//   between
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "effinfer/error.h"
#include "effinfer/export.h"
#include "effinfer/graph.h"
#include "effinfer/kv_cache.h"

namespace effinfer {

// Two techniques want to decide the same thing.
class EFFINFER_API ConflictError : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

struct TechniqueFacts {
  std::string name;
  bool chooses_prompt = false;
  bool chooses_output = false;
  // Of one that chooses keys of prompts alone; 0: prompts of any length.
  int64_t min_tokens = 0;
  // What is chosen depends on how a prompt is cut into steps, so that it is cut at multiples of
  // this; 0: wherever. Never above what a step holds (EngineOptions::max_batch_tokens), which is
  // the distance where it is smaller.
  int64_t chunk_tokens = 0;
  KvCoding coding;  // of the requests that run with it
  // Sums of rows depend on how they are cut into steps: with chunk_tokens only.
  bool scores_prompt = false;
  bool scores_output = false;
  int64_t score_rows = 0;
  std::string noise;  // with scores of all rows of prompts and outputs only
  std::string weights;
  std::vector<std::string> planes;
  int64_t layer_groups = 0;  // 0: layers without a window share a page table
  bool key_chunks = false;
  bool lossless = false;
  std::vector<std::string> exclusive;
};

// Those of a graph, by name. Throws FormatError for metadata of another form, ConflictError.
EFFINFER_API std::vector<TechniqueFacts> techniques_of(const Graph& graph);
// Throws ConflictError when two of them want to decide the same thing, naming both and it.
EFFINFER_API void check_conflicts(const std::vector<TechniqueFacts>& techniques);

}  // namespace effinfer
