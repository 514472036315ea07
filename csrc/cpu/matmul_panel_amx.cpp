// Bfloat16 matmul on the tiles of AMX.
#include "cpu/matmul.h"
#include "cpu/vectors/matmul_amx_body.h"

namespace effinfer::cpu::amx {

void matmul_bf16(const ops::MatmulProblem& problem, Team& team) {
  AmxMatmul<NativeTiles>::run(problem, team);
}

}  // namespace effinfer::cpu::amx
