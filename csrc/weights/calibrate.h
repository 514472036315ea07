// Measures what a machine wants (effinfer/tuning.h).
#pragma once

#include <optional>
#include <span>
#include <string>

#include "effinfer/device.h"
#include "effinfer/tuning.h"
#include "ops/packed_weight.h"

namespace effinfer::weights {

// Streams those of the packed weights that `stream` names through the target's kernel, with each
// candidate in turn, for a third of 100 ms; nothing when they are less than 8 MB, which say little
// of a stream. Another distance than the one in use must be faster by 3 %. What is in use meanwhile
// changes, and is put back.
std::optional<FetchTuning> measure_fetch(WeightStream stream,
                                         std::span<const ops::PackedWeight> weights,
                                         ThreadPool& pool, const Target& target);

// The same of the rows from which there are panels; nothing for a packing of less than 8 MB.
std::optional<PanelTuning> measure_panels(PackedTernary packed,
                                          std::span<const ops::PackedWeight> weights,
                                          ThreadPool& pool, const Target& target);

// Puts what this machine wants into use: what the file in `folder` says, or else a measurement on
// the weights, which is then kept there. What is fixed or measured already stays as it is.
// Returns why the folder was of no use; empty: it was.
std::string tune(std::span<const ops::PackedWeight> weights, ThreadPool& pool, const Target& target,
                 const std::string& folder);

}  // namespace effinfer::weights
