#include "cpu/register.h"
#include "cpu/row_math.h"
#include "ops/registry.h"
#include "ops/row_sampling.h"

namespace effinfer {
namespace {

using namespace ops;

bool is_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

const char* rejects_rows(const RowSamplingProblem& p) {
  return is_float(p.dtype) && is_float(p.out_dtype) ? nullptr : "rows must be f32, f16 or bf16";
}
const char* rejects_mask(const TokenBitmaskProblem& p) {
  return is_float(p.dtype) ? nullptr : "rows must be f32, f16 or bf16";
}
const char* accepts(const ChainSpeculationProblem&) {
  return nullptr;
}

// And a row of results before they are narrowed.
size_t rows_scratch(const RowSamplingProblem& p) {
  return RowDistribution::scratch_bytes(p.vocab) + static_cast<size_t>(p.vocab) * sizeof(float);
}
size_t speculation_scratch(const ChainSpeculationProblem& p) {
  return RowDistribution::scratch_bytes(p.vocab);
}

template <const RowMath& math, class Problem>
void run_with(const Problem& problem, Team& team) {
  ops::run(problem, team, math);
}

struct Names {
  const char* rows;
  const char* speculation;
  const char* mask;
};

template <const RowMath& math>
void add_level(Isa isa, const Names& names) {
  mutable_table<RowSamplingProblem>().add(
      {names.rows, isa, rejects_rows, run_with<math, RowSamplingProblem>, rows_scratch});
  mutable_table<ChainSpeculationProblem>().add({names.speculation, isa, accepts,
                                                run_with<math, ChainSpeculationProblem>,
                                                speculation_scratch});
  mutable_table<TokenBitmaskProblem>().add(
      {names.mask, isa, rejects_mask, run_with<math, TokenBitmaskProblem>});
}

}  // namespace

const RowMath& ops::row_math(Isa isa) {
#if EFFINFER_X86
  if (isa >= Isa::avx512) return cpu::avx512::kRowMath;
  if (isa >= Isa::avx2) return cpu::avx2::kRowMath;
#endif
  static_cast<void>(isa);
  return cpu::portable::kRowMath;
}

void cpu::register_row_math() {
  add_level<portable::kRowMath>(
      Isa::portable,
      {"row_sampling.portable", "chain_speculation.portable", "token_bitmask.portable"});
#if EFFINFER_X86
  add_level<avx2::kRowMath>(Isa::avx2,
                            {"row_sampling.avx2", "chain_speculation.avx2", "token_bitmask.avx2"});
  add_level<avx512::kRowMath>(
      Isa::avx512, {"row_sampling.avx512", "chain_speculation.avx512", "token_bitmask.avx512"});
#endif
}

}  // namespace effinfer
