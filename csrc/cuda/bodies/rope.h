// Rotary position embedding: the table of angles, and the rotation of heads.
#pragma once

#include <cmath>

#include "cuda/bodies/row_chunks.h"
#include "ops/rope.h"

namespace effinfer::cuda {

struct CosSin {
  float cos;
  float sin;
};

// The cosine and sine of a float32, all but always correctly rounded for |angle| < 2^31: reduced by
// multiples of pi / 2 and summed in float64, whose own rounding (2^-52) would have to meet a number
// that near to the middle of two floats. The device's float32 functions are 2 ulp off, and its
// float64 ones keep a table in local memory for angles that never come.
EFFINFER_DEVICE CosSin cos_sin(float angle) {
  constexpr double kTwoOverPi = 0.63661977236758134308;
  // pi / 2 as the nearest double and the nearest double to the rest.
  constexpr double kHigh = 1.57079632679489655800;
  constexpr double kLow = 6.12323399573676603587e-17;
  const double x = angle;
  const double n = rint(x * kTwoOverPi);
  // The first step is exact: both products are multiples of 2^-52, and the result is below 1.
  const double r = fma(-n, kLow, fma(-n, kHigh, x));
  const double z = r * r;
  // Taylor's series: below pi / 4 the first terms that are left out are 5e-17 and 2e-18.
  double c = 1.0 / 20922789888000.0;
  c = fma(c, z, -1.0 / 87178291200.0);
  c = fma(c, z, 1.0 / 479001600.0);
  c = fma(c, z, -1.0 / 3628800.0);
  c = fma(c, z, 1.0 / 40320.0);
  c = fma(c, z, -1.0 / 720.0);
  c = fma(c, z, 1.0 / 24.0);
  c = fma(c, z, -0.5);
  c = fma(c, z, 1.0);
  double s = -1.0 / 1307674368000.0;
  s = fma(s, z, 1.0 / 6227020800.0);
  s = fma(s, z, -1.0 / 39916800.0);
  s = fma(s, z, 1.0 / 362880.0);
  s = fma(s, z, -1.0 / 5040.0);
  s = fma(s, z, 1.0 / 120.0);
  s = fma(s, z, -1.0 / 6.0);
  s = fma(s * z, r, r);
  // An infinite angle has no quadrant and a NaN for r.
  const int quadrant = fabs(n) < 0x1p40 ? static_cast<int>(static_cast<int64_t>(n) & 3) : 0;
  const double cos = quadrant % 2 == 0 ? c : s;
  const double sin = quadrant % 2 == 0 ? s : c;
  return {static_cast<float>(quadrant == 1 || quadrant == 2 ? -cos : cos),
          static_cast<float>(quadrant >= 2 ? -sin : sin)};
}

// The angle is rounded to float32 as in the reference implementations: at position 100,000 that
// decides the result. A thread an angle.
struct RopeTableKernel {
  static constexpr const char* kName = "rope_table";
  static constexpr int kThreads = 128;
  using Params = ops::RopeTableProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int half = p.dims / 2;
    const int64_t index = int64_t{unit.block} * kThreads + unit.thread;
    const int64_t row = index / half;
    const int i = static_cast<int>(index % half);
    if (row >= p.rows) return;
    const int32_t given = unit.load(p.positions + row);
    int32_t place = given;
    float factor = p.factor;
    if (p.maps() && p.is_mapped(row)) {
      place = p.map.place(given);
      factor *= p.map.growth(given, [](double x) { return log(x); });
    }
    const CosSin value = cos_sin(static_cast<float>(place) * unit.load(p.inv_freq + i));
    p.out[row * p.dims + i] = value.cos * factor;
    p.out[row * p.dims + half + i] = value.sin * factor;
  }
};

// One number of a pair (a, b) -> (a cos - b sin, b cos + a sin), of which `other` is the other one.
// The order of roundings is fixed here, so that a rotation has the same bits in every kernel.
EFFINFER_DEVICE float rotated(float mine, float other, float cos, float sin, bool is_first) {
  const float product = other * sin;
  return fmaf(mine, cos, is_first ? -product : product);
}

