#include "weights/calibrate.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "core/log.h"
#include "core/memory.h"
#include "core/tuned.h"
#include "effinfer/error.h"
#include "ops/matmul.h"
#include "ops/registry.h"
#include "weights/tuning_file.h"

namespace effinfer::weights {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kLeastBytes = int64_t{8} << 20;
constexpr int64_t kPieceBytes = int64_t{2} << 20;   // about what a matmul of a small model reads
constexpr int64_t kSliceBytes = int64_t{24} << 20;  // of one timing: a millisecond or two
constexpr auto kBudget = std::chrono::milliseconds(70);  // of all streams
constexpr int kLeastRounds = 2;
constexpr int kMostRounds = 5;
constexpr double kWorthChanging = 1.03;

constexpr FetchDistance kCandidates[] = {{2048, 0},   {4096, 0},    {8192, 0},     {16384, 0},
                                         {8192, 512}, {8192, 1024}, {16384, 1024}, {16384, 4096},
                                         {0, 1024},   {0, 4096},    {0, 8192},     {0, 12288}};

// Arithmetic bounds several rows, so that one piece tells as much: some 30 ms in all.
constexpr int64_t kPanelSliceBytes = kPieceBytes / 2;
constexpr int kPanelRounds = 3;
constexpr int32_t kPanelRowCounts[] = {2, 4, 8, 16, 32, 128};

bool is_of(WeightStream stream, const ops::PackedWeight& weight) {
  if (ops::is_ternary(weight.format)) return stream == WeightStream::ternary;
  const bool dense = weight.format.scales == ops::ScaleKind::dense;
  return stream == (dense ? WeightStream::dense : WeightStream::int8);
}

bool is_of(PackedTernary weights, const ops::PackedWeight& weight) {
  const bool t2 = weight.format.bits == ops::QuantBits::t2;
  return ops::is_ternary(weight.format) && t2 == (weights == PackedTernary::t2);
}

ops::Arithmetic arithmetic_of(const ops::PackedWeight& weight) {
  if (is_of(WeightStream::ternary, weight)) return ops::Arithmetic::int8_token;
  return is_of(WeightStream::int8, weight) ? ops::Arithmetic::int8 : ops::Arithmetic::f32;
}

std::vector<ops::PackedWeight> those_of(auto kind, std::span<const ops::PackedWeight> weights) {
  std::vector<ops::PackedWeight> those;
  std::ranges::copy_if(weights, std::back_inserter(those),
                       [&](const ops::PackedWeight& weight) { return is_of(kind, weight); });
  return those;
}

int64_t bytes_of(std::span<const ops::PackedWeight> weights) {
  int64_t bytes = 0;
  for (const ops::PackedWeight& weight : weights) bytes += static_cast<int64_t>(weight.num_bytes());
  return bytes;
}

// The matmuls of up to `most_rows` rows with pieces of equal size of the weights of the most
// frequent format: a slice of them takes the same time whatever its place.
class Matmuls {
 public:
  Matmuls(std::span<const ops::PackedWeight> weights, int64_t most_rows)
      : arithmetic_(arithmetic_of(weights.front())) {
    const ops::PackedFormat format = most_frequent(weights);
    int64_t cols = 0;
    int64_t outputs = 0;
    for (const ops::PackedWeight& weight : weights) {
      if (weight.format != format) continue;
      add_pieces(weight);
      cols = std::max(cols, weight.cols);
    }
    for (const ops::MatmulProblem& problem : problems_) {
      outputs = std::max(outputs, problem.parts[0].weight.rows);
    }
    const int64_t row_bytes = ops::operand_row_bytes(arithmetic_, cols);
    x_ = memory_of({}).allocate(static_cast<size_t>(most_rows * row_bytes), Pages::huge);  // zeros
    out_ = std::make_unique<float[]>(static_cast<size_t>(most_rows * outputs));
    if (!x_) throw OutOfMemory("[tuning] no memory for rows of an operand");
    for (ops::MatmulProblem& problem : problems_) {
      problem.x.data = x_.get();
      problem.parts[0].out = out_.get();
    }
  }

  void set_rows(int64_t rows) {
    for (ops::MatmulProblem& problem : problems_) problem.x.rows = rows;
  }

  int64_t num_bytes() const { return num_bytes_; }
  const ops::MatmulProblem& first() const { return problems_.front(); }

