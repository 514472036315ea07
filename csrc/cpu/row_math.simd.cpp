#include "cpu/row_math.h"

#include <string.h>

#include "core/float16.h"
#include "cpu/level.h"
#include "cpu/vectors/select.h"
#include "ops/top_list.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

struct RowPasses {
  using V = F32x16;
  static constexpr int64_t kWidth = 16;
  static constexpr float kInfinity = __builtin_inff();

  static V load_some(const float* x, int64_t count, float fill) {
    alignas(64) float lanes[kWidth];
    V::set(fill).store(lanes);
    memcpy(lanes, x, static_cast<size_t>(count) * sizeof(float));
    return V::load(lanes);
  }

  // Calls visit(i, v, count) for each vector; lanes from `count` on hold `fill`.
  template <class Visit>
  [[gnu::always_inline]] static void for_vectors(const float* x, int64_t n, float fill,
                                                 Visit&& visit) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) visit(i, V::load(x + i), kWidth);
    if (i < n) visit(i, load_some(x + i, n - i, fill), n - i);
  }

  static void widen(const void* x, DType dtype, int64_t n, float* out) {
    const auto* halves = static_cast<const uint16_t*>(x);
    if (dtype == DType::f32) {
      memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
    } else if (dtype == DType::f16) {
      for (int64_t i = 0; i < n; ++i) out[i] = f16_to_f32(halves[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_f32(halves[i]);
    }
  }

  static void narrow(const float* x, DType dtype, int64_t n, void* out) {
    auto* halves = static_cast<uint16_t*>(out);
    if (dtype == DType::f32) {
      memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
    } else if (dtype == DType::f16) {
      for (int64_t i = 0; i < n; ++i) halves[i] = f32_to_f16(x[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) halves[i] = f32_to_bf16(x[i]);
    }
  }

  static RowExtent group_maxima(const float* x, int64_t n, int64_t group, float* maxima) {
    V highest = V::set(-kInfinity);
    uint32_t nan = 0;
    for (int64_t i = 0; i < n; i += group * kWidth) {
      const int64_t count = n - i < group * kWidth ? n - i : group * kWidth;
      V high = V::set(-kInfinity);
      for_vectors(x + i, count, -kInfinity, [&](int64_t, V v, int64_t) {
        nan |= bits_nan(v);
        high = max(v, high);
      });
      high.store(maxima + i / group);
      highest = max(high, highest);
    }
    return {0.0f, maximum(highest), nan != 0};
  }

  // exp(x) = 2^n e^r with |r| <= ln(2) / 2, as simd::exp but without fused multiply-adds, and by
  // e^r's Taylor polynomial of degree 7 (remainder below 2^-27). Subnormal results, which are slow,
  // are 0.
  static V exp_nonpositive(V x) {
    const V limit = V::set(-87.0f);
    const V y = max(limit, x);
    const V shifted = y * V::set(simd::kLog2e) + V::set(simd::kRound);
    const V n = shifted - V::set(simd::kRound);
    const V r = (y - n * V::set(0.693359375f)) + n * V::set(2.12194440e-4f);
    V p = V::set(1.98412698e-4f);
    p = p * r + V::set(1.38888889e-3f);
    p = p * r + V::set(8.33333333e-3f);
    p = p * r + V::set(4.16666667e-2f);
    p = p * r + V::set(1.66666667e-1f);
    p = p * r + V::set(0.5f);
    p = p * r + V::set(1.0f);
    p = p * r + V::set(1.0f);
    return where_above(x, limit, power_of_two(p, shifted));
  }

  // Sums of blocks of what `value` makes of each vector, and the extent of it.
  template <class Value>
  [[gnu::always_inline]] static RowExtent sum_blocks(const float* x, int64_t n, double* sums,
                                                     Value&& value) {
    V low = V::set(kInfinity);
    V high = V::set(-kInfinity);
    for (int64_t i = 0; i < n; i += kRowBlock) {
      const int64_t count = n - i < kRowBlock ? n - i : kRowBlock;
      auto total = no_sums(low);
      for_vectors(x + i, count, 0.0f, [&](int64_t j, V v, int64_t lanes) {
        const V y = value(i + j, v, lanes);
        total.add(y);
        if (lanes == kWidth) {
          low = min(y, low);
          high = max(y, high);
        } else {
          const uint32_t whole = (1u << lanes) - 1;
          low = min(keep(whole, y, low), low);
          high = max(keep(whole, y, high), high);
        }
      });
      double lanes[kWidth];
      total.store(lanes);
      for (int64_t half = kWidth / 2; half > 0; half /= 2) {
        for (int64_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
      }
      sums[i / kRowBlock] = lanes[0];
    }
    return {-maximum(V::set(0.0f) - low), maximum(high), false};
  }

  static RowExtent weights(const float* x, int64_t n, float top, float factor, float* out,
                           double* sums) {
    const V shift = V::set(top);
    const V scale = V::set(factor);
    return sum_blocks(x, n, sums, [&](int64_t i, V v, int64_t lanes) {
      V weight = exp_nonpositive((v - shift) * scale);
      if (lanes == kWidth) {
        weight.store(out + i);
        return weight;
      }
      weight = keep((1u << lanes) - 1, weight, V::set(0.0f));
      alignas(64) float buffer[kWidth];
      weight.store(buffer);
      memcpy(out + i, buffer, static_cast<size_t>(lanes) * sizeof(float));
      return weight;
    });
  }

  static RowExtent sum_row(const float* x, int64_t n, double* sums) {
    return sum_blocks(x, n, sums, [](int64_t, V v, int64_t) { return v; });
  }

  static int64_t keep_cut(const float* x, const int32_t* ids, int64_t n, RowCut cut, float* out,
                          int32_t* out_ids) {
    const V least = V::set(cut.least);
    int64_t kept = 0;
    for_vectors(x, n, -kInfinity, [&](int64_t i, V v, int64_t lanes) {
      uint32_t bits = 0;
      if (i + kWidth <= cut.ties_end) {
        bits = bits_from(v, least);
      } else {
        bits = bits_above(v, least);
        if (i < cut.ties_end) bits |= bits_from(v, least) & ((1u << (cut.ties_end - i)) - 1);
      }
      if (lanes < kWidth) bits &= (1u << lanes) - 1;
      if (bits == 0) return;
      if (lanes < kWidth) {
        for (; bits != 0; bits &= bits - 1, ++kept) {
          const int64_t place = i + __builtin_ctz(bits);
          out[kept] = x[place];
          out_ids[kept] = ids == nullptr ? static_cast<int32_t>(place) : ids[place];
        }
        return;
      }
      if (ids == nullptr) {
        compress(v, static_cast<int32_t>(i), bits, out + kept, out_ids + kept);
      } else {
        compress(v, ids + i, bits, out + kept, out_ids + kept);
      }
      kept += __builtin_popcount(bits);
    });
    return kept;
  }

  static int64_t between(const float* x, int64_t n, float low, float high, float* out) {
    const V least = V::set(low);
    const V most = V::set(high);
    int64_t kept = 0;
    for_vectors(x, n, 0.0f, [&](int64_t, V v, int64_t lanes) {
      uint32_t bits = bits_from(v, least) & bits_from(most, v);
      if (lanes < kWidth) bits &= (1u << lanes) - 1;
      if (bits == 0) return;
      compress(v, bits, out + kept);
      kept += __builtin_popcount(bits);
    });
    return kept;
  }

  static int64_t after_equal(const float* x, int64_t n, float value, int64_t count) {
    const V wanted = V::set(value);
    int64_t end = n;
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
      const V v = V::load(x + i);
      const int equal = __builtin_popcount(bits_from(v, wanted) & bits_from(wanted, v));
      if (equal >= count) break;
      count -= equal;
    }
    for (; i < n; ++i) {
      if (x[i] == value && --count == 0) {
        end = i + 1;
        break;
      }
    }
    return end;
  }

  // The bucket of each element, sixteen at a time: a plain loop that the compiler turns into SIMD.
  template <class Add>
  [[gnu::always_inline]] static void histogram(const float* x, int64_t n, int32_t low, int shift,
                                               Add&& add) {
    const auto base = static_cast<uint32_t>(low);
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
      uint32_t buckets[kWidth];
      for (int64_t j = 0; j < kWidth; ++j) {
        buckets[j] = (static_cast<uint32_t>(ops::order_key(x[i + j])) - base) >> shift;
      }
      for (int64_t j = 0; j < kWidth; ++j) {
        add(j % 4 * kRowBuckets + static_cast<int64_t>(buckets[j]), x[i + j]);
      }
    }
    for (; i < n; ++i) {
      add((static_cast<uint32_t>(ops::order_key(x[i])) - base) >> shift, x[i]);
    }
  }

  static void count(const float* x, int64_t n, int32_t low, int shift, uint32_t* buckets) {
    histogram(x, n, low, shift, [&](int64_t bucket, float) { ++buckets[bucket]; });
  }
  static void weigh(const float* x, int64_t n, int32_t low, int shift, double* buckets) {
    histogram(x, n, low, shift, [&](int64_t bucket, float weight) {
      buckets[bucket] += static_cast<double>(weight);
    });
  }

  static void scale(const float* x, int64_t n, float factor, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor;
  }

  static void excess(const float* a, const float* b, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) {
      const float difference = a[i] - b[i];
      out[i] = difference < 0.0f ? 0.0f : difference;  // a NaN stays one
    }
  }

  template <class T>
  static void mask_as(T* x, int64_t n, const int32_t* mask, T forbidden) {
    for (int64_t word = 0; word < n; word += 32) {
      const auto bits = static_cast<uint32_t>(mask[word / 32]);
      if (bits == ~0u) continue;
      const int64_t count = n - word < 32 ? n - word : 32;
      for (int64_t j = 0; j < count; ++j) {
        x[word + j] = (bits >> j & 1) != 0 ? x[word + j] : forbidden;
      }
    }
  }

  static void mask(void* x, DType dtype, int64_t n, const int32_t* mask) {
    if (dtype == DType::f32) {
      mask_as(static_cast<float*>(x), n, mask, -kInfinity);
    } else {
      const uint16_t forbidden = dtype == DType::f16 ? 0xfc00 : 0xff80;
      mask_as(static_cast<uint16_t*>(x), n, mask, forbidden);
    }
  }
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
const RowMath& kernels<Level::EFFINFER_LEVEL>() {
  using Passes = EFFINFER_LEVEL::RowPasses;
  static constexpr RowMath kMath = {
      Passes::widen,    Passes::narrow,  Passes::group_maxima, Passes::weights, Passes::sum_row,
      Passes::keep_cut, Passes::between, Passes::after_equal,  Passes::count,   Passes::weigh,
      Passes::scale,    Passes::excess,  Passes::mask};
  return kMath;
}

}  // namespace effinfer::cpu
