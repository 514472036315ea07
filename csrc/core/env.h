// Every environment variable that effinfer reads, typed, in one table.
#pragma once

#include <optional>
#include <set>
#include <string>

namespace effinfer::env {

// EFFINFER_ISA: cap on the instruction-set level (portable, avx2, avx512, amx).
std::optional<std::string> isa();
// EFFINFER_THREADS: default number of threads. Throws InvalidArgument unless it is 1..1024.
std::optional<int> threads();
// EFFINFER_PASSES: "-fuse_norm,-fuse_rope_append" turns compiler passes off. Throws InvalidArgument
// for an entry without the minus.
std::set<std::string> disabled_passes();
// EFFINFER_TUNING: "int8=8192/512,panels_t2=8" fixes values of effinfer/tuning.h.
std::optional<std::string> tuning();

}  // namespace effinfer::env
