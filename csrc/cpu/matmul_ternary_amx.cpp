#include "cpu/vectors/matmul_ternary_amx.h"

#include "cpu/matmul.h"

namespace effinfer::cpu::amx {

void matmul_ternary(const ops::MatmulProblem& problem, Team& team) {
  TernaryAmx<NativeTiles>::run(problem, team);
}

}  // namespace effinfer::cpu::amx
