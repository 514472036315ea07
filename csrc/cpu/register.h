// How the CPU kernels come into the tables of ops/registry.h.
#pragma once

#include <string>

#include "cpu/level.h"
#include "ops/registry.h"

namespace effinfer::cpu {

// What ops/<op>.h says of a problem: rejects(problem), or nothing to reject;
// scratch_bytes(problem), or none.
template <class Problem>
const char* rejects_problem(const Problem& problem) {
  if constexpr (requires { rejects(problem); }) return rejects(problem);
  return nullptr;
}
template <class Problem>
constexpr auto scratch_of_problem() -> size_t (*)(const Problem&) {
  if constexpr (requires(const Problem& problem) { scratch_bytes(problem); }) {
    return [](const Problem& problem) -> size_t { return scratch_bytes(problem); };
  } else {
    return nullptr;
  }
}

// Adds "<op>.<level>", the run<kLevel> of <op>.simd.cpp, for those of the levels that this build
// has; the levels are portable, avx2 and avx512 where none are given.
template <class Problem, Level... kLevels>
void add_levels(const std::string& op) {
  if constexpr (sizeof...(kLevels) == 0) {
    add_levels<Problem, Level::portable, Level::avx2, Level::avx512>(op);
  } else {
    for_levels<kLevels...>([&]<Level kLevel>() {
      ops::mutable_table<Problem>().add({op + "." + std::string(name(kLevel)), isa_of(kLevel),
                                         rejects_problem<Problem>, run<kLevel, Problem>,
                                         scratch_of_problem<Problem>()});
    });
  }
}

// Drivers fill their operator's table themselves.
void register_matmul();
void register_attention();
void register_attention_scores();
void register_prefill_index();
void register_page_index();
void register_hash_index();
void register_bucket_index();
void register_history_index();
void register_attention_mass();
void register_rope_append();
void register_row_sampling();

// All of them.
void register_cpu();

}  // namespace effinfer::cpu
