// From a graph to an executable: the pass list, the arena plan and the flat list of kernel calls.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "effinfer/cancel.h"
#include "effinfer/device.h"
#include "effinfer/export.h"
#include "effinfer/graph.h"
#include "effinfer/kv_cache.h"
#include "effinfer/pack_cache.h"
#include "effinfer/profile.h"
#include "effinfer/threads.h"
#include "effinfer/weights.h"

namespace effinfer {

enum class Precision : uint8_t {
  fast,  // decode: int8 activations; prefill: the best panel kernel of the machine
  f32    // float32 throughout
};

// How the weights of ternary_linear are packed: at 2 bits, at 1.6 bits, or what is faster for this
// machine and model. Results have the same bits.
enum class TernaryPacking : uint8_t { automatic, t2, t1_6 };

// "auto", "t2" or "t1_6"; throws InvalidArgument.
EFFINFER_API TernaryPacking parse_ternary_packing(std::string_view text);

// The first layers of a model on a device of their own. In each step they run before the others, to
// whose device goes what they hand on: T rows of hidden states.
struct FrontLayers {
  Device device = {};
  // How many; none: as many as the faster of two memories holds, or, of two sets of cores, in
  // proportion to the rates at which they read memory. 0, or all of them: the model is on one
  // device.
  std::optional<int32_t> count = {};
  std::shared_ptr<ThreadPool> pool = nullptr;  // null: that of the other layers
  // Pages of the cache for which that choice leaves room.
  int32_t num_pages = 0;
};

// What an executable and an engine are both told.
struct ModelOptions {
  Precision precision = Precision::fast;
  bool deterministic = false;             // prefill in the decode arithmetic
  std::optional<DType> kv_dtype;          // of the cache; default: bf16, or f32 with Precision::f32
  int64_t max_seq_len = 0;                // 0: the model's context length
  int64_t max_sequences = 64;             // S of a step at most; in an engine more requests wait
  std::set<std::string> disabled_passes;  // besides EFFINFER_PASSES=-name,-name
  std::string pack_cache;                 // folder of packed weights (pack_cache.h); empty: none
  // Folder that keeps what was measured of this machine (tuning.h); empty: nothing is measured.
  std::string tuning_cache;
  TernaryPacking ternary_packing = TernaryPacking::automatic;
  Device device = {};                     // of the kernels, the weights and the cache
  std::optional<FrontLayers> front = {};  // on a device of their own; none: all are on `device`
};

struct CompileOptions : ModelOptions {
  int64_t max_tokens = 512;  // T of a step at most
  int64_t max_rows = 64;     // R of a step at most
};

// The values of a graph's float input in a step: f32 [T, cols] of the input's shape.
struct FloatInput {
  std::string_view name;
  std::span<const float> values;
};

// Where the keys of one group of a cache's layers lie (KvCacheConfig::groups); as in a Batch.
struct KvTables {
  std::span<const int32_t> kv_indptr;
  std::span<const int32_t> kv_indices;
  std::span<const int32_t> kv_len;
  std::span<const int32_t> tree_start = {};
};

// One step's input: flat tokens of S sequences. All spans stay valid during run().
struct Batch {
  Phase phase = Phase::decode;
  std::span<const int32_t> token_ids;   // [T]
  std::span<const int32_t> positions;   // [T] RoPE positions
  std::span<const int32_t> qo_indptr;   // [S + 1]
  std::span<const int32_t> kv_indptr;   // [S + 1] into kv_indices
  std::span<const int32_t> kv_indices;  // page ids
  std::span<const int32_t> kv_len;      // [S] tokens in the cache, this step's included
  std::span<const int32_t> logit_rows;  // [R] rows of the step whose logits are wanted
  // [T], or empty: the rows of each sequence are a chain, as are those of a sequence whose words
  // are all 0. Else they are a tree of drafts, parents before children: bit j of a row's word says
  // that the row descends from token j of the tree, or is it, and the sequence has 64 tokens at
  // most from the tree's first one to kv_len. A row attends to what precedes the tree, its
  // ancestors and itself; positions are its depth's.
  //
  // With the arithmetic of decoding a row has the bits of a step that appends its path alone, if
  // each of its ancestors, and it itself, lies on the page on which it would lie then: token j of
  // the tree, k-th of the path, at tree_start + j, on the page of tree_start + k. Other rows are as
  // exact, but may round differently.
  std::span<const uint64_t> ancestors = {};
  // [S], or empty: each tree begins with its sequence's first row. Else the token of the sequence,
  // counted from 0, that is the tree's first one: a tree may then grow over several steps, whose
  // earlier tokens lie between tree_start and the step's own. Those of chains are not looked at.
  std::span<const int32_t> tree_start = {};
  // [S], or empty: what the graph's index nodes choose is for all sequences. Else 1: the sequence's
  // rows visit all keys, with the bits of a graph that chooses none; 0: those chosen.
  std::span<const uint8_t> dense = {};
  // Those of the graph's float inputs, each once; finite.
  std::span<const FloatInput> float_inputs = {};
  // Of the cache's groups of layers behind the first, whose tables are those above.
  std::span<const KvTables> more_groups = {};
  // What attention_mass nodes add, for each sequence and name once; for others they do nothing.
  std::span<const ScoredRows> scored = {};
  // How often attention nodes of these names count keys, of a sequence once; others count each
  // once.
  std::span<const WeightedSlots> weighted = {};
  // [S], or empty: the keys of all sequences are in the chunks that the graph's nodes know. Else 1:
  // rope_table takes the sequence's positions as they are, and attention knows no chunks of it.
  std::span<const uint8_t> unchunked = {};
};

// The highest logits of each row, in place of all of them.
struct TopLogits {
  int32_t k = 0;              // 1..Executable::max_top()
  std::span<float> values;    // [R, k], highest first; the first is NaN where the row holds one
  std::span<int32_t> tokens;  // [R, k], the lower id first among equals
};

// How a token is drawn from a row of logits: the fields of SamplingParams that a device covers.
struct RowDraw {
  float temperature = 1.0f;  // 0: greedy
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  uint64_t seed = 0;
  uint64_t index = 0;  // of the token in its request
};

// Tokens in place of logits.
struct DrawnTokens {
  std::span<const RowDraw> draws;  // [R]
  std::span<int32_t> tokens;       // [R]
  // [R]: 1 where Sampler::sample() draws this token, too; 0 where sums are too near a bound to
  // tell, and where it refuses the row.
  std::span<uint8_t> decided;
};

// What a graph returns beside the logits: float32 [rows, cols] of the last step.
struct NamedRows {
  std::span<const float> values;
  int64_t cols = 0;
};

class EFFINFER_API Executable {
 public:
  ~Executable();
  // Runs one step in one parallel region, without allocation: appends K and V to `cache`, writes
  // float32 logits [R, vocab]. Throws InvalidArgument on an inconsistent batch before anything
  // runs. Cancelled, it ends after the kernel that it is in (on a GPU: before the step, whose
  // kernels are put into the queue together) and throws Cancelled: what it should have written
  // is undefined, and another step may follow.
  void run(const Batch& batch, KvCache& cache, std::span<float> logits,
           const CancelToken* cancel = nullptr);
  // Runs one step as run() does, but its head keeps the k highest logits of each row as it goes.
  void run_top(const Batch& batch, KvCache& cache, const TopLogits& top,
               const CancelToken* cancel = nullptr);
  // The most logits a row that run_top() can keep; 0 where the graph's last node is no matmul.
  int32_t max_top() const;
  // Whether run_drawn() is there: on GPUs, as the host samples for itself. Runs one step as run()
  // does, and draws a token from each row. Until the next step read_row() reads a row's logits.
  bool draws_tokens() const;
  void run_drawn(const Batch& batch, KvCache& cache, const DrawnTokens& drawn);
  void read_row(int64_t row, std::span<float> logits);