struct RopeParams {
  ops::ConstRows x;
  ops::Rows out;
  const float* cos_sin = nullptr;
  const int32_t* positions = nullptr;
  int heads = 0;
  int head_dim = 0;
  int dims = 0;
  int parts = 1;     // blocks of a row
  int rotating = 0;  // threads of a head that rotate: a chunk each, or one of each half
  int slots = 0;     // all threads of a head: the others copy what does not rotate
  bool vectored = false;
};

template <class T, bool kInterleaved>
struct RopeKernel {
  static constexpr const char* kName = "rope";
  static constexpr int kThreads = 128;
  static constexpr int kNumbers = kChunk<T>;
  using Params = RopeParams;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int row = unit.block / p.parts;
    const int place = unit.block % p.parts * kThreads + unit.thread;
    const int head = place / p.slots;
    const int slot = place % p.slots;
    if (head >= p.heads) return;
    const T* x = p.x.template at<const T>(row, head);
    T* out = p.out.template at<T>(row, head);
    if (slot >= p.rotating) {
      const int left = p.head_dim - p.dims;
      const int first = (slot - p.rotating) * kNumbers;
      const Quad quad = load_chunk(x + p.dims, first, left, p.vectored);
      return store_chunk(out + p.dims, first, left, p.vectored, quad);
    }
    const int64_t angles = p.positions != nullptr ? unit.load(p.positions + row) : row;
    const float* cos = p.cos_sin + angles * p.dims;
    if constexpr (kInterleaved) {
      rotate_pairs(unit, p, x, cos, slot * kNumbers, out);
    } else {
      rotate_halves(unit, p, x, cos, slot * kNumbers, out);
    }
  }

 private:
  // Numbers first.. with those half the dimensions on.
  template <class Unit>
  EFFINFER_DEVICE static void rotate_halves(Unit& unit, const Params& p, const T* x,
                                            const float* cos, int first, T* out) {
    const int half = p.dims / 2;
    const Quad low = load_chunk(x, first, half, p.vectored);
    const Quad high = load_chunk(x + half, first, half, p.vectored);
    float c[kNumbers];
    float s[kNumbers];
    load_floats(unit, cos, first, half, p.vectored, c);
    load_floats(unit, cos + half, first, half, p.vectored, s);
    float a[kNumbers];
    float b[kNumbers];
    decode<T>(unit, low, a);
    decode<T>(unit, high, b);
    EFFINFER_UNROLL
    for (int e = 0; e < kNumbers; ++e) {
      const float turned = rotated(a[e], b[e], c[e], s[e], true);
      b[e] = rotated(b[e], a[e], c[e], s[e], false);
      a[e] = turned;
    }
    store_chunk(out, first, half, p.vectored, encode<T>(unit, a));
    store_chunk(out + half, first, half, p.vectored, encode<T>(unit, b));
  }

  template <class Unit>
  EFFINFER_DEVICE static void rotate_pairs(Unit& unit, const Params& p, const T* x,
                                           const float* cos, int first, T* out) {
    const int half = p.dims / 2;
    const Quad quad = load_chunk(x, first, p.dims, p.vectored);
    float c[kNumbers / 2];
    float s[kNumbers / 2];
    load_floats(unit, cos, first / 2, half, p.vectored, c);
    load_floats(unit, cos + half, first / 2, half, p.vectored, s);
    float v[kNumbers];
    decode<T>(unit, quad, v);
    EFFINFER_UNROLL
    for (int e = 0; e < kNumbers; e += 2) {
      const float a = v[e];
      v[e] = rotated(a, v[e + 1], c[e / 2], s[e / 2], true);
      v[e + 1] = rotated(v[e + 1], a, c[e / 2], s[e / 2], false);
    }
    store_chunk(out, first, p.dims, p.vectored, encode<T>(unit, v));
  }
};

}  // namespace effinfer::cuda
