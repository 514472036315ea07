#include "weights/calibrate.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "core/fetch_distance.h"
#include "core/memory.h"
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
constexpr auto kBudget = std::chrono::milliseconds(80);
constexpr int kLeastRounds = 2;
constexpr int kMostRounds = 5;
constexpr double kWorthChanging = 1.03;

constexpr FetchDistance kCandidates[] = {{512, 0},   {2048, 0},   {4096, 0},     {8192, 0},
                                         {16384, 0}, {8192, 512}, {16384, 1024}, {0, 1024}};

bool is_of(WeightStream stream, const ops::PackedWeight& weight) {
  if (stream == WeightStream::ternary) return ops::is_ternary(weight.format);
  return !ops::is_ternary(weight.format) && weight.format.scales != ops::ScaleKind::dense;
}

// The matmuls of one row with pieces of equal size of the weights of the most frequent format: a
// slice of them takes the same time whatever its place.
class Matmuls {
 public:
  Matmuls(WeightStream stream, std::span<const ops::PackedWeight> weights)
      : arithmetic_(stream == WeightStream::int8 ? ops::Arithmetic::int8
                                                 : ops::Arithmetic::int8_token) {
    const ops::PackedFormat format = most_frequent(stream, weights);
    int64_t cols = 0;
    int64_t rows = 0;
    for (const ops::PackedWeight& weight : weights) {
      if (!is_of(stream, weight) || weight.format != format) continue;
      add_pieces(weight);
      cols = std::max(cols, weight.cols);
      rows = std::max(rows, weight.rows);
    }
    const auto row_bytes = static_cast<size_t>(ops::operand_row_bytes(arithmetic_, cols));
    x_ = memory_of({}).allocate(row_bytes, Pages::huge);  // zeros
    out_ = std::make_unique<float[]>(static_cast<size_t>(rows));
    if (!x_) throw OutOfMemory("[tuning] no memory for a row of an operand");
    for (ops::MatmulProblem& problem : problems_) {
      problem.x.data = x_.get();
      problem.parts[0].out = out_.get();
    }
  }

  int64_t num_bytes() const { return num_bytes_; }
  const ops::MatmulProblem& first() const { return problems_.front(); }

  // Seconds a byte of the next slice.
  double time_slice(const ops::Variant<ops::MatmulProblem>& variant, ThreadPool& pool) {
    const size_t begin = next_;
    int64_t bytes = 0;
    while (bytes < std::min(kSliceBytes, num_bytes_)) {
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
  static ops::PackedFormat most_frequent(WeightStream stream,
                                         std::span<const ops::PackedWeight> weights) {
    ops::PackedFormat most;
    size_t most_bytes = 0;
    for (const ops::PackedWeight& candidate : weights) {
      if (!is_of(stream, candidate)) continue;
      size_t bytes = 0;
      for (const ops::PackedWeight& weight : weights) {
        if (is_of(stream, weight) && weight.format == candidate.format) bytes += weight.num_bytes();
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
      part.out_stride = weight.rows;
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

// What is in use of a stream, which a measurement changes and leaves as it was, also when it
// throws.
class InUse {
 public:
  explicit InUse(WeightStream stream) : stream_(stream), tuning_(fetch_tuning(stream)) {}
  ~InUse() { set_fetch_tuning(stream_, tuning_); }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;

  const FetchTuning& tuning() const { return tuning_; }
  void replace(FetchDistance distance) const {
    set_fetch_tuning(stream_, {distance, tuning_.source, tuning_.reason});
  }

 private:
  const WeightStream stream_;
  const FetchTuning tuning_;
};

// One measurement at a time: two would take each other's candidates for what is in use.
std::mutex& measuring() {
  static std::mutex mutex;
  return mutex;
}

std::string gigabytes(double seconds_a_byte) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.1f GB/s", 1e-9 / seconds_a_byte);
  return text.data();
}

}  // namespace

std::optional<FetchTuning> measure_fetch(WeightStream stream,
                                         std::span<const ops::PackedWeight> weights,
                                         ThreadPool& pool, const Target& target) {
  int64_t bytes = 0;
  for (const ops::PackedWeight& weight : weights) {
    if (is_of(stream, weight)) bytes += static_cast<int64_t>(weight.num_bytes());
  }
  if (bytes < kLeastBytes) return std::nullopt;
  Matmuls matmuls(stream, weights);
  const auto& variant = ops::table<ops::MatmulProblem>().select(matmuls.first(), target);
  if (variant.scratch_bytes != nullptr) {
    pool.reserve_scratch(variant.scratch_bytes(matmuls.first()));
  }

  const InUse in_use(stream);
  const FetchDistance before = in_use.tuning().distance;
  std::vector<FetchDistance> distances(std::begin(kCandidates), std::end(kCandidates));
  if (std::find(distances.begin(), distances.end(), before) == distances.end()) {
    distances.push_back(before);
  }
  // Each candidate's best: what disturbs a timing only makes it longer.
  std::vector<double> best(distances.size(), std::numeric_limits<double>::infinity());
  matmuls.time_slice(variant, pool);  // wakes the team and the clock of the CPU
  const auto start = Clock::now();
  for (int round = 0; round < kMostRounds; ++round) {
    if (round >= kLeastRounds && Clock::now() - start > kBudget) break;
    for (size_t i = 0; i < distances.size(); ++i) {
      in_use.replace(distances[i]);
      best[i] = std::min(best[i], matmuls.time_slice(variant, pool));
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

std::string tune(std::span<const ops::PackedWeight> weights, ThreadPool& pool, const Target& target,
                 const std::string& folder) {
  const std::lock_guard lock(measuring());
  TuningFile file(folder, target.isa);
  bool measured = false;
  for (const WeightStream stream : {WeightStream::int8, WeightStream::ternary}) {
    const TuningSource source = fetch_tuning(stream).source;
    if (source == TuningSource::fixed || source == TuningSource::measured) continue;
    std::optional<FetchTuning> tuning = file.find(stream);
    if (!tuning) {
      tuning = measure_fetch(stream, weights, pool, target);
      if (!tuning) continue;
      file.put(stream, *tuning);
      measured = true;
    }
    set_fetch_tuning(stream, *tuning);
  }
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

void calibrate(ThreadPool& pool, const std::string& folder) {
  const MadeUpWeights weights;
  const Target target = current_target();
  const std::lock_guard lock(weights::measuring());
  weights::TuningFile file(folder, target.isa);
  for (const WeightStream stream : {WeightStream::int8, WeightStream::ternary}) {
    if (fetch_tuning(stream).source == TuningSource::fixed) continue;
    const auto tuning = weights::measure_fetch(stream, weights.all(), pool, target);
    if (!tuning) throw InternalError("[tuning] nothing was measured");
    set_fetch_tuning(stream, *tuning);
    file.put(stream, *tuning);
  }
  const std::string trouble = folder.empty() ? "" : file.save();
  if (!trouble.empty()) throw FileError(trouble);
}

}  // namespace effinfer