  // Records the next `max_steps` steps, front()'s too; takes memory now, so that run() allocates
  // nothing. Throws InvalidArgument for less than one step, OutOfMemory. Not while run() is active.
  void start_profile(int64_t max_steps);
  // Ends recording and hands over what there is; an empty profile when none was started.
  Profile take_profile();

  // The graph's outputs behind the logits, by the names of their values, and one of them as the
  // last step left it: a row for each of its tokens, or of its logit rows. Valid until the next
  // step of this executable or of one that shares its weights. Throws InvalidArgument for another
  // name.
  const std::vector<std::string>& output_names() const;
  NamedRows output(std::string_view name) const;

  // What runs the first layers (ModelOptions::front) in each step of this one, which has the
  // others; null: there is none.
  const std::shared_ptr<Executable>& front() const;
  int64_t vocab_size() const;
  // Whether steps read and write the cache.
  bool has_attention() const;
  // What cache the graph needs; run() takes one of the dtype of the options. A graph without
  // attention takes any: this is then the smallest there is.
  // `by_window`: layers that attend to a window are groups of their own, by window, and free what
  // they will never read; a Batch then has a table for each. Layers whose keys are chosen by a list
  // stay with those that attend to all, as do those with sink tokens. Of a GPU only where the graph
  // asks for several tables anyway; of an executable with a front that is Unsupported.
  KvCacheConfig kv_config(DType dtype, int32_t num_pages, bool by_window = false) const;
  // Of an executable with a front these are of its own layers, whose device draws tokens.
  const CompileOptions& options() const;
  const Target& target() const;  // of its kernels
  const std::shared_ptr<ThreadPool>& pool() const;
  const Graph& graph() const;  // after all passes
  // These count the front, too.
  size_t arena_bytes() const;   // peak of the memory plan
  size_t packed_bytes() const;  // weights as packed
  const PackCacheReport& pack_cache() const;
  // Why what was measured of the machine could not be kept in the tuning cache; empty: it was, or
  // nothing was measured.
  const std::string& tuning_trouble() const;
  // A table: phase, node, kernel variant and why; packed forms of weights; passes run and skipped;
  // arena plan and peak; anything that fell back to a slower path.
  std::string explain() const;

