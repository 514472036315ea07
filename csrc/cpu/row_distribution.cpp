#include "cpu/row_distribution.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "ops/top_list.h"

namespace effinfer::cpu {
namespace {

constexpr int64_t kWidth = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr size_t kHistogramBytes = 4 * kRowBuckets * sizeof(double);
// Maxima of groups bound the k-th highest value from below, where the row is long and k is small;
// else histograms alone do. Four times as many groups as k keep most of the k highest in groups of
// their own.
constexpr int64_t kLongRow = 1024;
constexpr int64_t kRowPerK = 64;
constexpr int64_t kGroupsPerK = 4;
constexpr int64_t kLeastGroups = 256;

bool groups_pay(int64_t n, int64_t k) {
  return n >= kLongRow && k <= n / kRowPerK;
}

// The vectors in each group.
int64_t group_size(int64_t n, int64_t k) {
  const int64_t groups = std::max(kLeastGroups, groups_pay(n, k) ? kGroupsPerK * k : 0);
  return std::max<int64_t>(1, (n + kWidth - 1) / groups);
}

int64_t group_count(int64_t n, int64_t group) {
  const int64_t vectors = (n + kWidth - 1) / kWidth;
  return (vectors + group - 1) / group * kWidth;
}

constexpr size_t aligned(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

constexpr int64_t blocks_of(int64_t n) {
  return (n + kRowBlock - 1) / kRowBlock;
}

// Undoes ops::order_key().
float value_of(int32_t key) {
  return std::bit_cast<float>(key ^ (key >> 31 & 0x7fffffff));
}

size_t floats_bytes(int64_t vocab) {
  return aligned(static_cast<size_t>(vocab + kRowSlack) * sizeof(float));
}

size_t sums_bytes(int64_t vocab) {
  return aligned(static_cast<size_t>(blocks_of(vocab) + 1) * sizeof(double));
}

}  // namespace

size_t RowDistribution::scratch_bytes(int64_t vocab) {
  return 5 * floats_bytes(vocab) + sums_bytes(vocab) + kHistogramBytes;
}

RowDistribution::RowDistribution(const RowMath& math, void* scratch, int64_t vocab) : math_(math) {
  auto* next = static_cast<std::byte*>(scratch);
  const auto take = [&](size_t bytes) {
    std::byte* taken = next;
    next += bytes;
    return taken;
  };
  histogram_ = take(kHistogramBytes);
  sums_ = reinterpret_cast<double*>(take(sums_bytes(vocab)));
  kept_ = reinterpret_cast<float*>(take(floats_bytes(vocab)));
  kept_ids_ = reinterpret_cast<int32_t*>(take(floats_bytes(vocab)));
  bucket_ = reinterpret_cast<float*>(take(floats_bytes(vocab)));
  maxima_ = reinterpret_cast<float*>(take(floats_bytes(vocab)));
  wide_ = reinterpret_cast<float*>(take(floats_bytes(vocab)));
}

const float* RowDistribution::widen(const void* x, DType dtype, int64_t n) {
  if (dtype == DType::f32) return static_cast<const float*>(x);
  math_.widen(x, dtype, n, wide_);
  return wide_;
}

void RowDistribution::start(const float* row, int64_t n) {
  row_ = values_ = row;
  ids_ = nullptr;
  size_ = row_size_ = n;
  groups_ = 0;
  min_ = -kInfinity;
  summed_ = false;
}

ops::RowStatus RowDistribution::from_logits(const void* x, DType dtype, int64_t n, int64_t top_k) {
  start(widen(x, dtype, n), n);
  const int64_t group = group_size(n, top_k);
  const RowExtent extent = math_.group_maxima(row_, n, group, maxima_);
  groups_ = group_count(n, group);
  max_ = extent.max;
  return extent.has_nan ? ops::RowStatus::nan : ops::RowStatus::ok;
}

ops::RowStatus RowDistribution::check_logits() const {
  if (max_ == -kInfinity) return ops::RowStatus::nothing;
  return std::isfinite(max_) ? ops::RowStatus::ok : ops::RowStatus::infinite;
}

ops::RowStatus RowDistribution::from_weights(const void* x, DType dtype, int64_t n) {
  start(widen(x, dtype, n), n);
  return sum_weights();
}

ops::RowStatus RowDistribution::from_excess(const float* target, const float* draft, int64_t n) {
  math_.excess(target, draft, n, wide_);
  start(wide_, n);
  const ops::RowStatus status = sum_weights();
  return status == ops::RowStatus::nothing ? from_weights(target, DType::f32, n) : status;
}

ops::RowStatus RowDistribution::sum_weights() {
  const RowExtent extent = math_.sum(values_, size_, sums_);
  min_ = extent.min;
  max_ = extent.max;
  total_ = 0.0;
  for (int64_t block = 0; block < blocks_of(size_); ++block) total_ += sums_[block];
  summed_ = true;
  if (std::isnan(total_)) return ops::RowStatus::nan;
  if (min_ < 0.0f) return ops::RowStatus::negative;
  if (!std::isfinite(total_)) return ops::RowStatus::infinite;
  return total_ > 0.0 ? ops::RowStatus::ok : ops::RowStatus::nothing;
}

void RowDistribution::to_weights(float temperature) {
  // A denormal temperature has no finite inverse; the highest logit's 0 must stay a number.
  const float factor = std::min(1.0f / temperature, std::numeric_limits<float>::max());
  const RowExtent extent = math_.weights(values_, size_, max_, factor, kept_, sums_);
  values_ = kept_;
  min_ = extent.min;
  max_ = extent.max;
  groups_ = 0;
  total_ = 0.0;
  for (int64_t block = 0; block < blocks_of(size_); ++block) total_ += sums_[block];
  summed_ = true;
}

double RowDistribution::total() {
  if (!summed_) sum_weights();
  return total_;
}

void RowDistribution::apply(RowCut cut) {
  replace(math_.keep(values_, ids_, size_, cut, kept_, kept_ids_));
  min_ = std::max(min_, cut.least);
}

void RowDistribution::replace(int64_t size) {
  values_ = kept_;
  ids_ = kept_ids_;
  size_ = size;
  groups_ = 0;
  summed_ = false;
}

// Drops what is below the k-th highest of the maxima of at least k groups: the k-th highest value
// is not below it.
void RowDistribution::narrow_to_top(int64_t k) {
  if (!groups_pay(size_, k)) return;
  if (groups_ < 2 * k) {
    const int64_t group = group_size(size_, k);
    math_.group_maxima(values_, size_, group, maxima_);
    groups_ = group_count(size_, group);
  }
  std::nth_element(maxima_, maxima_ + k - 1, maxima_ + groups_, std::greater<float>());
  apply({maxima_[k - 1], size_});
}

// The last value of the head that holds `goal` values, or their weight. No value is below `low`.
template <bool kWeights>
RowDistribution::Found RowDistribution::select(double goal, float low_value) {
  using Amount = std::conditional_t<kWeights, double, uint32_t>;
  auto* amounts = static_cast<Amount*>(histogram_);
  const float* values = values_;
  int64_t n = size_;
  int32_t low = ops::order_key(low_value);
  int32_t high = ops::order_key(max_);
  double above = 0.0;
  for (;;) {
    const uint32_t span = static_cast<uint32_t>(high) - static_cast<uint32_t>(low);
    const int shift = std::max(0, static_cast<int>(std::bit_width(span)) - kRowBucketBits);
    std::memset(amounts, 0, 4 * kRowBuckets * sizeof(Amount));
    if constexpr (kWeights) {
      math_.weigh(values, n, low, shift, amounts);
    } else {
      math_.count(values, n, low, shift, amounts);
    }
    // Where rounding keeps the sum below the goal, the lowest bucket that holds anything.
    int64_t found = 0;
    double above_found = above;
    for (auto bucket = static_cast<int64_t>(span >> shift); bucket >= 0; --bucket) {
      const double part = static_cast<double>(
          (amounts[bucket] + amounts[bucket + kRowBuckets]) +
          (amounts[bucket + 2 * kRowBuckets] + amounts[bucket + 3 * kRowBuckets]));
      if (part <= 0.0) continue;
      found = bucket;
      above_found = above;
      above += part;
      if (above >= goal) break;
    }
    above = above_found;
    const auto first = static_cast<uint32_t>(low) + (static_cast<uint32_t>(found) << shift);
    high = static_cast<int32_t>(
        std::min(first - static_cast<uint32_t>(low) + ((1u << shift) - 1), span) +
        static_cast<uint32_t>(low));
    low = static_cast<int32_t>(first);
    n = math_.between(values, n, value_of(low), value_of(high), bucket_);
    values = bucket_;
    if (shift == 0) break;
  }
  const float least = value_of(low);
  const double missing = goal - above;
  const double needed = kWeights ? std::ceil(missing / static_cast<double>(least)) : missing;
  return {least, std::clamp(static_cast<int64_t>(std::min(needed, 1e18)), int64_t{1}, n), n};
}

void RowDistribution::cut_at(const Found& found) {
  const bool all = found.needed >= found.equal;
  apply({found.least, all ? size_ : math_.after_equal(values_, size_, found.least, found.needed)});
}

void RowDistribution::keep_top_k(int64_t k) {
  if (k >= size_) return;
  narrow_to_top(k);
  if (k < size_) cut_at(select<false>(static_cast<double>(k), min_));
}

void RowDistribution::keep_top_p(float p) {
  if (p >= 1.0f) return;
  const double mass = total();
  // Values below (1 - p) / n of the total hold less than 1 - p together: the head is complete
  // without them. Half of that leaves room for rounding.
  const auto least =
      static_cast<float>(0.5 * (1.0 - static_cast<double>(p)) * mass / static_cast<double>(size_));
  if (least > min_) apply({least, size_});
  cut_at(select<true>(static_cast<double>(p) * mass, min_));
}

void RowDistribution::keep_min_p(float p) {
  const float least = p * max_;
  if (least > min_) apply({least, size_});
}

void RowDistribution::write_probabilities(float* out) {
  double factor = 1.0 / total();
  const float* values = values_;
  if (factor < 1e-37 || factor > 1e37) {  // no float32, or too few bits of one
    for (int64_t i = 0; i < size_; ++i) {
      kept_[i] = static_cast<float>(static_cast<double>(values_[i]) * factor);
    }
    values = kept_;
    factor = 1.0;
  }
  const auto scale = static_cast<float>(factor);
  if (ids_ == nullptr) return math_.scale(values, size_, scale, out);
  std::fill(out, out + row_size_, 0.0f);
  for (int64_t i = 0; i < size_; ++i) out[ids_[i]] = values[i] * scale;
}

int32_t RowDistribution::draw(double uniform) {
  double left = uniform * total();
  const int64_t last = blocks_of(size_) - 1;
  int64_t block = 0;
  for (; block < last && left >= sums_[block]; ++block) left -= sums_[block];
  // Rounding may carry `left` past the end of the block, or of the row.
  while (block > 0 && sums_[block] <= 0.0) --block;
  const int64_t begin = block * kRowBlock;
  const int64_t end = std::min(begin + kRowBlock, size_);
  int64_t chosen = begin;
  for (int64_t i = begin; i < end; ++i) {
    if (values_[i] <= 0.0f) continue;
    chosen = i;
    left -= static_cast<double>(values_[i]);
    if (left < 0.0) break;
  }
  return ids_ == nullptr ? static_cast<int32_t>(chosen) : ids_[chosen];
}

}  // namespace effinfer::cpu
