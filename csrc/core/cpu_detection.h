// From what a processor and its system say of themselves to the level of kernels that may run.
#pragma once

#include <cstdint>
#include <string_view>

#include "effinfer/device.h"

namespace effinfer::core {

struct CpuidRegisters {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// What detection asks.
struct Processor {
  CpuidRegisters (*cpuid)(uint32_t leaf, uint32_t subleaf);
  uint64_t (*enabled_states)();  // XCR0: the register states that the system saves
  // Linux gives tile data only to processes that ask for it; whether it did.
  bool (*request_tiles)();
};

// All but the model's name, its signature and what follows from that. `amx` is the best level only
// where tiles were asked for and granted, so that whoever knows the features of this CPU may run
// kernels of their level.
CpuFeatures detect_features(const Processor& processor);

// CpuFeatures::fast_bf16 of a CPU that has VDPBF16PS, by its signature.
bool has_fast_bf16(std::string_view signature);

}  // namespace effinfer::core
