// Conversions of floats: a few operations on each element in order, which compilers vectorise.
#include "ops/convert_rows.h"

#include <cmath>

#include "cpu/float_elements.h"
#include "cpu/level.h"

namespace effinfer::cpu {
namespace {

// Elements that a thread claims at once.
constexpr int64_t kChunk = 16 << 10;

float largest(DType dtype) {
  return dtype == DType::f8_e4m3 ? 448.0f : 57344.0f;
}

template <class From, class To>
void convert(const ops::ConvertRowsProblem& p, int64_t row, int64_t group) {
  const auto* x = p.x.template at<const typename From::Stored>(row, group);
  auto* out = p.out.template at<typename To::Stored>(row, group);
  if constexpr (sizeof(typename To::Stored) > 1) {
    for (int64_t i = 0; i < p.cols; ++i) out[i] = To::store(From::load(x[i]) * p.factor);
    return;
  }
  const float limit = largest(p.to);
  for (int64_t i = 0; i < p.cols; ++i) {
    const float y = From::load(x[i]) * p.factor;
    out[i] = To::store(std::fabs(y) > limit ? std::copysign(limit, y) : y);  // NaN: not greater
  }
}

}  // namespace

template <>
void run<Level::portable>(const ops::ConvertRowsProblem& p, Team& team) {
  const int64_t count = p.rows * p.groups;
  const int64_t step = kChunk / (p.cols + 1) + 1;
  with_float_elements(p.from, [&]<class From>() {
    with_float_elements(p.to, [&]<class To>() {
      team.for_chunks((count + step - 1) / step, [&](int64_t chunk) {
        const int64_t end = chunk * step + step < count ? chunk * step + step : count;
        for (int64_t i = chunk * step; i < end; ++i) {
          convert<From, To>(p, i / p.groups, i % p.groups);
        }
      });
    });
  });
}

}  // namespace effinfer::cpu
