// What CPU kernels take from a measurement of the machine: how far ahead of their use weights are
// asked for, and from how many rows unpacking ternary weights pays. It changes the time of a step
// by a third and more, and never a bit of its result.
//
// A value is, in this order: fixed by EFFINFER_TUNING or a setter; measured on the packed weights
// of the first model that is compiled with ModelOptions::tuning_cache, and read from that folder
// ever after; that of a known machine; a guess.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "effinfer/export.h"
#include "effinfer/threads.h"

namespace effinfer {

// Weights that matmuls of one or two rows read, by what they are multiplied by and as: each is a
// stream through memory at which its kernel works at a rate of its own.
enum class WeightStream : uint8_t { int8, ternary, dense };
inline constexpr WeightStream kWeightStreams[] = {WeightStream::int8, WeightStream::ternary,
                                                  WeightStream::dense};
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

// The packings of ternary weights. Few rows are multiplied by the packed lines as they are; for
// more, weights are unpacked to panels first, which costs the same for any number of rows and is
// what AMX tiles multiply. Both add the same integers.
enum class PackedTernary : uint8_t { t2, t1_6 };
inline constexpr PackedTernary kPackedTernary[] = {PackedTernary::t2, PackedTernary::t1_6};
EFFINFER_API std::string_view name(PackedTernary packed);  // "panels_t2", "panels_t1_6"

struct PanelTuning {
  int32_t rows = 0;  // from which on there are panels; 0: what the kernel was written with
  TuningSource source = TuningSource::guessed;
  std::string reason;
};
EFFINFER_API PanelTuning panel_tuning(PackedTernary packed);
// Throws InvalidArgument for other rows than 0 and 2 to 1,024.
EFFINFER_API void set_panel_tuning(PackedTernary packed, const PanelTuning& tuning);

// "int8 8192/512 (measured: ...); ternary 0/1024 (guess); ...; panels_t2 12 rows (measured: ...)",
// for info() and explain(): distances in bytes into L2/L1, and rows that kernels do not know by
// themselves.
EFFINFER_API std::string describe_tuning();

// Uses what was measured here before and kept in `folder`, as a model's first load would; what is
// fixed or measured already stays. A folder without it changes nothing.
EFFINFER_API void recall_tuning(const std::string& folder);

// Measures all on made-up weights (192 MB, a second) for current_isa(), uses the results and writes
// them to `folder` (empty: nowhere). What is fixed stays. Throws OutOfMemory, FileError.
EFFINFER_API void calibrate(ThreadPool& pool, const std::string& folder);

}  // namespace effinfer
