#include "cpu/matmul.h"
#include "cpu/matmul_amx.h"
#include "cpu/matmul_int8.h"
#include "cpu/matmul_panel.h"
#include "cpu/matmul_ternary.h"
#include "cpu/register.h"
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
  if (problem.glu != ops::Glu::none &&
      (problem.num_parts != 2 || problem.parts[0].weight.rows != problem.parts[1].weight.rows)) {
    return "GLU needs two weights of equal size";
  }
  if (problem.out_operand.data != nullptr && problem.glu == ops::Glu::none &&
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

#if EFFINFER_X86
const char* rejects_bf16(const MatmulProblem& problem) {
  if (problem.x.arithmetic != Arithmetic::bf16) return "needs a bf16 operand";
  if (!cpu_features().avx512_bf16) return "needs AVX512-BF16";
  return rejects_panels(problem);
}
#endif

}  // namespace

void register_matmul() {
  auto& table = ops::mutable_table<MatmulProblem>();
  table.add({"matmul.portable.int8", Isa::portable, rejects_int8, portable::matmul_int8});
  table.add({"matmul.portable.ternary", Isa::portable, rejects_ternary, portable::matmul_ternary});
  table.add({"matmul.portable.f32", Isa::portable, rejects_f32, portable::matmul_f32,
             panel_scratch_bytes});
#if EFFINFER_X86
  table.add({"matmul.avx2.int8", Isa::avx2, rejects_int8, avx2::matmul_int8});
  table.add({"matmul.avx2.lookup", Isa::avx2, rejects_ternary, avx2::matmul_lookup,
             avx2::lookup_scratch_bytes});
  table.add({"matmul.avx2.ternary", Isa::avx2, rejects_ternary, avx2::matmul_ternary});
  table.add({"matmul.avx2.f32", Isa::avx2, rejects_f32, avx2::matmul_f32, panel_scratch_bytes});
  table.add({"matmul.avx512.lookup", Isa::avx512, rejects_ternary, avx512::matmul_lookup,
             avx512::lookup_scratch_bytes});
  table.add({"matmul.avx512.ternary", Isa::avx512, rejects_ternary, avx512::matmul_ternary});
  table.add({"matmul.avx512.int8", Isa::avx512, rejects_int8, avx512::matmul_int8});
  table.add(
      {"matmul.avx512.f32", Isa::avx512, rejects_f32, avx512::matmul_f32, panel_scratch_bytes});
  table.add({"matmul.avx512.bf16", Isa::avx512, rejects_bf16, avx512bf16::matmul_bf16,
             panel_scratch_bytes});
#endif
#if EFFINFER_AMX
  table.add({"matmul.amx.ternary", Isa::amx, rejects_ternary, amx::matmul_ternary});
  table.add({"matmul.amx.bf16", Isa::amx, rejects_bf16, amx::matmul_bf16, amx_scratch_bytes});
#endif
}

}  // namespace effinfer::cpu
