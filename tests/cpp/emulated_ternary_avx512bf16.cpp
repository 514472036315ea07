#include "cpu/vectors/matmul_ternary_amx.h"
#include "emulated_amx.h"
#include "emulated_tiles.h"

namespace emulated {

using namespace effinfer::cpu;
using namespace effinfer::cpu::EFFINFER_LEVEL;

void matmul_ternary(const effinfer::ops::MatmulProblem& problem, effinfer::Team& team) {
  TernaryAmx<EmulatedTiles>::run(problem, team);
}

}  // namespace emulated
