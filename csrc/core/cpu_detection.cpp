#include "core/cpu_detection.h"

namespace effinfer::core {
namespace {

bool bit(uint32_t word, int index) {
  return (word >> index & 1u) != 0;
}

}  // namespace

CpuFeatures detect_features(const Processor& processor) {
  CpuFeatures features;
  const CpuidRegisters leaf1 = processor.cpuid(1, 0);
  const CpuidRegisters leaf7 = processor.cpuid(7, 0);
  const bool osxsave = bit(leaf1.ecx, 27);
  const uint64_t states = osxsave ? processor.enabled_states() : 0;
  const bool ymm = (states & 0x6) == 0x6;
  const bool zmm = (states & 0xe6) == 0xe6;
  const bool tiles = (states & 0x60000) == 0x60000;

  const bool fma = bit(leaf1.ecx, 12), f16c = bit(leaf1.ecx, 29);
  const bool avx2 = bit(leaf7.ebx, 5), bmi2 = bit(leaf7.ebx, 8);
  if (!(ymm && avx2 && fma && f16c && bmi2)) return features;
  features.best = Isa::avx2;

  const bool avx512 = bit(leaf7.ebx, 16) && bit(leaf7.ebx, 17) && bit(leaf7.ebx, 30) &&
                      bit(leaf7.ebx, 31);  // F, DQ, BW, VL
  const bool vnni = bit(leaf7.ecx, 11);
  if (!(zmm && avx512 && vnni)) return features;
  features.best = Isa::avx512;
  features.avx512_bf16 = bit(processor.cpuid(7, 1).eax, 5);

  const bool amx = bit(leaf7.edx, 24) && bit(leaf7.edx, 25) && bit(leaf7.edx, 22);
  if (tiles && amx && features.avx512_bf16 && processor.request_tiles()) features.best = Isa::amx;
  return features;
}

// 512-bit instructions a cycle, FMA (16 products) and VDPBF16PS (32). AMD: one and one on Zen 4,
// two and two on Zen 5, so pairs are twice as fast. Intel: 1.95 and 0.49 measured on Sapphire
// Rapids, half as fast, and its later cores are of that kind; Cooper Lake had one VDPBF16PS at best
// beside two FMA, no gain. Of others nothing is known: float32 is never the less exact choice.
bool has_fast_bf16(std::string_view signature) {
  return signature.starts_with("AuthenticAMD-");
}

}  // namespace effinfer::core
