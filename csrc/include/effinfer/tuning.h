// What CPU kernels take from a measurement of the machine: how far ahead of their use weights are
// asked for. It changes the time of a step by a third, and never a bit of its result.
//
// A distance is, in this order: fixed by EFFINFER_TUNING or set_fetch_tuning(); measured on the
// packed weights of the first model that is compiled with ModelOptions::tuning_cache, and read from
// that folder ever after; that of a known machine; a guess.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "effinfer/export.h"
#include "effinfer/threads.h"

namespace effinfer {

// Weights that matmuls of one or two rows read, by what they are multiplied by: each is a stream
// through memory at which its kernel works at a rate of its own.
enum class WeightStream : uint8_t { int8, ternary };
EFFINFER_API std::string_view name(WeightStream stream);

// Bytes between the line in use and those that are asked for, into the second and into the first
// cache; 0: none.
struct FetchDistance {
  int32_t l2 = 0;
  int32_t l1 = 0;
  bool operator==(const FetchDistance&) const = default;
};

enum class TuningSource : uint8_t { guessed, known, measured, fixed };

struct FetchTuning {
  FetchDistance distance;
  TuningSource source = TuningSource::guessed;
  std::string reason;  // "EFFINFER_TUNING", "measured: 34.1 GB/s, 24.0 with 512/0", ...
};
EFFINFER_API FetchTuning fetch_tuning(WeightStream stream);
// Throws InvalidArgument for a distance that is not a multiple of 64 up to 65,536.
EFFINFER_API void set_fetch_tuning(WeightStream stream, const FetchTuning& tuning);

// "int8 8192/512 (measured: ...); ternary 0/1024 (guess)", for info() and explain().
EFFINFER_API std::string describe_tuning();

// Measures all streams on made-up weights (128 MB, a second) for current_isa(), uses the result and
// writes it to `folder` (empty: nowhere). Streams that are fixed stay. Throws OutOfMemory,
// FileError.
EFFINFER_API void calibrate(ThreadPool& pool, const std::string& folder);

}  // namespace effinfer
