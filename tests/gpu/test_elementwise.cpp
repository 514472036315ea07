// Unary and binary operators and conversions on the GPU against float64.
#include <cmath>

#include "cpp/arrays.h"
#include "cpp/check.h"
#include "effinfer/error.h"
#include "gpu/device_arrays.h"
#include "gpu/float_rows.h"
#include "ops/convert_rows.h"
#include "ops/elementwise.h"

namespace effinfer {
namespace {

double reference(ops::UnaryOp op, double x, double parameter) {
  switch (op) {
    case ops::UnaryOp::scale:
      return x * parameter;
    case ops::UnaryOp::softcap:
      return parameter * std::tanh(x / parameter);
    case ops::UnaryOp::silu:
      return x / (1 + std::exp(-x));
    case ops::UnaryOp::gelu:
      return x / 2 * (1 + std::erf(x / std::sqrt(2.0)));
    case ops::UnaryOp::gelu_tanh:
      return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case ops::UnaryOp::relu_squared:
      return x > 0 ? x * x : 0;
    case ops::UnaryOp::sigmoid:
      return 1 / (1 + std::exp(-x));
    case ops::UnaryOp::none:
      break;
  }
  return x;
}

TEST("every unary operator, over strided rows") {
  std::mt19937 random(1);
  ops::for_unary_ops([&](ops::UnaryOp op) {
    ops::UnaryProblem p;
    p.op = op;
    p.parameter = 1.5f;
    p.rows = 7;
    p.cols = 93;
    p.x_stride = 96;
    p.out_stride = 100;
    const std::vector<float> x = normals(p.rows * p.x_stride, random);
    const DeviceArray<float> x_there(x);
    const DeviceArray<float> out_there(static_cast<size_t>(p.rows * p.out_stride));
    p.x = x_there.data();
    p.out = out_there.data();
    run_on_gpu(p);
    const std::vector<float> out = out_there.values();
    for (int64_t row = 0; row < p.rows; ++row) {
      for (int64_t col = 0; col < p.cols; ++col) {
        const double expected = reference(op, x[row * p.x_stride + col], p.parameter);
        const double error = std::abs(out[row * p.out_stride + col] - expected);
        CHECK(error <= 1e-6 * (1 + std::abs(expected)));
      }
      CHECK(std::isnan(out[row * p.out_stride + p.cols]));  // what lies between rows
    }
  });
}

TEST("binary operators") {
  std::mt19937 random(2);
  for (const ops::BinaryOp op : {ops::BinaryOp::add, ops::BinaryOp::mul}) {
    for (const int64_t size : {1, 255, 5000}) {
      const std::vector<float> a = normals(size, random);
      const std::vector<float> b = normals(size, random);
      const DeviceArray<float> a_there(a);
      const DeviceArray<float> b_there(b);
      const DeviceArray<float> out_there(static_cast<size_t>(size));
      ops::BinaryProblem p{op, a_there.data(), b_there.data(), size, out_there.data()};
      run_on_gpu(p);
      const std::vector<float> out = out_there.values();
      for (size_t i = 0; i < out.size(); ++i) {
        CHECK_EQ(out[i], op == ops::BinaryOp::add ? a[i] + b[i] : a[i] * b[i]);
      }
    }
  }
}

TEST("the host cannot touch the device's memory") {
  const DeviceArray<float> there(std::vector<float>{1, 2, 3});
  CHECK_EQ(there.values()[1], 2.0f);
  CHECK(memory_of(kGpu).device() == kGpu);
  CHECK(make_queue(kGpu)->device() == kGpu);
}

TEST("rows of one float type as those of another") {
  std::mt19937 random(21);
  constexpr int64_t kRows = 3, kGroups = 2, kCols = 37;
  for (const DType from : kRowTypes) {
    for (const DType to : kRowTypes) {
      const std::vector<float> x = rounded(from, normals(kRows * kGroups * kCols, random));
      const FloatRows there(from, x);
      const FloatRows out(to, kRows * kGroups * kCols);
      ops::ConvertRowsProblem p;
      p.from = from;
      p.to = to;
      p.factor = 1.5f;
      p.x = {there.data(), kGroups * kCols, kCols};
      // Groups in the other order.
      p.out = {out.data(), kCols, kRows * kCols};
      p.rows = kRows;
      p.groups = kGroups;
      p.cols = kCols;
      run_on_gpu(p);
      const std::vector<float> got = out.values();
      for (int64_t i = 0; i < kRows * kGroups * kCols; ++i) {
        const int64_t row = i / kCols / kGroups, group = i / kCols % kGroups;
        const auto place = static_cast<size_t>((group * kRows + row) * kCols + i % kCols);
        CHECK_EQ(got[place], rounded(to, x[static_cast<size_t>(i)] * 1.5f));
      }
    }
  }
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
