// Chooses the arithmetic of every matmul operand, by phase, and writes it on the node that makes
// the operand: {decode = "int8", prefill = "bf16"}. The variants of kernels follow from it.
//
//   decode    int8 when every weight that reads the operand is quantised, else f32
//   prefill   bf16 where that pays on the target and no weight is float32, else f32; with
//             `deterministic` the arithmetic of decode. Rounding weights to bf16 errs as much as
//             rounding their inputs, which bf16 means in any case.
//
// The operand of a ternary_linear keeps the "int8_token" that canonicalize wrote.
//
// Precision::f32 is f32 throughout. One operand has one arithmetic, so its readers decide together.
//
// The products inside attention are f32 in decode; in prefill they are bf16 where that pays on the
// target and the KV pages are bf16 ({prefill_products = "bf16"}), and f32 otherwise. Those of an
// index are chosen alike, for themselves: it may have no tiles where attention has.
#include "compiler/arithmetic.h"
#include "compiler/passes.h"
#include "compiler/rewriter.h"
#include "effinfer/device.h"
#include "effinfer/error.h"
#include "graph/op_specs.h"

namespace effinfer::compiler {
namespace {

struct Choice {
  const char* decode = "f32";
  const char* prefill = "f32";
};

Choice choose(const Rewriter& rewriter, ValueId operand, const CompileOptions& options) {
  if (options.precision == Precision::f32) return {};
  bool quantized = true;
  bool narrow = true;
  for (const int user : rewriter.users(operand)) {
    const Node& node = rewriter.node(user);
    const graph::MatmulInputs inputs = graph::matmul_inputs(node);
    for (size_t part = 0; part < inputs.parts; ++part) {
      const DType dtype = rewriter.graph().value(node.inputs[inputs.weight(part)]).dtype;
      quantized = quantized && dtype_info(dtype).quantized;
      narrow = narrow && dtype != DType::f32;
    }
  }
  Choice choice;
  if (quantized) choice.decode = "int8";
  if (narrow && bf16_panels(current_target(options.device))) choice.prefill = "bf16";
  if (options.deterministic) choice.prefill = choice.decode;
  return choice;
}

}  // namespace

void choose_arithmetic(Graph& graph, const CompileOptions& options) {
  Rewriter rewriter(graph);
  const Target target = current_target(options.device);
  const bool bf16_pages = options.precision == Precision::fast && !options.deterministic &&
                          options.kv_dtype.value_or(DType::bf16) == DType::bf16;
  for (int index = 0; index < rewriter.size(); ++index) {
    const bool scores = rewriter.is(index, "attention") || rewriter.is(index, "column_index") ||
                        rewriter.is(index, "block_index");
    if (bf16_pages && scores && bf16_attention(rewriter.node(index), target)) {
      rewriter.set_attribute(index, graph::kPrefillProductsKey, std::string("bf16"));
    }
    for (const ValueId id : rewriter.node(index).outputs) {
      if (graph.value(id).dtype != DType::act || graph::is_ternary_operand(rewriter.node(index)))
        continue;
      const Choice choice = choose(rewriter, id, options);
      rewriter.set_attribute(index, graph::kDecodeKey, std::string(choice.decode));
      rewriter.set_attribute(index, graph::kPrefillKey, std::string(choice.prefill));
    }
  }
}

}  // namespace effinfer::compiler
