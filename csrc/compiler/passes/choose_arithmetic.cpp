// Chooses the arithmetic of every matmul operand, by phase, and writes it on the node that makes
// the operand: {decode = "int8", prefill = "bf16"}. The variants of kernels follow from it.
//
//   decode    int8 when every weight that reads the operand is quantised, else f32
//   prefill   bf16 where that pays on the target and no weight is float32, else f32; int8 in their
//             place when every weight that reads the operand is quantised, the results go into the
//             residual stream or a GLU, and the target multiplies many rows faster so: in place of
//             f32 always, in place of bf16 where products are large. What attention compares and
//             the logits err most by it, and are a tenth of the work. With `deterministic` the
//             arithmetic of decode. Rounding weights to bf16 errs as much as rounding their inputs,
//             which bf16 means in any case.
//
// The operand of a ternary_linear keeps the "int8_token" that canonicalize wrote.
//
// On CUDA both phases have bf16 where no weight is float32. In decode weights are exact: tensor
// cores multiply small integers and bfloat16 without an error, and scales are applied to float32
// sums. In prefill they are rounded with their scales ({prefill_weights = "bf16"}), as CPUs do,
// unless `deterministic` asks for one arithmetic.
//
// Precision::f32 is f32 throughout. One operand has one arithmetic, so its readers decide together.
//
// The products inside attention are f32 in decode; in prefill they are bf16 where that pays on the
// target and the KV pages are bf16 ({prefill_products = "bf16"}), and f32 otherwise. Those of an
// index are chosen alike, for themselves: it may have no tiles where attention has. Hopper
// sums them in an order of prefill's own ({prefill_sums = "own"}), unless `deterministic` or f32
// puts both phases into one step.
#include <algorithm>
#include <set>
#include <vector>

#include "compiler/arithmetic.h"
#include "compiler/passes.h"
#include "compiler/rewriter.h"
#include "effinfer/device.h"
#include "effinfer/error.h"
#include "graph/op_specs.h"

namespace effinfer::compiler {
namespace {

// The compute capability that has wgmma, and no other one.
constexpr int32_t kWgmmaArch = 90;

struct Choice {
  const char* decode = "f32";
  const char* prefill = "f32";
};

bool is_operand(const Rewriter& rewriter, ValueId value) {
  return rewriter.graph().value(value).dtype == DType::act;
}

// Whether a value becomes queries, keys, values or the graph's result before it is the operand of
// another matmul. `alone`: it is a product and nothing else, as logits are. A sum that a graph
// returns is the residual stream, whoever wants it: the front of a model, or a head that drafts,
// which must not change what others get.
bool steers(const Rewriter& rewriter, ValueId value, bool alone, std::set<ValueId>& seen) {
  if (alone && value == rewriter.graph().outputs.front()) return true;
  if (!seen.insert(value).second || is_operand(rewriter, value)) return false;
  for (const int user : rewriter.users(value)) {
    const Node& node = rewriter.node(user);
    if (node.op == "attention" || node.op == "rope_append" || node.op == "kv_append") return true;
    const auto operand = [&](ValueId input) { return is_operand(rewriter, input); };
    if (std::any_of(node.inputs.begin(), node.inputs.end(), operand)) continue;  // a residual
    for (const ValueId output : node.outputs) {
      if (steers(rewriter, output, alone && node.inputs.size() == 1, seen)) return true;
    }
  }
  return false;
}

bool results_steer(const Rewriter& rewriter, ValueId operand) {
  std::set<ValueId> seen;
  for (const int user : rewriter.users(operand)) {
    const Node& node = rewriter.node(user);
    const bool alone = !node.has("residual") || node.get_ints("residual").empty();
    for (const ValueId output : node.outputs) {
      if (steers(rewriter, output, alone, seen)) return true;
    }
  }
  return false;
}

// Weights of a product from which integers are a third faster than bfloat16 on Zen 5 (8B shapes);
// with a million of them, 4 %, for five times the error.
constexpr int64_t kLargeProduct = int64_t{1} << 23;

Choice choose(const Rewriter& rewriter, ValueId operand, const CompileOptions& options) {
  if (options.precision == Precision::f32) return {};
  bool quantized = true;
  bool narrow = true;
  bool large = true;
  for (const int user : rewriter.users(operand)) {
    const Node& node = rewriter.node(user);
    const graph::MatmulInputs inputs = graph::matmul_inputs(node);
    int64_t weights = 0;
    for (size_t part = 0; part < inputs.parts; ++part) {
      const Value& weight = rewriter.graph().value(node.inputs[inputs.weight(part)]);
      quantized = quantized && dtype_info(weight.dtype).quantized;
      narrow = narrow && weight.dtype != DType::f32;
      weights += weight.shape[0].value * weight.shape[1].value;
    }
    large = large && weights >= kLargeProduct;
  }
  Choice choice;
  const Target target = current_target(options.device);
  if (target.device.kind == DeviceKind::cuda) {
    if (narrow) choice.decode = choice.prefill = "bf16";
    return choice;
  }
  if (quantized) choice.decode = "int8";
  const bool bf16 = narrow && bf16_panels(target);
  if (bf16) choice.prefill = "bf16";
  if (quantized && integers_for_many_rows(target) && (large || !bf16) &&
      !results_steer(rewriter, operand)) {
    choice.prefill = "int8";
  }
  if (options.deterministic) choice.prefill = choice.decode;
  return choice;
}

}  // namespace

void choose_arithmetic(Graph& graph, const CompileOptions& options) {
  Rewriter rewriter(graph);
  const Target target = current_target(options.device);
  const bool bf16_pages = options.device.kind == DeviceKind::cpu &&
                          options.precision == Precision::fast && !options.deterministic &&
                          options.kv_dtype.value_or(DType::bf16) == DType::bf16;
  const bool rounds_weights = options.device.kind == DeviceKind::cuda && !options.deterministic;
  const bool own_sums =
      rounds_weights && options.precision == Precision::fast && target.arch == kWgmmaArch;
  for (int index = 0; index < rewriter.size(); ++index) {
    if (own_sums && rewriter.is(index, "attention")) {
      rewriter.set_attribute(index, graph::kPrefillSumsKey, std::string("own"));
    }
    const bool scores = rewriter.is(index, "attention") || rewriter.is(index, "column_index") ||
                        rewriter.is(index, "block_index") || rewriter.is(index, "attention_mass");
    if (bf16_pages && scores && bf16_attention(rewriter.node(index), target)) {
      rewriter.set_attribute(index, graph::kPrefillProductsKey, std::string("bf16"));
    }
    for (const ValueId id : rewriter.node(index).outputs) {
      if (graph.value(id).dtype != DType::act || graph::is_ternary_operand(rewriter.node(index)))
        continue;
      const Choice choice = choose(rewriter, id, options);
      rewriter.set_attribute(index, graph::kDecodeKey, std::string(choice.decode));
      rewriter.set_attribute(index, graph::kPrefillKey, std::string(choice.prefill));
      if (!rounds_weights || std::string_view(choice.prefill) != "bf16") continue;
      for (const int user : rewriter.users(id)) {
        rewriter.set_attribute(user, graph::kPrefillWeightsKey, std::string("bf16"));
      }
    }
  }
}

}  // namespace effinfer::compiler
