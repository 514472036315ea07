#include "cpu/vectors/matmul_ternary_avx512.h"

#include "cpu/matmul.h"

namespace effinfer::cpu::avx512 {

void matmul_ternary(const ops::MatmulProblem& problem, Team& team) {
  TernaryAvx512 level;
  TernaryMatmul<TernaryAvx512>::run(problem, team, level);
}

}  // namespace effinfer::cpu::avx512