  // Seconds a byte of the next slice.
  double time_slice(const ops::Variant<ops::MatmulProblem>& variant, ThreadPool& pool,
                    int64_t slice_bytes) {
    const size_t begin = next_;
    int64_t bytes = 0;
    while (bytes < std::min(slice_bytes, num_bytes_)) {
      const ops::PackedWeight& weight = problems_[next_].parts[0].weight;
      bytes += static_cast<int64_t>(weight.num_bytes());
      next_ = (next_ + 1) % problems_.size();
    }
    const auto start = Clock::now();
    pool.parallel([&](Team& team) {
      size_t at = begin;
      do {
        variant.run(problems_[at], team);
        team.barrier();
        at = (at + 1) % problems_.size();
      } while (at != next_);
    });
    return std::chrono::duration<double>(Clock::now() - start).count() / static_cast<double>(bytes);
  }

 private:
  static ops::PackedFormat most_frequent(std::span<const ops::PackedWeight> weights) {
    ops::PackedFormat most;
    size_t most_bytes = 0;
    for (const ops::PackedWeight& candidate : weights) {
      size_t bytes = 0;
      for (const ops::PackedWeight& weight : weights) {
        if (weight.format == candidate.format) bytes += weight.num_bytes();
      }
      if (bytes > most_bytes) {
        most = candidate.format;
        most_bytes = bytes;
      }
    }
    return most;
  }

  void add_pieces(const ops::PackedWeight& weight) {
    const int64_t groups = (weight.rows + ops::kGroupRows - 1) / ops::kGroupRows;
    const int64_t step = std::max<int64_t>(2, kPieceBytes / weight.group_bytes / 2 * 2);
    for (int64_t group = 0; group < groups; group += step) {
      ops::MatmulProblem problem;
      ops::MatmulPart& part = problem.parts[0];
      part.weight = weight;
      part.weight.data = weight.group(group);
      part.weight.rows = std::min(step * ops::kGroupRows, weight.rows - group * ops::kGroupRows);
      part.out_stride = part.weight.rows;
      problem.num_parts = 1;
      problem.x = {arithmetic_, 1, weight.cols, nullptr};
      num_bytes_ += static_cast<int64_t>(part.weight.num_bytes());
      problems_.push_back(problem);
    }
  }

  const ops::Arithmetic arithmetic_;
  std::vector<ops::MatmulProblem> problems_;
  std::shared_ptr<void> x_;
  std::unique_ptr<float[]> out_;
  int64_t num_bytes_ = 0;
  size_t next_ = 0;
};

// What is in use, which a measurement changes and leaves as it was, also when it throws.
class FetchInUse {
 public:
  explicit FetchInUse(WeightStream stream) : stream_(stream), tuning_(fetch_tuning(stream)) {}
  ~FetchInUse() { set_fetch_tuning(stream_, tuning_); }
  FetchInUse(const FetchInUse&) = delete;
  FetchInUse& operator=(const FetchInUse&) = delete;

  const FetchTuning& tuning() const { return tuning_; }
  void replace(FetchDistance distance) const {
    set_fetch_tuning(stream_, {distance, tuning_.source, tuning_.reason});
  }

 private:
  const WeightStream stream_;
  const FetchTuning tuning_;
};

class PanelsInUse {
 public:
  explicit PanelsInUse(PackedTernary weights) : weights_(weights), tuning_(panel_tuning(weights)) {}
  ~PanelsInUse() { set_panel_tuning(weights_, tuning_); }
  PanelsInUse(const PanelsInUse&) = delete;
  PanelsInUse& operator=(const PanelsInUse&) = delete;

  void replace(int32_t rows) const {
    set_panel_tuning(weights_, {rows, tuning_.source, tuning_.reason});
  }

 private:
  const PackedTernary weights_;
  const PanelTuning tuning_;
};

// One measurement at a time: two would take each other's candidates for what is in use.
std::mutex& measuring() {
  static std::mutex mutex;
  return mutex;
}

std::string with_one_digit(double value) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.1f", value);
  return text.data();
}

std::string gigabytes(double seconds_a_byte) {
  return with_one_digit(1e-9 / seconds_a_byte) + " GB/s";
}

// The kernel of the matmuls, with memory for it.
const ops::Variant<ops::MatmulProblem>& kernel_of(const Matmuls& matmuls, ThreadPool& pool,
                                                  const Target& target) {
  const auto& variant = ops::table<ops::MatmulProblem>().select(matmuls.first(), target);
  if (variant.scratch_bytes != nullptr) {
    pool.reserve_scratch(variant.scratch_bytes(matmuls.first()));
  }
  return variant;
}

}  // namespace