 private:
  friend EFFINFER_API std::shared_ptr<Executable> compile(const Graph&,
                                                          std::shared_ptr<const WeightSource>,
                                                          std::shared_ptr<ThreadPool>,
                                                          const CompileOptions&);
  friend EFFINFER_API std::shared_ptr<Executable> compile_beside(
      const Executable&, const Graph&, std::shared_ptr<const WeightSource>,
      std::shared_ptr<ThreadPool>);
  friend struct ExecutableHalves;  // compiles a front and what follows it
  struct Impl;
  explicit Executable(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Runs the passes, packs the weights, plans the memory and selects the kernels. Throws FormatError
// for a broken graph, InvalidArgument for a weight that is missing or of another shape, Unsupported
// when a node has no kernel, OutOfMemory.
EFFINFER_API std::shared_ptr<Executable> compile(const Graph& graph,
                                                 std::shared_ptr<const WeightSource> weights,
                                                 std::shared_ptr<ThreadPool> pool,
                                                 const CompileOptions& options = {});

// Another graph over the weights that an executable has packed, on its pool and with its options: a
// weight that both have, which the source gives as the same bytes at the same place, is in memory
// once, and so is the arena where the first one's is large enough. `weights`: null is the first's
// source. The executables run one at a time, over caches of their own or, where layers have the
// same shape, over one. With another `pool` the arena is its own, too: over caches of their own the
// two run side by side. Throws as compile().
EFFINFER_API std::shared_ptr<Executable> compile_beside(
    const Executable& first, const Graph& graph,
    std::shared_ptr<const WeightSource> weights = nullptr,
    std::shared_ptr<ThreadPool> pool = nullptr);

// The layers that a graph has, by the attribute `layer` of its nodes, in the order in which they
// run.
EFFINFER_API std::vector<int32_t> layers_of(const Graph& graph);

// A graph in two, behind its first layers, 1 to all but one. The front returns what the back reads
// of it, f32[T, size], and no logits; to the back these are float inputs. What costs next to
// nothing is computed in both, such as rotary tables.
struct GraphHalves {
  Graph front;
  Graph back;
};
// Throws InvalidArgument for another number of layers, and for layers that no line divides.
EFFINFER_API GraphHalves cut_graph(const Graph& graph, int32_t front_layers);

// The pass list in order, and one pass alone on a graph: for tests and the curious.
EFFINFER_API std::vector<std::string> pass_names();
EFFINFER_API Graph run_pass(std::string_view name, const Graph& graph,
                            const CompileOptions& options = {});

}  // namespace effinfer
