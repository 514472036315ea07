// What codes of a page lack, as outliers and low-rank factors (ops/coded_pages.h): GEAR (Kang et
// al., arXiv:2403.05527, algorithm 1). Outliers are taken out before ranges are measured, and
// factors are of what codes leave of the other numbers.
#pragma once

#include <cstdint>

#include "core/float16.h"
#include "cpu/level.h"
#include "cpu/vectors/kv.h"
#include "cpu/vectors/select.h"
#include "ops/coded_pages.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// Adding it rounds numbers below 2^22 to integers, to nearest even.
constexpr float kRounder = 0x1.8p23f;

// The nearest codes.
template <class V>
[[gnu::always_inline]] inline V code_of(V x, V start, V inverse_step, float most_code) {
  const V place = max((x - start) * inverse_step, V::set(0.0f));
  return min(place, V::set(most_code)) + V::set(kRounder) - V::set(kRounder);
}

// Keys (dimensions x tokens) or values (tokens x dimensions) of one head of a page.
class PageRest {
 public:
  using V = KvBf16::V;
  static constexpr int64_t kMostInner = 256;
  static constexpr int64_t kMostNumbers = 256 * 64;

  PageRest(const ops::CodedPages& coded, int64_t inner, int64_t columns)
      : coded_(coded), inner_(inner), columns_(columns) {}

  // To be filled: columns of an inner row.
  float* row(int64_t inner) { return numbers_ + inner * columns_; }

  // Takes out the numbers that are farthest from the mean of their row, and puts the mean of the
  // others in their place, which hardly widens a range.
  void take_outliers() {
    if (coded_.outliers == 0) return;
    float means[kMostInner];
    for (int64_t i = 0; i < inner_; ++i) {
      V sums = V::set(0.0f);
      for (int64_t c = 0; c < columns_; c += 16) sums = sums + V::load(row(i) + c);
      means[i] = sum(sums) / static_cast<float>(columns_);
    }
    const float distance = least_distance(means);
    for (int64_t i = 0; i < inner_; ++i) take_outliers_of(i, means[i], distance);
  }

  // Subtracts what codes of a range stand for: an inner row's columns [first, end).
  void subtract_codes(int64_t inner, int64_t first, int64_t end, float start, float step,
                      float most_code) {
    const V inverse = V::set(step > 0.0f ? 1.0f / step : 0.0f);
    for (int64_t c = first; c < end; c += 16) {
      const V x = V::load(row(inner) + c);
      const V code = code_of(x, V::set(start), inverse, most_code);
      (x - fma(code, V::set(step), V::set(start))).store(row(inner) + c);
    }
  }

  // Of what is left then.
  void write(uint8_t* to) {
    auto* factor = reinterpret_cast<Bf16*>(to);
    for (int32_t i = 0; i < coded_.rank; ++i, factor += inner_ + columns_) {
      write_factors(factor, factor + inner_);
    }
    auto* places = reinterpret_cast<uint16_t*>(factor);
    for (int32_t i = 0; i < coded_.outliers; ++i) {
      const bool is_one = i < num_taken_;
      places[i] = is_one ? places_[i] : 0;
      const float left = is_one ? taken_[i] + row(places_[i] >> 8)[places_[i] & 255] : 0.0f;
      places[coded_.outliers + i] = f32_to_bf16(left);
    }
  }

 private:
  void take_outliers_of(int64_t i, float mean, float distance) {
    const int32_t first = num_taken_;
    float others = 0.0f;
    for (int64_t c = 0; c < columns_; ++c) {
      const float x = row(i)[c];
      if (__builtin_fabsf(x - mean) > distance) {  // as count_beyond() has it: no NaN is one
        places_[num_taken_] = static_cast<uint16_t>(i << 8 | c);
        taken_[num_taken_++] = x;
      } else {
        others += x;
      }
    }
    const int64_t count = columns_ - (num_taken_ - first);
    const float instead = count > 0 ? others / static_cast<float>(count) : mean;
    for (int32_t n = first; n < num_taken_; ++n) {
      taken_[n] -= instead;
      row(i)[places_[n] & 255] = instead;
    }
  }

  // The least distance that so many numbers, or fewer, exceed: positive floats order like their
  // bits.
  float least_distance(const float* means) {
    uint32_t low = 0;
    uint32_t high = 0x7f800000;  // infinity, which none does
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;
      if (count_beyond(means, __builtin_bit_cast(float, middle)) <= coded_.outliers) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return __builtin_bit_cast(float, low);
  }
  int32_t count_beyond(const float* means, float distance) {
    int32_t count = 0;
    for (int64_t i = 0; i < inner_; ++i) {
      for (int64_t c = 0; c < columns_; c += 16) {
        const V x = abs(V::load(row(i) + c) - V::set(means[i]));
        count += __builtin_popcount(bits_above(x, V::set(distance)));
      }
    }
    return count;
  }

  // Power iterations from the longest row on; a few come near enough, as any factors leave less.
  void write_factors(Bf16* inner_factor, Bf16* column_factor) {
    constexpr int kIterations = 3;
    float u[kMostInner];
    float w[kMostInner];
    start_from_longest_row(w);
    for (int i = 0; i < kIterations; ++i) {
      multiply(w, u);
      multiply_transposed(u, w);
      normalise(w);
    }
    multiply(w, u);
    round(u, inner_, inner_factor);
    round(w, columns_, column_factor);
    for (int64_t i = 0; i < inner_; ++i) {
      for (int64_t c = 0; c < columns_; c += 16) {
        fma(V::set(-u[i]), V::load(w + c), V::load(row(i) + c)).store(row(i) + c);
      }
    }
  }
  float dot(const float* a, const float* b) const {
    V sums = V::set(0.0f);
    for (int64_t c = 0; c < columns_; c += 16) sums = fma(V::load(a + c), V::load(b + c), sums);
    return sum(sums);
  }
  void start_from_longest_row(float* w) {
    int64_t longest = 0;
    float most = 0.0f;
    for (int64_t i = 0; i < inner_; ++i) {
      const float length = dot(row(i), row(i));
      if (length <= most) continue;
      most = length;
      longest = i;
    }
    for (int64_t c = 0; c < columns_; ++c) w[c] = row(longest)[c];
    normalise(w);
  }
  void multiply(const float* w, float* u) {
    for (int64_t i = 0; i < inner_; ++i) u[i] = dot(row(i), w);
  }
  void multiply_transposed(const float* u, float* w) {
    for (int64_t c = 0; c < columns_; c += 16) {
      V sums = V::set(0.0f);
      for (int64_t i = 0; i < inner_; ++i) {
        sums = fma(V::set(u[i]), V::load(row(i) + c), sums);
      }
      sums.store(w + c);
    }
  }
  // To length 1; what is no longer than nothing becomes zeros.
  void normalise(float* w) const {
    const float length = __builtin_sqrtf(dot(w, w));
    const V inverse = V::set(length > 0x1p-60f ? 1.0f / length : 0.0f);
    for (int64_t c = 0; c < columns_; c += 16) (V::load(w + c) * inverse).store(w + c);
  }
  // To bfloat16, and back.
  static void round(float* x, int64_t count, Bf16* to) {
    for (int64_t i = 0; i < count; i += 16) {
      V::load(x + i).store(to + i);
      V::load(to + i).store(x + i);
    }
  }

  const ops::CodedPages& coded_;
  int64_t inner_;
  int64_t columns_;
  int32_t num_taken_ = 0;
  uint16_t places_[ops::CodedPages::kMostOutliers];
  float taken_[ops::CodedPages::kMostOutliers];
  alignas(64) float numbers_[kMostNumbers];
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
