#include "effinfer/tuning.h"

#include <array>
#include <atomic>
#include <charconv>
#include <mutex>
#include <optional>

#include "core/env.h"
#include "core/fetch_distance.h"
#include "effinfer/device.h"
#include "effinfer/error.h"

namespace effinfer {
namespace {

constexpr size_t kStreams = 2;
constexpr int32_t kFarthest = 65'536;

size_t index(WeightStream stream) {
  return static_cast<size_t>(stream);
}

struct Known {
  std::string_view machine;  // a prefix of CpuFeatures::signature
  FetchDistance int8;
  FetchDistance ternary;
};

// Far enough for memory to come while the arithmetic goes on: everywhere that it was measured.
constexpr FetchDistance kInt8Guess = {8192, 0};
constexpr FetchDistance kTernaryGuess = {8192, 512};
constexpr Known kKnown[] = {
    {"AuthenticAMD-25-", {512, 0}, {0, 1024}},     // Zen 3 and 4
    {"AuthenticAMD-26-", {8192, 0}, {8192, 512}},  // Zen 5
};

FetchTuning initial(WeightStream stream) {
  const std::string& machine = cpu_features().signature;
  for (const Known& known : kKnown) {
    if (!machine.starts_with(known.machine)) continue;
    const bool is_int8 = stream == WeightStream::int8;
    return {is_int8 ? known.int8 : known.ternary, TuningSource::known, "known machine"};
  }
  return {stream == WeightStream::int8 ? kInt8Guess : kTernaryGuess, TuningSource::guessed,
          "guess"};
}

bool is_valid(FetchDistance distance) {
  const auto valid = [](int32_t bytes) {
    return bytes >= 0 && bytes <= kFarthest && bytes % 64 == 0;
  };
  return valid(distance.l2) && valid(distance.l1);
}

class Tunings {
 public:
  Tunings() {
    for (size_t i = 0; i < kStreams; ++i) put(i, initial(static_cast<WeightStream>(i)));
    const std::optional<std::string> text = env::tuning();
    if (text) fix(*text);
  }

  FetchTuning get(WeightStream stream) {
    const std::lock_guard lock(mutex_);
    return tunings_[index(stream)];
  }
  void set(WeightStream stream, const FetchTuning& tuning) {
    if (!is_valid(tuning.distance)) {
      throw InvalidArgument("[tuning] expected distances that are multiples of 64 up to " +
                            std::to_string(kFarthest) + ", got " + to_string(tuning.distance));
    }
    const std::lock_guard lock(mutex_);
    put(index(stream), tuning);
  }
  FetchDistance distance(WeightStream stream) const {
    const uint64_t both = distances_[index(stream)].load(std::memory_order_relaxed);
    return {static_cast<int32_t>(both >> 32), static_cast<int32_t>(both)};
  }

 private:
  void put(size_t stream, const FetchTuning& tuning) {
    const auto l2 = static_cast<uint64_t>(static_cast<uint32_t>(tuning.distance.l2));
    distances_[stream] = l2 << 32 | static_cast<uint32_t>(tuning.distance.l1);
    tunings_[stream] = tuning;
  }

  // "int8=8192/512,ternary=0/1024", each of them at most once.
  void fix(std::string_view text) {
    for (std::string_view rest = text; !rest.empty();) {
      const size_t comma = rest.find(',');
      const std::string_view entry = rest.substr(0, comma);
      rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
      const size_t equals = entry.find('=');
      const std::string_view key = entry.substr(0, equals);
      const auto value = equals == std::string_view::npos
                             ? std::nullopt
                             : parse_fetch_distance(entry.substr(equals + 1));
      if (!value || (key != "int8" && key != "ternary")) {
        throw InvalidArgument(
            "[env] EFFINFER_TUNING: expected \"int8=L2/L1,ternary=L2/L1\" in multiples of "
            "64 bytes up to 65536, got \"" +
            std::string(text) + "\"");
      }
      put(key == "int8" ? 0 : 1, {*value, TuningSource::fixed, "EFFINFER_TUNING"});
    }
  }

  std::mutex mutex_;
  std::array<FetchTuning, kStreams> tunings_;
  std::array<std::atomic<uint64_t>, kStreams> distances_{};
};

Tunings& tunings() {
  static Tunings all;
  return all;
}

}  // namespace

std::string_view name(WeightStream stream) {
  return stream == WeightStream::int8 ? "int8" : "ternary";
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

std::string to_string(FetchDistance distance) {
  return std::to_string(distance.l2) + "/" + std::to_string(distance.l1);
}

FetchDistance fetch_distance(WeightStream stream) {
  return tunings().distance(stream);
}

FetchTuning fetch_tuning(WeightStream stream) {
  return tunings().get(stream);
}

void set_fetch_tuning(WeightStream stream, const FetchTuning& tuning) {
  tunings().set(stream, tuning);
}

std::string describe_tuning() {
  std::string text;
  for (const WeightStream stream : {WeightStream::int8, WeightStream::ternary}) {
    const FetchTuning tuning = fetch_tuning(stream);
    text += text.empty() ? "" : "; ";
    text +=
        std::string(name(stream)) + " " + to_string(tuning.distance) + " (" + tuning.reason + ")";
  }
  return text;
}

}  // namespace effinfer