std::optional<FetchTuning> measure_fetch(WeightStream stream,
                                         std::span<const ops::PackedWeight> weights,
                                         ThreadPool& pool, const Target& target) {
  const std::vector<ops::PackedWeight> those = those_of(stream, weights);
  if (bytes_of(those) < kLeastBytes) return std::nullopt;
  Matmuls matmuls(those, 1);
  const auto& variant = kernel_of(matmuls, pool, target);
  const FetchInUse in_use(stream);
  const FetchDistance before = in_use.tuning().distance;
  std::vector<FetchDistance> distances(std::begin(kCandidates), std::end(kCandidates));
  if (std::find(distances.begin(), distances.end(), before) == distances.end()) {
    distances.push_back(before);
  }
  // Each candidate's best: what disturbs a timing only makes it longer.
  std::vector<double> best(distances.size(), std::numeric_limits<double>::infinity());
  matmuls.time_slice(variant, pool, kSliceBytes);  // wakes the team and the clock of the CPU
  const auto start = Clock::now();
  for (int round = 0; round < kMostRounds; ++round) {
    if (round >= kLeastRounds && Clock::now() - start > kBudget / std::size(kWeightStreams)) break;
    for (size_t i = 0; i < distances.size(); ++i) {
      in_use.replace(distances[i]);
      best[i] = std::min(best[i], matmuls.time_slice(variant, pool, kSliceBytes));
    }
  }

  const auto of = [&](FetchDistance distance) {
    const auto at = std::find(distances.begin(), distances.end(), distance) - distances.begin();
    return best[static_cast<size_t>(at)];
  };
  const auto fastest = std::min_element(best.begin(), best.end()) - best.begin();
  FetchDistance chosen = distances[static_cast<size_t>(fastest)];
  if (of(chosen) * kWorthChanging > of(before)) chosen = before;
  std::string reason = "measured: " + gigabytes(of(chosen));
  if (chosen != before) reason += ", " + gigabytes(of(before)) + " with " + to_string(before);
  return FetchTuning{chosen, TuningSource::measured, reason};
}

std::optional<PanelTuning> measure_panels(PackedTernary packed,
                                          std::span<const ops::PackedWeight> weights,
                                          ThreadPool& pool, const Target& target) {
  const std::vector<ops::PackedWeight> those = those_of(packed, weights);
  if (bytes_of(those) < kLeastBytes) return std::nullopt;
  Matmuls matmuls(those, *std::rbegin(kPanelRowCounts));
  matmuls.set_rows(*std::rbegin(kPanelRowCounts));
  const auto& variant = kernel_of(matmuls, pool, target);
  const PanelsInUse in_use(packed);
  matmuls.time_slice(variant, pool, kPanelSliceBytes);  // wakes the team and the clock of the CPU
  // Panels cost the same for any number of rows, so there is one number up to which lines pay: that
  // at which the logarithms of what they gain add up to most. One disturbed timing does not move
  // it.
  PanelTuning chosen = {kPanelRowCounts[0], TuningSource::measured, "measured: lines never pay"};
  double gain = 0;
  double most = 0;
  for (const int32_t rows : kPanelRowCounts) {
    matmuls.set_rows(rows);
    double lines = std::numeric_limits<double>::infinity();
    double panels = lines;
    for (int round = 0; round < kPanelRounds; ++round) {
      in_use.replace(rows + 1);
      lines = std::min(lines, matmuls.time_slice(variant, pool, kPanelSliceBytes));
      in_use.replace(kPanelRowCounts[0]);
      panels = std::min(panels, matmuls.time_slice(variant, pool, kPanelSliceBytes));
    }
    gain += std::log(panels / lines);
    if (gain <= most) continue;
    most = gain;
    chosen.rows = rows + 1;
    chosen.reason = "measured: " + std::to_string(rows) + " rows take panels " +
                    with_one_digit(100 * (panels / lines - 1)) + " % longer";
  }
  return chosen;
}

