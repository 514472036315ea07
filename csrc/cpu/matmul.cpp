#include "cpu/matmul.h"

#include "cpu/quantised_formats.h"
#include "cpu/register.h"
#include "cpu/ternary_lines.h"
#include "ops/registry.h"

namespace effinfer::cpu {
namespace {

using ops::Arithmetic;
using ops::MatmulProblem;
using ops::ScaleKind;

// What every variant needs.
const char* rejects_shape(const MatmulProblem& problem) {
  if (problem.num_parts < 1 || problem.num_parts > ops::kMaxMatmulParts) {
    return "needs one to four weights";
  }
  for (int i = 0; i < problem.num_parts; ++i) {
    if (problem.parts[i].weight.cols != problem.x.cols) {
      return "the weights and the operand have different inner sizes";
    }
  }
  if (problem.glu != ops::UnaryOp::none &&
      (problem.num_parts != 2 || problem.parts[0].weight.rows != problem.parts[1].weight.rows)) {
    return "GLU needs two weights of equal size";
  }
  if (problem.glu != ops::UnaryOp::none && !is_activation(problem.glu)) {
    return "the gate of a GLU is an activation";
  }
  if (problem.out_operand.data != nullptr && problem.glu == ops::UnaryOp::none &&
      problem.num_parts != 1) {
    return "an operand as output needs one result";
  }
  if (problem.out_operand.data != nullptr &&
      problem.out_operand.arithmetic == Arithmetic::int8_token) {
    return "an int8_token operand is written by whole rows";
  }
  return nullptr;
}

const char* rejects_ternary(const MatmulProblem& problem) {
  if (problem.x.arithmetic != Arithmetic::int8_token) return "needs an int8_token operand";
  if (problem.x.cols > kMaxTernaryCols) return "sums of so many columns need more than 32 bits";
  for (int i = 0; i < problem.num_parts; ++i) {
    if (!is_ternary(problem.parts[i].weight.format)) return "needs weights packed as t2 or t1_6";
  }
  return rejects_shape(problem);
}

// The formats of int8_token operands have no other kernels.
const char* rejects_panels(const MatmulProblem& problem) {
  for (int i = 0; i < problem.num_parts; ++i) {
    if (is_ternary(problem.parts[i].weight.format)) return "needs weights that are not ternary";
  }
  return rejects_shape(problem);
}

const char* rejects_int8(const MatmulProblem& problem) {
  if (problem.x.arithmetic != Arithmetic::int8) return "needs an int8 operand";
  for (int i = 0; i < problem.num_parts; ++i) {
    const ops::PackedFormat& format = problem.parts[i].weight.format;
    if (format.scales == ScaleKind::dense) return "dense weights need f32 or bf16 operands";
    if (!is_quantised_format(format)) return "has no kernel for this weight format";
  }
  return rejects_shape(problem);
}

const char* rejects_f32(const MatmulProblem& problem) {
  if (problem.x.arithmetic != Arithmetic::f32) return "needs an f32 operand";
  return rejects_panels(problem);
}

const char* rejects_bf16(const MatmulProblem& problem) {
  if (problem.x.arithmetic != Arithmetic::bf16) return "needs a bf16 operand";
  if (!cpu_features().avx512_bf16) return "needs AVX512-BF16";
  return rejects_panels(problem);
}

template <class Kernel, Level... kLevels>
void add(const std::string& kind, const char* (*rejects)(const MatmulProblem&)) {
  for_levels<kLevels...>([&]<Level kLevel>() {
    const Kernel& kernel = kernels<kLevel, Kernel>();
    const Isa isa = isa_of(kLevel);
    ops::mutable_table<MatmulProblem>().add({"matmul." + std::string(name(isa)) + "." + kind, isa,
                                             rejects, kernel.run, kernel.scratch_bytes});
  });
}

}  // namespace

void register_matmul() {
  using enum Level;
  // Of two variants of a level that take a problem, the later one is chosen.
  add<LookupKernel, avx2, avx512>("lookup", rejects_ternary);
  add<TernaryKernel, portable, avx2, avx512, amx>("ternary", rejects_ternary);
  add<Int8Kernel, portable, avx2, avx512>("int8", rejects_int8);
  add<PanelKernel, portable, avx2, avx512>("f32", rejects_f32);
  add<PanelKernel, avx512bf16, amx>("bf16", rejects_bf16);
}

}  // namespace effinfer::cpu
