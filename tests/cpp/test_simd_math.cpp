// The polynomials of the elementary functions against double precision, at the portable level;
// the operators that use them are tested at every ISA level.
#include <algorithm>
#include <cmath>
#include <limits>

#include "check.h"
#include "cpu/vectors/math_portable.h"

namespace {

namespace p = effinfer::cpu::portable;
using Function = float (*)(float);

// The largest error in units in the last place of the result over [low, high]; NaN where one is.
double worst_ulp(Function function, double (*exact)(double), float low, float high) {
  constexpr int kPoints = 200000;
  double worst = 0;
  for (int i = 0; i < kPoints; ++i) {
    const float x = low + (high - low) * static_cast<float>(i) / kPoints;
    const double want = exact(x);
    const auto rounded = std::abs(static_cast<float>(want));
    const double ulp = std::nextafter(rounded, std::numeric_limits<float>::infinity()) - rounded;
    const double error = std::abs(function(x) - want) / ulp;
    if (std::isnan(error)) return error;
    worst = std::max(worst, error);
  }
  return worst;
}

double exact_silu(double x) {
  return x / (1 + std::exp(-x));
}
double exact_sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}
double exact_gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

float exp2_of(float x) {
  return effinfer::cpu::simd::exp2(p::F32x4::set(x)).v[0];
}

constexpr float kInf = std::numeric_limits<float>::infinity();

}  // namespace

TEST("exp is within 2 ulp, and exact where softmax relies on it") {
  CHECK(worst_ulp(p::vexp, std::exp, -87.3f, 88.7f) < 2.0);
  CHECK(worst_ulp(p::vexp, std::exp, -1.0f, 1.0f) < 2.0);
  CHECK(worst_ulp(p::vexp, std::exp, -103.0f, -87.3f) < 2.0);
  CHECK_EQ(p::vexp(0.0f), 1.0f);
  CHECK_EQ(p::vexp(-kInf), 0.0f);
  CHECK_EQ(p::vexp(-1e30f), 0.0f);
  CHECK_EQ(p::vexp(-105.0f), 0.0f);
  CHECK_EQ(p::vexp(89.0f), kInf);
  CHECK(std::isnan(p::vexp(NAN)));
}

TEST("exp2 is within 2 ulp, and exact where softmax relies on it") {
  CHECK(worst_ulp(exp2_of, std::exp2, -126.0f, 127.0f) < 2.0);
  CHECK(worst_ulp(exp2_of, std::exp2, -1.0f, 1.0f) < 2.0);
  for (const float n : {-100.0f, -1.0f, 0.0f, 12.0f}) CHECK_EQ(exp2_of(n), std::exp2(n));
  CHECK_EQ(exp2_of(-kInf), 0.0f);
  CHECK_EQ(exp2_of(-1e30f), 0.0f);
  CHECK_EQ(exp2_of(-126.0f), 0x1p-126f);
  CHECK_EQ(exp2_of(std::nextafter(-126.0f, -kInf)), 0.0f);  // none is subnormal
  CHECK_EQ(exp2_of(-151.0f), 0.0f);
  CHECK(std::isnan(exp2_of(NAN)));
}

TEST("tanh keeps its relative precision near zero") {
  CHECK(worst_ulp(p::vtanh, std::tanh, -12.0f, 12.0f) < 4.0);
  CHECK(worst_ulp(p::vtanh, std::tanh, -1e-3f, 1e-3f) < 4.0);
  CHECK_EQ(p::vtanh(kInf), 1.0f);
  CHECK_EQ(p::vtanh(-kInf), -1.0f);
  CHECK_EQ(p::vtanh(0.0f), 0.0f);
  CHECK(std::isnan(p::vtanh(NAN)));
}

TEST("silu and gelu") {
  CHECK(worst_ulp(p::vsilu, exact_silu, -20.0f, 20.0f) < 4.0);
  // The exponent's own rounding (|2u| ulps) shows where e^-2u dominates.
  CHECK(worst_ulp(p::vgelu_tanh, exact_gelu, -2.0f, 10.0f) < 8.0);
  CHECK_EQ(p::vsilu(-1000.0f), 0.0f);
  CHECK_EQ(p::vgelu_tanh(-1000.0f), 0.0f);
  CHECK_EQ(p::vsilu(1000.0f), 1000.0f);
  CHECK_EQ(p::vgelu_tanh(1000.0f), 1000.0f);
}

TEST("sigmoid") {
  const auto sigmoid = [](float x) { return effinfer::cpu::simd::sigmoid(p::F32x4::set(x)).v[0]; };
  CHECK(worst_ulp(sigmoid, exact_sigmoid, -87.0f, 20.0f) < 6.0);  // 3 * 2^-23 at a mantissa of 2
  CHECK_EQ(sigmoid(0.0f), 0.5f);
  CHECK_EQ(sigmoid(-kInf), 0.0f);
  CHECK_EQ(sigmoid(kInf), 1.0f);
  CHECK(std::isnan(sigmoid(NAN)));
}

CHECK_MAIN()
