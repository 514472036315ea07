#include "cpu/elementwise.h"
#include "cpu/register.h"

namespace effinfer::cpu {
namespace {

using namespace ops;

const char* rejects_embedding(const EmbeddingProblem& p) {
  const DTypeInfo& info = dtype_info(p.dtype);
  const bool weight =
      info.quantized || p.dtype == DType::f32 || p.dtype == DType::f16 || p.dtype == DType::bf16;
  if (!weight) return "the table must be f32, f16, bf16 or quantised";
  return p.cols % info.block_size == 0 ? nullptr : "cols must be a whole number of blocks";
}

bool is_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

constexpr const char* kRowTypes = "rows must be f32, f16 or bf16, weights f32 or of the same type";

bool has_row_types(DType rows, DType weights) {
  return is_float(rows) && (weights == DType::f32 || weights == rows);
}

const char* rejects_rms_norm(const RmsNormProblem& p) {
  if (p.cols < 1 || p.groups < 1) return "cols and groups must be positive";
  if (!has_row_types(p.dtype, p.weight_dtype)) return kRowTypes;
  return p.out_operand.cols > 0 && p.groups > 1 ? "a matmul operand has one group" : nullptr;
}

// A row on its way into a matmul operand.
size_t rms_norm_scratch(const RmsNormProblem& p) {
  return p.groups == 1 ? static_cast<size_t>(p.cols) * sizeof(float) : 0;
}

const char* rejects_layer_norm(const LayerNormProblem& p) {
  if (p.cols < 1 || p.groups < 1) return "cols and groups must be positive";
  return has_row_types(p.dtype, p.weight_dtype) ? nullptr : kRowTypes;
}

const char* rejects_gated(const GatedProblem& p) {
  return is_float(p.dtype) ? nullptr : "rows must be f32, f16 or bf16";
}

const char* rejects_rope_table(const RopeTableProblem& p) {
  return p.dims % 2 == 0 ? nullptr : "dims must be even";
}

const char* rejects_rope(const RopeProblem& p) {
  if (!is_float(p.dtype)) return "rows must be f32, f16 or bf16";
  if (p.dims % 2 != 0) return "dims must be even";
  return p.dims <= p.head_dim ? nullptr : "dims must be at most head_dim";
}

template <class Problem>
const char* accepts(const Problem&) {
  return nullptr;
}

// Names are literals: variants are compared and printed long after registration.
struct Names {
  const char* rms_norm;
  const char* layer_norm;
  const char* gated;
  const char* unary;
  const char* binary;
  const char* rope;
};

void add_level(Isa isa, const Names& names, const ElementwiseKernels& level) {
  mutable_table<RmsNormProblem>().add(
      {names.rms_norm, isa, rejects_rms_norm, level.rms_norm, rms_norm_scratch});
  mutable_table<LayerNormProblem>().add(
      {names.layer_norm, isa, rejects_layer_norm, level.layer_norm});
  mutable_table<GatedProblem>().add({names.gated, isa, rejects_gated, level.gated});
  mutable_table<UnaryProblem>().add({names.unary, isa, accepts, level.unary});
  mutable_table<BinaryProblem>().add({names.binary, isa, accepts, level.binary});
  mutable_table<RopeProblem>().add({names.rope, isa, rejects_rope, level.rope});
}

}  // namespace

void register_elementwise() {
  constexpr Isa kPortable = Isa::portable;
  mutable_table<EmbeddingProblem>().add(
      {"embedding.portable", kPortable, rejects_embedding, embedding});
  mutable_table<SelectRowsProblem>().add({"select_rows.portable", kPortable, accepts, select_rows});
  mutable_table<RopeTableProblem>().add(
      {"rope_table.portable", kPortable, rejects_rope_table, rope_table});
  add_level(kPortable,
            {"rms_norm.portable", "layer_norm.portable", "gated.portable", "unary.portable",
             "binary.portable", "rope.portable"},
            portable::kElementwise);
#if EFFINFER_X86
  add_level(
      Isa::avx2,
      {"rms_norm.avx2", "layer_norm.avx2", "gated.avx2", "unary.avx2", "binary.avx2", "rope.avx2"},
      avx2::kElementwise);
  add_level(Isa::avx512,
            {"rms_norm.avx512", "layer_norm.avx512", "gated.avx512", "unary.avx512",
             "binary.avx512", "rope.avx512"},
            avx512::kElementwise);
#endif
}

}  // namespace effinfer::cpu
