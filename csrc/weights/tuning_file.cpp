#include "weights/tuning_file.h"

#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/tuned.h"
#include "effinfer/error.h"
#include "io/atomic_file.h"

namespace effinfer::weights {
namespace {

constexpr const char* kHead = "effinfer tuning 1";
constexpr size_t kMostBytes = 4096;  // far more than there are values

template <class Tunings, class Key>
auto find_in(const Tunings& tunings, Key key) {
  const auto found = tunings.find(key);
  return found == tunings.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace

TuningFile::TuningFile(const std::string& folder, Isa isa) : folder_(folder) {
  path_ = folder + "/" + cpu_features().signature + "-" + std::string(name(isa)) + ".txt";
  if (!folder.empty()) read();
}

void TuningFile::read() {
  std::error_code missing;
  if (!std::filesystem::is_regular_file(path_, missing)) return;
  std::string bytes(kMostBytes, '\0');
  std::ifstream file(path_, std::ios::binary);
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  std::istringstream text(bytes.substr(0, static_cast<size_t>(file.gcount())));
  std::string line;
  if (!std::getline(text, line) || line != kHead) return;
  while (std::getline(text, line)) {
    if (add_line(line)) continue;
    fetches_.clear();
    panels_.clear();
    return;
  }
}

// "int8 8192/512 measured: ..."
bool TuningFile::add_line(const std::string& line) {
  std::istringstream in(line);
  std::string key;
  std::string value;
  std::string reason;
  if (!(in >> key >> value) || !std::getline(in >> std::ws, reason)) return false;
  if (const std::optional<WeightStream> stream = parse_weight_stream(key)) {
    const std::optional<FetchDistance> distance = parse_fetch_distance(value);
    if (distance) fetches_[*stream] = {*distance, TuningSource::measured, reason};
    return distance.has_value();
  }
  const std::optional<PackedTernary> weights = parse_packed_ternary(key);
  const std::optional<int32_t> rows = parse_panel_rows(value);
  if (!weights || !rows) return false;
  panels_[*weights] = {*rows, TuningSource::measured, reason};
  return true;
}

std::optional<FetchTuning> TuningFile::find(WeightStream stream) const {
  return find_in(fetches_, stream);
}

std::optional<PanelTuning> TuningFile::find(PackedTernary weights) const {
  return find_in(panels_, weights);
}

std::string TuningFile::save() const {
  std::error_code ignored;  // writing will fail, and say why
  std::filesystem::create_directories(folder_, ignored);
  std::string text = std::string(kHead) + "\n";
  const auto add = [&](std::string_view key, const std::string& value, const std::string& reason) {
    text.append(key).append(" ").append(value).append(" ").append(reason).append("\n");
  };
  for (const auto& [stream, tuning] : fetches_) {
    add(name(stream), to_string(tuning.distance), tuning.reason);
  }
  for (const auto& [weights, tuning] : panels_) {
    add(name(weights), std::to_string(tuning.rows), tuning.reason);
  }
  try {
    AtomicFile file(path_, "[tuning]");
    file.write(text.data(), text.size());
    file.commit();
  } catch (const FileError& error) {
    return error.what();
  }
  return "";
}

}  // namespace effinfer::weights
