// Levels: portable avx2 avx512 avx512bf16 amx
//
// Matmul of f32 and bf16 operands, by panels (cpu/vectors/panel_matmul.h).
#include "cpu/level.h"
#include "cpu/matmul.h"
#if EFFINFER_LEVEL_AMX
#include "cpu/vectors/matmul_amx.h"
#else
#include "cpu/vectors/panel.h"
#include "cpu/vectors/panel_matmul.h"
#endif

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

#if EFFINFER_LEVEL_AMX
using Matmul = AmxMatmul<NativeTiles>;
#else
using Matmul = PanelMatmul<Panel>;
#endif

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
const PanelKernel& kernels<Level::EFFINFER_LEVEL>() {
  using EFFINFER_LEVEL::Matmul;
  static constexpr PanelKernel kKernel = {Matmul::run, Matmul::scratch_bytes};
  return kKernel;
}

}  // namespace effinfer::cpu
