// What was measured of a machine, kept in the user's cache: a line a value, in a file named after
// the CPU, its caches and the ISA level.
//
//   effinfer tuning 1
//   int8 8192/512 measured: 34.1 GB/s
//   panels_t2 6 measured: ...
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
  std::optional<PanelTuning> find(PackedTernary weights) const;
  void put(WeightStream stream, const FetchTuning& tuning) { fetches_[stream] = tuning; }
  void put(PackedTernary weights, const PanelTuning& tuning) { panels_[weights] = tuning; }
  // Writes all; why it could not, or empty.
  std::string save() const;

 private:
  void read();
  bool add_line(const std::string& line);

  std::string folder_;
  std::string path_;
  std::map<WeightStream, FetchTuning> fetches_;
  std::map<PackedTernary, PanelTuning> panels_;
};

}  // namespace effinfer::weights
