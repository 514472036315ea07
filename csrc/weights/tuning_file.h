// What was measured of a machine, kept in the user's cache: a line a stream, in a file named after
// the CPU, its caches and the ISA level.
//
//   effinfer tuning 1
//   int8 8192/512 measured: 34.1 GB/s
#pragma once

#include <map>
#include <optional>
#include <string>

#include "effinfer/device.h"
#include "effinfer/tuning.h"

namespace effinfer::weights {

class TuningFile {
 public:
  // Reads what is there. A file that is missing, damaged or of another version says nothing.
  TuningFile(const std::string& folder, Isa isa);

  std::optional<FetchTuning> find(WeightStream stream) const;
  void put(WeightStream stream, const FetchTuning& tuning) { tunings_[stream] = tuning; }
  // Writes all; why it could not, or empty.
  std::string save() const;

 private:
  void read();

  std::string folder_;
  std::string path_;
  std::map<WeightStream, FetchTuning> tunings_;
};

}  // namespace effinfer::weights
