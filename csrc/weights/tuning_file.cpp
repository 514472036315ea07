#include "weights/tuning_file.h"

#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/fetch_distance.h"
#include "effinfer/error.h"
#include "io/atomic_file.h"

namespace effinfer::weights {
namespace {

constexpr const char* kHead = "effinfer tuning 1";
constexpr size_t kMostBytes = 4096;  // far more than there are streams

// "int8 8192/512 measured: ..."
std::optional<std::pair<WeightStream, FetchTuning>> parse_line(const std::string& line) {
  std::istringstream in(line);
  std::string stream;
  std::string distance;
  FetchTuning tuning;
  if (!(in >> stream >> distance) || !std::getline(in >> std::ws, tuning.reason)) return {};
  const std::optional<FetchDistance> parsed = parse_fetch_distance(distance);
  if (!parsed || (stream != "int8" && stream != "ternary")) return {};
  tuning.distance = *parsed;
  tuning.source = TuningSource::measured;
  return std::pair(stream == "int8" ? WeightStream::int8 : WeightStream::ternary, tuning);
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
    const auto found = parse_line(line);
    if (!found) {
      tunings_.clear();
      return;
    }
    tunings_.insert(*found);
  }
}

std::optional<FetchTuning> TuningFile::find(WeightStream stream) const {
  const auto found = tunings_.find(stream);
  return found == tunings_.end() ? std::nullopt : std::optional(found->second);
}

std::string TuningFile::save() const {
  std::error_code ignored;  // writing will fail, and say why
  std::filesystem::create_directories(folder_, ignored);
  std::string text = std::string(kHead) + "\n";
  for (const auto& [stream, tuning] : tunings_) {
    text +=
        std::string(name(stream)) + " " + to_string(tuning.distance) + " " + tuning.reason + "\n";
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
