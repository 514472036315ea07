// Levels: portable avx2 avx512 amx
#include "cpu/level.h"
#include "cpu/matmul.h"
#if EFFINFER_LEVEL_AMX
#include "cpu/vectors/matmul_ternary_amx.h"
#else
#include "cpu/vectors/matmul_ternary.h"
#include "cpu/vectors/ternary_dot.h"
#endif

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

void matmul_ternary(const ops::MatmulProblem& problem, Team& team) {
#if EFFINFER_LEVEL_AMX
  TernaryAmx<NativeTiles>::run(problem, team);
#else
  TernaryDot dot;
  TernaryMatmul<TernaryDot>::run(problem, team, dot);
#endif
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
const TernaryKernel& kernels<Level::EFFINFER_LEVEL>() {
  static constexpr TernaryKernel kKernel = {EFFINFER_LEVEL::matmul_ternary};
  return kKernel;
}

}  // namespace effinfer::cpu