namespace {

FetchTuning in_use(WeightStream stream) {
  return fetch_tuning(stream);
}
PanelTuning in_use(PackedTernary weights) {
  return panel_tuning(weights);
}

void use(WeightStream stream, const FetchTuning& tuning) {
  set_fetch_tuning(stream, tuning);
}
void use(PackedTernary weights, const PanelTuning& tuning) {
  set_panel_tuning(weights, tuning);
}

// Whether nothing better than a start value is in use.
bool is_open(auto key) {
  const TuningSource source = in_use(key).source;
  return source != TuningSource::fixed && source != TuningSource::measured;
}

// Puts what the file says of `key` into use; whether it says something.
bool recall(auto key, const TuningFile& file) {
  const auto tuning = file.find(key);
  if (tuning) use(key, *tuning);
  return tuning.has_value();
}

// Puts what the file says of `key`, or else what is measured, into use; whether it was measured.
bool tune_one(auto key, auto measure, TuningFile& file) {
  if (!is_open(key) || recall(key, file)) return false;
  const auto tuning = measure(key);
  if (!tuning) return false;
  file.put(key, *tuning);
  use(key, *tuning);
  return true;
}

}  // namespace

std::string tune(std::span<const ops::PackedWeight> weights, ThreadPool& pool, const Target& target,
                 const std::string& folder) {
  const std::lock_guard lock(measuring());
  TuningFile file(folder, target.isa);
  bool measured = false;
  for (const WeightStream stream : kWeightStreams) {
    const auto measure = [&](WeightStream of) { return measure_fetch(of, weights, pool, target); };
    measured |= tune_one(stream, measure, file);
  }
  for (const PackedTernary packed : kPackedTernary) {
    const auto measure = [&](PackedTernary of) {
      return measure_panels(of, weights, pool, target);
    };
    measured |= tune_one(packed, measure, file);
  }
  if (measured) log(LogLevel::info, "measured how far ahead weights are asked for");
  return measured ? file.save() : "";
}

}  // namespace effinfer::weights

namespace effinfer {
namespace {

// Weights as a model has them, all bytes 1: nothing that a distance depends on.
class MadeUpWeights {
 public:
  MadeUpWeights() {
    add(DType::q4_1, ops::TernaryForm::u4);
    add(DType::tq2_0, ops::TernaryForm::t2);
    add(DType::f16, ops::TernaryForm::u4);
  }
  std::span<const ops::PackedWeight> all() const { return weights_; }

 private:
  static constexpr int64_t kCols = 2048;
  static constexpr size_t kBytes = size_t{64} << 20;

  void add(DType dtype, ops::TernaryForm form) {
    ops::PackedWeight weight;
    weight.format = ops::packed_format(dtype, form);
    weight.source = dtype;
    weight.cols = kCols;
    weight.group_bytes = ops::packed_group_bytes(weight.format, kCols);
    weight.rows = static_cast<int64_t>(kBytes) / weight.group_bytes * ops::kGroupRows;
    const std::shared_ptr<void> bytes = memory_of({}).allocate(weight.num_bytes(), Pages::huge);
    if (!bytes) throw OutOfMemory("[tuning] no memory for weights to measure with");
    std::memset(bytes.get(), 1, weight.num_bytes());
    weight.data = static_cast<const uint8_t*>(bytes.get());
    weights_.push_back(weight);
    storage_.push_back(bytes);
  }

  std::vector<ops::PackedWeight> weights_;
  std::vector<std::shared_ptr<void>> storage_;
};

}  // namespace

void recall_tuning(const std::string& folder) {
  const std::lock_guard lock(weights::measuring());
  const weights::TuningFile file(folder, current_target().isa);
  const auto recall_open = [&](auto key) {
    if (weights::is_open(key)) weights::recall(key, file);
  };
  for (const WeightStream stream : kWeightStreams) recall_open(stream);
  for (const PackedTernary packed : kPackedTernary) recall_open(packed);
}

void calibrate(ThreadPool& pool, const std::string& folder) {
  const MadeUpWeights weights;
  const Target target = current_target();
  const std::lock_guard lock(weights::measuring());
  weights::TuningFile file(folder, target.isa);
  const auto keep = [&](auto key, const auto& tuning) {
    if (!tuning) throw InternalError("[tuning] nothing was measured");
    weights::use(key, *tuning);
    file.put(key, *tuning);
  };
  for (const WeightStream stream : kWeightStreams) {
    if (fetch_tuning(stream).source == TuningSource::fixed) continue;
    keep(stream, weights::measure_fetch(stream, weights.all(), pool, target));
  }
  // Of the other packing there are no weights here: a model's own tell.
  constexpr PackedTernary kMadeUp = PackedTernary::t2;
  if (panel_tuning(kMadeUp).source != TuningSource::fixed) {
    keep(kMadeUp, weights::measure_panels(kMadeUp, weights.all(), pool, target));
  }
  const std::string trouble = folder.empty() ? "" : file.save();
  if (!trouble.empty()) throw FileError(trouble);
}

}  // namespace effinfer
