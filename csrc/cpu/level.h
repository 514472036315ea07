// Kernels that are compiled once for each instruction-set level.
//
// cpu/<op>.simd.cpp is one source of several objects. CMake compiles it for the levels that its
// line "// Levels: ..." names (portable, avx2 and avx512 without such a line), each with the flags
// of the level and with EFFINFER_LEVEL defined as its name, and EFFINFER_LEVEL_AVX2 (...) as 1:
//
//   #include "cpu/vectors/float_vector.h"        // F32x16 of the level
//
//   namespace effinfer::cpu::EFFINFER_LEVEL {
//   namespace {
//   void negate(const ops::NegateProblem& p, Team& team) { ... }
//   }  // namespace
//   }  // namespace effinfer::cpu::EFFINFER_LEVEL
//
//   namespace effinfer::cpu {
//   template <>
//   void run<Level::EFFINFER_LEVEL>(const ops::NegateProblem& p, Team& team) {
//     EFFINFER_LEVEL::negate(p, team);
//   }
//   }  // namespace effinfer::cpu
//
// All but the specialisations has internal linkage: of a weak symbol the linker could keep the copy
// of a level that the processor lacks (tools/check_isa_symbols.py looks for them).
#pragma once

#include <string>
#include <string_view>

#include "effinfer/device.h"
#include "effinfer/threads.h"

namespace effinfer::cpu {

// A level has the instructions of those before it.
enum class Level : int { portable, avx2, avx512, avx512bf16, amx };

// A whole kernel: a team member's share of the problem.
template <Level kLevel, class Problem>
void run(const Problem& problem, Team& team);

// The functions of a level that a driver calls, where the driver itself is compiled once.
template <Level kLevel, class Kernels>
const Kernels& kernels();

// Levels without vector types of their own use those of the level below.
namespace avx512 {}
namespace avx512bf16 {
using namespace avx512;
}
namespace amx {
using namespace avx512bf16;
}

// The highest level that this build has.
#if EFFINFER_AMX
inline constexpr Level kHighestLevel = Level::amx;
#elif EFFINFER_X86
inline constexpr Level kHighestLevel = Level::avx512bf16;
#else
inline constexpr Level kHighestLevel = Level::portable;
#endif

// What a processor must have. Variants of avx512bf16 reject a problem where it lacks that part of
// avx512 (cpu_features()).
constexpr Isa isa_of(Level level) {
  if (level == Level::amx) return Isa::amx;
  if (level == Level::avx512bf16) return Isa::avx512;
  return static_cast<Isa>(level);
}

constexpr std::string_view name(Level level) {
  constexpr std::string_view kNames[] = {"portable", "avx2", "avx512", "avx512bf16", "amx"};
  return kNames[static_cast<int>(level)];
}

// Calls visit.operator()<kLevel>() for each of the levels that this build has.
template <Level... kLevels, class Visit>
void for_levels(Visit&& visit) {
  const auto visit_one = [&]<Level kLevel>() {
    if constexpr (kLevel <= kHighestLevel) visit.template operator()<kLevel>();
  };
  (visit_one.template operator()<kLevels>(), ...);
}

// The table of the highest of the usual levels at or below `isa`.
template <class Kernels>
const Kernels& kernels_at(Isa isa) {
  const Kernels* best = nullptr;
  for_levels<Level::portable, Level::avx2, Level::avx512>([&]<Level kLevel>() {
    if (isa_of(kLevel) <= isa) best = &kernels<kLevel, Kernels>();
  });
  return *best;
}

}  // namespace effinfer::cpu
