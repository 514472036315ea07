// Gated products and merged attention states on the GPU against float64.
#include "cpp/arrays.h"
#include "cpp/check.h"
#include "effinfer/error.h"
#include "gpu/float_rows.h"
#include "gpu/mutations.h"
#include "ops/activation.h"
#include "ops/merge_states.h"

namespace effinfer {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

double activation(ops::UnaryOp op, double x) {
  switch (op) {
    case ops::UnaryOp::silu:
      return x / (1 + std::exp(-x));
    case ops::UnaryOp::gelu:
      return x / 2 * (1 + std::erf(x / std::sqrt(2.0)));
    case ops::UnaryOp::gelu_tanh:
      return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case ops::UnaryOp::relu_squared:
      return x > 0 ? x * x : 0;
    default:
      return 1 / (1 + std::exp(-x));
  }
}

void check_gated(ops::UnaryOp op, DType dtype, int64_t cols, int64_t gap, std::mt19937& random) {
  constexpr int64_t kRows = 2;
  constexpr int64_t kGroups = 3;
  const int64_t in = 2 * cols + gap, out = cols + gap;
  const std::vector<float> x = rounded(dtype, normals(kRows * kGroups * in, random));
  const FloatRows x_there(dtype, x);
  const FloatRows out_there(dtype, kRows * kGroups * out);
  ops::GatedProblem p;
  p.op = op;
  p.dtype = dtype;
  p.x = {x_there.data(), kGroups * in, in};
  p.rows = kRows;
  p.groups = kGroups;
  p.cols = cols;
  p.out = {out_there.data(), kGroups * out, out};
  run_on_gpu(p);
  const std::vector<float> got = out_there.values();
  for (int64_t i = 0; i < kRows * kGroups; ++i) {
    for (int64_t k = 0; k < cols; ++k) {
      const double gate = x[static_cast<size_t>(i * in + k)];
      const double up = x[static_cast<size_t>(i * in + cols + k)];
      const double y = activation(op, gate) * up;
      const double error = std::abs(got[static_cast<size_t>(i * out + k)] - y);
      // The functions are float32 formulas, off by a few roundings of their largest term.
      CHECK(error <=
            1e-6 * (1 + std::abs(gate)) * std::abs(up) + std::abs(y) * rounding(dtype) + 0x1p-25);
    }
    for (int64_t k = 0; k < gap; ++k) {
      CHECK(std::isnan(got[static_cast<size_t>(i * out + cols + k)]));
    }
  }
}

TEST("gated products of every activation, type and length") {
  std::mt19937 random(1);
  ops::for_unary_ops([&](ops::UnaryOp op) {
    if (!is_activation(op)) return;
    for (const DType dtype : kRowTypes) {
      for (const int64_t cols : {1, 9, 64, 520, 1100}) {
        for (const int64_t gap : {0, 3, 8}) check_gated(op, dtype, cols, gap, random);
      }
    }
  });
  ops::GatedProblem none;
  none.op = ops::UnaryOp::silu;
  none.cols = 8;
  run_on_gpu(none);
}

struct Merge {
  int64_t states;
  int64_t tokens;
  int64_t heads;
  int64_t head_dim;
  bool natural = false;
  bool in_place = false;
  bool masked = false;
};

struct Merged {
  std::vector<float> v, s;
};

Merged run_merge(const Merge& m, DType dtype, const std::vector<std::vector<float>>& v,
                 const std::vector<std::vector<float>>& s, const std::vector<uint8_t>& mask) {
  std::vector<FloatRows> v_there;
  std::vector<FloatRows> s_there;
  std::vector<const void*> v_data;
  std::vector<const float*> s_data;
  for (size_t i = 0; i < v.size(); ++i) {
    v_there.emplace_back(dtype, v[i]);
    s_there.emplace_back(DType::f32, s[i]);
    v_data.push_back(v_there.back().data());
    s_data.push_back(static_cast<const float*>(s_there.back().data()));
  }
  const FloatRows out_v(dtype, m.tokens * m.heads * m.head_dim);
  const FloatRows out_s(DType::f32, m.tokens * m.heads);
  const DeviceArray<uint8_t> mask_there(mask);
  ops::MergeStatesProblem p;
  p.v = v_data.data();
  p.s = s_data.data();
  p.num_states = m.states;
  p.tokens = m.tokens;
  p.heads = m.heads;
  p.head_dim = m.head_dim;
  p.v_stride = m.heads * m.head_dim;
  p.s_stride = m.heads;
  p.dtype = dtype;
  p.natural = m.natural;
  p.mask = m.masked ? mask_there.data() : nullptr;
  p.out_v = m.in_place ? v_there[0].data() : out_v.data();
  p.out_s = static_cast<float*>(m.in_place ? s_there[0].data() : out_s.data());
  run_on_gpu(p);
  return m.in_place ? Merged{v_there[0].values(), s_there[0].values()}
                    : Merged{out_v.values(), out_s.values()};
}

void check_merge(const Merge& m, DType dtype, std::mt19937& random) {
  const int64_t vectors = m.tokens * m.heads;
  std::vector<std::vector<float>> v, s;
  std::vector<uint8_t> mask;
  for (int64_t i = 0; i < m.tokens; ++i) mask.push_back(static_cast<uint8_t>(i % 2));
  for (int64_t i = 0; i < m.states; ++i) {
    v.push_back(rounded(dtype, normals(vectors * m.head_dim, random)));
    s.push_back(normals(vectors, random));
    for (float& value : s.back()) value *= 5;
    s.back()[0] = -kInfinity;  // no state of the first head weighs anything
    if (i == 1) {              // what weighs nothing is not read
      s.back().back() = -kInfinity;
      std::fill(v.back().end() - m.head_dim, v.back().end(), kInfinity);
    }
  }
  const Merged got = run_merge(m, dtype, v, s, mask);
  const double base = m.natural ? std::exp(1.0) : 2.0;
  for (int64_t i = 0; i < vectors; ++i) {
    const auto at = static_cast<size_t>(i);
    const bool skipped = m.masked && mask[static_cast<size_t>(i / m.heads)] == 0;
    double total = 0;
    for (const auto& state : s) total += std::pow(base, state[at]);
    if (skipped) {
      CHECK(m.in_place ? same_bits(got.s[at], s[0][at]) : std::isnan(got.s[at]));
    } else if (total == 0) {
      CHECK_EQ(got.s[at], -kInfinity);
    } else {
      CHECK(std::abs(got.s[at] - std::log(total) / std::log(base)) <= 4e-6);
    }
    for (int64_t d = 0; d < m.head_dim; ++d) {
      const auto element = static_cast<size_t>(i * m.head_dim + d);
      if (skipped) {
        CHECK(m.in_place ? got.v[element] == v[0][element] : std::isnan(got.v[element]));
        continue;
      }
      double mean = 0, size = 0;
      for (size_t state = 0; state < s.size() && total > 0; ++state) {
        const double weight = std::pow(base, s[state][at]) / total;
        if (weight == 0) continue;
        mean += weight * v[state][element];
        size += weight * std::abs(v[state][element]);
      }
      // Weights are of differences of s, up to 40 in size and rounded to 2^-19.
      CHECK(std::abs(got.v[element] - mean) <=
            size * 1e-5 + std::abs(mean) * rounding(dtype) + 0x1p-25);
    }
  }
}

TEST("merged states of every type and number") {
  std::mt19937 random(2);
  const Merge shapes[] = {{2, 3, 4, 64},
                          {2, 3, 4, 128, true, true},
                          {1, 1, 1, 1},
                          {5, 4, 3, 37, true, false, true},
                          {3, 5, 2, 256, false, true, true},
                          {224, 1, 3, 16, true}};
  for (const DType dtype : kRowTypes) {
    for (const Merge& shape : shapes) check_merge(shape, dtype, random);
  }
}

TEST("a NaN among the sums makes all of its head a NaN") {
  const Merge m{3, 1, 2, 8};
  std::vector<std::vector<float>> v(3, std::vector<float>(16, 1.0f));
  std::vector<std::vector<float>> s(3, std::vector<float>(2, 0.5f));
  s[2][0] = std::numeric_limits<float>::quiet_NaN();
  const Merged got = run_merge(m, DType::f32, v, s, {});
  CHECK(std::isnan(got.s[0]) && std::isnan(got.v[0]) && std::isnan(got.v[7]));
  CHECK(std::abs(got.v[8] - 1.0f) <= 1e-6f);
}

TEST("merged states need their barriers") {
  const Merge m{40, 1, 2, 64, false, true};
  std::mt19937 random(4);
  std::vector<std::vector<float>> v, s;
  for (int i = 0; i < 40; ++i) {
    v.push_back(normals(128, random));
    s.push_back(normals(2, random));
  }
  const Merged right = run_merge(m, DType::f32, v, s, {});
  const auto check = [&] {
    const Merged got = run_merge(m, DType::f32, v, s, {});
    return same_bits(got.v, right.v) && same_bits(got.s, right.s);
  };
  expect_every_barrier_matters(check, 5);
}

TEST("more states than parameters hold are refused") {
  ops::MergeStatesProblem p;
  p.num_states = 225;
  CHECK_THROWS(Unsupported, "num_states", run_on_gpu(p));
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
