// From the annotated graph to a flat list of calls: one rule an operator, in lower_*.cpp.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "compiler/memory_plan.h"
#include "executor/places.h"
#include "executor/program.h"
#include "ops/attention_mass.h"
#include "ops/operand.h"
#include "ops/prefill_index.h"

namespace effinfer::compiler {

using executor::Floats;
using executor::Ids;
using executor::OperandPlace;
using executor::Program;
using executor::Shared;
using weights::WeightStore;

inline ops::Arithmetic product_arithmetic(const ops::MatmulProblem& problem) {
  return problem.x.arithmetic;
}
inline ops::Arithmetic product_arithmetic(const ops::AttentionProblem& problem) {
  return problem.arithmetic;
}
inline ops::Arithmetic product_arithmetic(const ops::ColumnIndexProblem& problem) {
  return problem.in.arithmetic;
}
inline ops::Arithmetic product_arithmetic(const ops::BlockIndexProblem& problem) {
  return problem.in.arithmetic;
}
inline ops::Arithmetic product_arithmetic(const ops::AttentionMassProblem& problem) {
  return problem.arithmetic;
}
template <class Problem>
ops::Arithmetic product_arithmetic(const Problem&) {
  return ops::Arithmetic::f32;
}

class Lowering {
 public:
  Lowering(Shared& shared, Phase phase);
  // Throws Unsupported when a node has no kernel.
  Program run();

  const Graph& graph() const { return shared_.graph; }
  Phase phase() const { return phase_; }
  WeightStore& weights() { return *shared_.weights; }
  const Target& target() const { return shared_.target; }
  bool on_cpu() const { return shared_.target.device.kind == DeviceKind::cpu; }
  DType kv_dtype() const { return *shared_.options.kv_dtype; }

  // These tell where a value lies.
  Floats floats(ValueId id) const;
  OperandPlace operand(ValueId id) const;
  Ids ids(ValueId id) const;
  const Dim& rows(ValueId id) const { return graph().value(id).shape[0]; }
  int64_t cols(ValueId id) const { return graph().value(id).shape[1].value; }
  int64_t max_rows(ValueId id) const;

  // The plan slot of an attention shape, which a layer has: layers with tables of their own have
  // other slots.
  size_t attention_slot(const ops::AttentionShape& shape, size_t layer);
  // Whose attention visits the lists, of an attention or an index: the latter's handle says it.
  size_t visited_layer(const Node& node) const;
  // The lists that the indices of a node's layer write.
  ops::VisitShape visit_shape(const Node& node) const;
  // The slot of the lists that an index writes or an attention reads.
  size_t visit_slot(const Node& node);
  // The number of a plane's name among Shared::weight_names.
  size_t weight_slot(std::string_view plane);
  // Made once for all layers that hash alike.
  const executor::HashConstants& hash_constants(const ops::HashShape& shape, int32_t head_dim,
                                                int64_t seed);
  // Whether attention keeps the weights that attention_mass nodes sum up, where a step lets it.
  bool keeps_weights() const { return program_.kept_heads > 0; }
  int32_t max_seq_len() const { return shared_.options.max_seq_len; }
  // The values on the device, for as long as the executable lives.
  template <class T>
  const T* constant(const std::vector<T>& values) {
    const size_t bytes = values.size() * sizeof(T);
    std::shared_ptr<void> memory = shared_.memory->allocate(bytes, Pages::heap);
    if (!memory) throw std::bad_alloc();
    shared_.memory->copy(memory.get(), values.data(), bytes);
    shared_.constants.push_back(memory);
    return static_cast<const T*>(memory.get());
  }
  // The node at hand computes the logits and can keep the highest of them.
  void offer_top(int64_t vocab_size) {
    shared_.max_top = static_cast<int32_t>(std::min<int64_t>(vocab_size, ops::kMaxTop));
  }

