#include "effinfer/tuning.h"

#include <array>
#include <atomic>
#include <charconv>
#include <mutex>
#include <optional>

#include "core/env.h"
#include "core/tuned.h"
#include "effinfer/device.h"
#include "effinfer/error.h"

namespace effinfer {
namespace {

constexpr int32_t kFarthest = 65'536;
constexpr int32_t kFewestPanelRows = 2;  // one row is always multiplied by lines
constexpr int32_t kMostPanelRows = 1024;

template <class Key>
size_t index(Key key) {
  return static_cast<size_t>(key);
}

using Distances = std::array<FetchDistance, std::size(kWeightStreams)>;  // by stream

struct Known {
  std::string_view machine;  // a prefix of CpuFeatures::signature
  Distances distances;
};

// Far enough for memory to come while the arithmetic goes on: everywhere that it was measured.
constexpr Distances kGuess = {{{8192, 0}, {8192, 512}, {8192, 0}}};
constexpr Known kKnown[] = {
    {"AuthenticAMD-25-", {{{16384, 1024}, {16384, 4096}, {4096, 0}}}},  // Zen 3 and 4
    {"AuthenticAMD-26-", {{{0, 8192}, {0, 12288}, {0, 8192}}}},         // Zen 5
};

FetchTuning initial(WeightStream stream) {
  const std::string& machine = cpu_features().signature;
  for (const Known& known : kKnown) {
    if (!machine.starts_with(known.machine)) continue;
    return {known.distances[index(stream)], TuningSource::known, "known machine"};
  }
  return {kGuess[index(stream)], TuningSource::guessed, "guess"};
}

bool is_valid(FetchDistance distance) {
  const auto valid = [](int32_t bytes) {
    return bytes >= 0 && bytes <= kFarthest && bytes % 64 == 0;
  };
  return valid(distance.l2) && valid(distance.l1);
}

bool is_valid(int32_t panel_rows) {
  return panel_rows == 0 || (panel_rows >= kFewestPanelRows && panel_rows <= kMostPanelRows);
}

class Tunings {
 public:
  Tunings() {
    for (const WeightStream stream : kWeightStreams) put(stream, initial(stream));
    for (const PackedTernary packed : kPackedTernary) {
      put(packed, PanelTuning{0, TuningSource::guessed, "the kernel's own"});
    }
    const std::optional<std::string> text = env::tuning();
    if (text) fix(*text);
  }

  FetchTuning get(WeightStream stream) {
    const std::lock_guard lock(mutex_);
    return fetches_[index(stream)];
  }
  PanelTuning get(PackedTernary packed) {
    const std::lock_guard lock(mutex_);
    return panels_[index(packed)];
  }
  template <class Key, class Tuning>
  void set(Key key, const Tuning& tuning) {
    const std::lock_guard lock(mutex_);
    put(key, tuning);
  }
  FetchDistance distance(WeightStream stream) const {
    const uint64_t both = distances_[index(stream)].load(std::memory_order_relaxed);
    return {static_cast<int32_t>(both >> 32), static_cast<int32_t>(both)};
  }
  int32_t panel_rows(PackedTernary packed) const {
    return panel_rows_[index(packed)].load(std::memory_order_relaxed);
  }

 private:
  void put(WeightStream stream, const FetchTuning& tuning) {
    const auto l2 = static_cast<uint64_t>(static_cast<uint32_t>(tuning.distance.l2));
    distances_[index(stream)] = l2 << 32 | static_cast<uint32_t>(tuning.distance.l1);
    fetches_[index(stream)] = tuning;
  }
  void put(PackedTernary packed, const PanelTuning& tuning) {
    panel_rows_[index(packed)] = tuning.rows;
    panels_[index(packed)] = tuning;
  }

  // "int8=8192/512,panels_t2=8".
  void fix(std::string_view text) {
    for (std::string_view rest = text; !rest.empty();) {
      const size_t comma = rest.find(',');
      if (!fix_one(rest.substr(0, comma))) {
        throw InvalidArgument(
            "[env] EFFINFER_TUNING: expected some of "
            "\"int8=L2/L1,ternary=L2/L1,dense=L2/L1,panels_t2=ROWS,panels_t1_6=ROWS\", distances "
            "multiples of 64 bytes up to 65536 and 2 to 1024 rows (0: the "
            "kernel's own), got \"" +
            std::string(text) + "\"");
      }
      rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    }
  }
  bool fix_one(std::string_view entry) {
    const size_t equals = entry.find('=');
    if (equals == std::string_view::npos) return false;
    const std::string_view value = entry.substr(equals + 1);
    if (const auto stream = parse_weight_stream(entry.substr(0, equals))) {
      const std::optional<FetchDistance> distance = parse_fetch_distance(value);
      if (distance) put(*stream, {*distance, TuningSource::fixed, "EFFINFER_TUNING"});
      return distance.has_value();
    }
    const auto packed = parse_packed_ternary(entry.substr(0, equals));
    const std::optional<int32_t> rows = parse_panel_rows(value);
    if (!packed || !rows) return false;
    put(*packed, {*rows, TuningSource::fixed, "EFFINFER_TUNING"});
    return true;
  }