  // Selects the variant and appends the call. The problem has the largest step's sizes here; the
  // places have what a step changes.
  template <class Problem, class Places>
  void add(const Node& node, const Problem& problem, const Places& places) {
    const ops::Variant<Problem>& variant = ops::table<Problem>().select(problem, shared_.target);
    if (variant.scratch_bytes != nullptr) reserve(variant.scratch_bytes(problem));
    program_.calls.push_back(
        std::make_unique<executor::KernelCall<Problem, Places>>(variant, problem, places));
    program_.calls.back()->every_member = is_own(node);
    program_.infos.push_back({label(node), variant.name, what(node, variant.name),
                              describe(problem), std::string(name(product_arithmetic(problem))),
                              variant.isa});
  }
  // Of the last call: in a small step members go on without waiting for each other.
  void leave_barrier_out() { program_.calls.back()->every_member = true; }

 private:
  void reserve(size_t bytes) { shared_.scratch_bytes = std::max(shared_.scratch_bytes, bytes); }
  std::string label(const Node& node) const;
  // Whether two layers have one page table.
  bool one_group(size_t layer, size_t other) const;
  std::string what(const Node& node, std::string_view kernel) const;

  struct Place {
    int64_t offset = -1;
    int64_t own = -1;
    ops::Arithmetic arithmetic = ops::Arithmetic::f32;  // of an operand
  };
  Shared& shared_;
  const Phase phase_;
  std::vector<Place> places_;
  Program program_;
};

// Whether a node writes lists of generated rows, or gives its layer those of an earlier one; of
// blocks of a prompt's; strided_index does both.
inline bool chooses_rows(const Node& node) {
  return node.op == "page_index" || node.op == "key_index" || node.op == "hash_index" ||
         node.op == "strided_index" || node.op == "history_index" || node.op == "copy_index";
}
inline bool chooses_blocks(const Node& node) {
  return node.op == "column_index" || node.op == "block_index" || node.op == "bucket_index" ||
         node.op == "strided_index";
}
// Whether it says how often the keys of its lists count.
inline bool weighs_keys(const Node& node) {
  return node.op == "hash_index" || node.op == "bucket_index";
}
// What the indices of generated rows want a cache to keep (KvCacheConfig::index_unit). Throws
// InvalidArgument when one wants another thing than the others.
void index_keys(const Graph& graph, KvCacheConfig& cache);

// The operators that have a rule.
std::vector<std::string_view> lowered_ops();

// The rules, by operator.
void lower_embedding(Lowering& lowering, const Node& node);
void lower_rms_norm(Lowering& lowering, const Node& node);
void lower_add_rms_norm(Lowering& lowering, const Node& node);
void lower_unary(Lowering& lowering, const Node& node);
void lower_binary(Lowering& lowering, const Node& node);
void lower_select_rows(Lowering& lowering, const Node& node);
void lower_rope_table(Lowering& lowering, const Node& node);
void lower_rope(Lowering& lowering, const Node& node);
void lower_kv_append(Lowering& lowering, const Node& node);
void lower_rope_append(Lowering& lowering, const Node& node);
void lower_attention(Lowering& lowering, const Node& node);
void lower_column_index(Lowering& lowering, const Node& node);
void lower_block_index(Lowering& lowering, const Node& node);
void lower_bucket_index(Lowering& lowering, const Node& node);
void lower_page_index(Lowering& lowering, const Node& node);
void lower_key_index(Lowering& lowering, const Node& node);
void lower_hash_index(Lowering& lowering, const Node& node);
void lower_strided_index(Lowering& lowering, const Node& node);
void lower_history_index(Lowering& lowering, const Node& node);
void lower_copy_index(Lowering& lowering, const Node& node);
void lower_attention_mass(Lowering& lowering, const Node& node);
// The call behind an attention that keeps its weights.
void lower_kept_mass(Lowering& lowering, const Node& node);
void lower_to_operand(Lowering& lowering, const Node& node);
void lower_matmul(Lowering& lowering, const Node& node);

}  // namespace effinfer::compiler