  std::mutex mutex_;
  std::array<FetchTuning, std::size(kWeightStreams)> fetches_;
  std::array<PanelTuning, std::size(kPackedTernary)> panels_;
  std::array<std::atomic<uint64_t>, std::size(kWeightStreams)> distances_{};
  std::array<std::atomic<int32_t>, std::size(kPackedTernary)> panel_rows_{};
};

Tunings& tunings() {
  static Tunings all;
  return all;
}

}  // namespace

std::string_view name(WeightStream stream) {
  constexpr std::string_view kNames[] = {"int8", "ternary", "dense"};
  return kNames[index(stream)];
}

std::string_view name(PackedTernary packed) {
  return packed == PackedTernary::t2 ? "panels_t2" : "panels_t1_6";
}

std::optional<WeightStream> parse_weight_stream(std::string_view text) {
  for (const WeightStream stream : kWeightStreams) {
    if (text == name(stream)) return stream;
  }
  return std::nullopt;
}

std::optional<PackedTernary> parse_packed_ternary(std::string_view text) {
  for (const PackedTernary packed : kPackedTernary) {
    if (text == name(packed)) return packed;
  }
  return std::nullopt;
}

std::optional<FetchDistance> parse_fetch_distance(std::string_view text) {
  FetchDistance distance;
  const char* end = text.data() + text.size();
  const auto l2 = std::from_chars(text.data(), end, distance.l2);
  if (l2.ec != std::errc() || l2.ptr == end || *l2.ptr != '/') return std::nullopt;
  const auto l1 = std::from_chars(l2.ptr + 1, end, distance.l1);
  if (l1.ec != std::errc() || l1.ptr != end || !is_valid(distance)) return std::nullopt;
  return distance;
}

std::optional<int32_t> parse_panel_rows(std::string_view text) {
  int32_t rows = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, rows);
  if (parsed.ec != std::errc() || parsed.ptr != end || !is_valid(rows)) return std::nullopt;
  return rows;
}

std::string to_string(FetchDistance distance) {
  return std::to_string(distance.l2) + "/" + std::to_string(distance.l1);
}

FetchDistance fetch_distance(WeightStream stream) {
  return tunings().distance(stream);
}

int32_t line_rows(PackedTernary packed, int32_t own) {
  const int32_t panels = tunings().panel_rows(packed);
  return panels == 0 ? own : panels - 1;
}

FetchTuning fetch_tuning(WeightStream stream) {
  return tunings().get(stream);
}

PanelTuning panel_tuning(PackedTernary packed) {
  return tunings().get(packed);
}

void set_fetch_tuning(WeightStream stream, const FetchTuning& tuning) {
  if (!is_valid(tuning.distance)) {
    throw InvalidArgument("[tuning] expected distances that are multiples of 64 up to " +
                          std::to_string(kFarthest) + ", got " + to_string(tuning.distance));
  }
  tunings().set(stream, tuning);
}

void set_panel_tuning(PackedTernary packed, const PanelTuning& tuning) {
  if (!is_valid(tuning.rows)) {
    throw InvalidArgument("[tuning] expected 0 or " + std::to_string(kFewestPanelRows) + " to " +
                          std::to_string(kMostPanelRows) + " rows, got " +
                          std::to_string(tuning.rows));
  }
  tunings().set(packed, tuning);
}

std::string describe_tuning() {
  std::string text;
  const auto add = [&](std::string_view key, const std::string& value, const std::string& reason) {
    if (!text.empty()) text += "; ";
    text.append(key).append(" ").append(value).append(" (").append(reason).append(")");
  };
  for (const WeightStream stream : kWeightStreams) {
    const FetchTuning tuning = fetch_tuning(stream);
    add(name(stream), to_string(tuning.distance), tuning.reason);
  }
  for (const PackedTernary packed : kPackedTernary) {
    const PanelTuning tuning = panel_tuning(packed);
    if (tuning.rows > 0) add(name(packed), std::to_string(tuning.rows) + " rows", tuning.reason);
  }
  return text;
}

}  // namespace effinfer
