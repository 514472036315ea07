// Matmuls by Hopper's wgmma against float64: every format, both tiles, parts, GLU, residuals and
// operands.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/float16.h"
#include "cpp/check.h"
#include "cuda/wgmma_launch.h"
#include "gpu/hopper_device.h"
#include "gpu/matmul_cases.h"
#include "gpu/mutations.h"

namespace effinfer {
namespace {

using ops::Arithmetic;
using ops::MatmulProblem;
using ops::UnaryOp;
// One weight.
MatmulProblem problem_of(const ops::Operand& x, const ops::PackedWeight& weight, float* out) {
  MatmulProblem problem;
  problem.x = x;
  problem.num_parts = 1;
  problem.parts[0] = {weight, nullptr, nullptr, out, weight.rows};
  problem.rounds_weights = true;
  return problem;
}

std::vector<float> product(const ops::Operand& x, const ops::PackedWeight& weight) {
  const DeviceArray<float> out(static_cast<size_t>(x.rows * weight.rows));
  run_on_gpu(problem_of(x, weight, out.data()));
  return out.values();
}

// The same with tiles of so many tokens, whatever would be chosen.
template <int kTokens>
std::vector<float> product_by(const ops::Operand& x, const ops::PackedWeight& weight) {
  const DeviceArray<float> out(static_cast<size_t>(x.rows * weight.rows));
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  const MatmulProblem problem = problem_of(x, weight, out.data());
  const cuda::TileParams tile = cuda::tile_params(problem, {true});
  constexpr ops::PackedFormat kQ4K = {ops::QuantBits::u4, ops::ScaleKind::super, true, 32, 0};
  constexpr ops::PackedFormat kQ8_0 = {ops::QuantBits::u8, ops::ScaleKind::direct, false, 32, 128};
  if (weight.format == kQ4K) {
    cuda::launch_wgmma_tile<cuda::WgmmaMatmul<kQ4K, kTokens>>(x, tile, *queue);
  } else {
    CHECK(weight.format == kQ8_0);
    cuda::launch_wgmma_tile<cuda::WgmmaMatmul<kQ8_0, kTokens>>(x, tile, *queue);
  }
  queue->wait();
  return out.values();
}

// Of weights as they are rounded. A weight that lies between two bfloat16 may go to either, as
// float32 differs from float64; two of them may.
Expected expected_rounded(const GpuOperand& x, int64_t token, const GpuWeight& weight,
                          int64_t row) {
  const int64_t cols = x.view.cols;
  const float* a = x.values.data() + token * cols;
  double sum = 0;
  double magnitude = 0;
  double largest = 0;
  for (int64_t k = 0; k < cols; ++k) {
    const auto at = static_cast<size_t>(row * cols + k);
    sum += double{a[k]} * bf16_to_f32(f32_to_bf16(weight.values[at]));
    magnitude += std::abs(double{a[k]} * weight.magnitudes[at]);
    largest = std::max(largest, std::abs(double{a[k]} * weight.values[at]));
  }
  const double roundings = 3 + std::min<double>(cols, 8 * std::sqrt(static_cast<double>(cols)));
  return {sum, roundings * 0x1p-24 * magnitude + 2 * 0x1p-8 * largest + 1e-30};
}

// `floats` as bfloat16, and zeros behind each token's rows.
void check_operand(const GpuOperand& out, const std::vector<float>& floats, int64_t rows) {
  const std::vector<uint8_t> bytes = out.there.values();
  for (int64_t t = 0; t < out.view.rows; ++t) {
    for (int64_t i = 0; i < ops::padded_cols(rows); ++i) {
      uint16_t bits;
      std::memcpy(&bits, bytes.data() + t * out.view.row_bytes() + i * 2, 2);
      const float expected = i < rows ? floats[static_cast<size_t>(t * rows + i)] : 0.0f;
      CHECK_EQ(bits, f32_to_bf16(expected));
    }
  }
}

std::vector<DType> wgmma_types() {
  std::vector<DType> types = matmul_types();
  std::erase(types, DType::f32);
  return types;
}

TEST("every weight type, rows that end in a group, tokens that fill no tile") {
  const OnHopper machine;
  std::mt19937 random(1);
  for (const DType dtype : wgmma_types()) {
    constexpr int64_t kRows = 45;
    constexpr int64_t kTokens = 21;
    const GpuWeight weight(dtype, kRows, 256, random);
    const GpuOperand x(Arithmetic::bf16, kTokens, 256, normals(kTokens * 256, random));
    const std::vector<float> all = product(x.view, weight.view());
    check_product(x, weight, all, expected_rounded);
    const std::vector<float> some = product(x.slice(kTokens - 1, 1), weight.view());
    CHECK(same_bits(some, {all.end() - kRows, all.end()}));
  }
}

TEST("both tiles, blocks of rows and tokens: the same bits") {
  const OnHopper machine;
  std::mt19937 random(2);
  for (const DType dtype : {DType::q4_k, DType::q8_0}) {
    const GpuWeight weight(dtype, 128 + 20, 256, random);
    const GpuOperand x(Arithmetic::bf16, 258, 256, normals(258 * 256, random));
    const std::vector<float> all = product_by<256>(x.view, weight.view());
    check_product(x, weight, all, expected_rounded);
    CHECK(same_bits(product_by<128>(x.view, weight.view()), all));
    CHECK(same_bits(product(x.slice(0, 5), weight.view()), {all.begin(), all.begin() + 5 * 148}));
  }
}

TEST("ragged depths, and more superblocks than the ring has stages") {
  const OnHopper machine;
  std::mt19937 random(3);
  for (const DType dtype : {DType::bf16, DType::f16, DType::q4_0, DType::q5_1}) {
    for (const int64_t cols : {1, 32, 63, 64, 96, 160, 64 * 19}) {
      if (!is_dense(dtype) && cols % 32 != 0) continue;
      const GpuWeight weight(dtype, 33, cols, random);
      const GpuOperand x(Arithmetic::bf16, 3, cols, normals(3 * cols, random));
      check_product(x, weight, product(x.view, weight.view()), expected_rounded);
    }
  }
}

TEST("headers of more blocks of 256 k than have a place") {
  const OnHopper machine;
  std::mt19937 random(9);
  for (const DType dtype : {DType::q4_k, DType::q6_k}) {
    constexpr int64_t kCols = 256 * 5;
    const GpuWeight weight(dtype, 33, kCols, random);
    const GpuOperand x(Arithmetic::bf16, 3, kCols, normals(3 * kCols, random));
    check_product(x, weight, product(x.view, weight.view()), expected_rounded);
  }
}

TEST("more blocks of tokens than share a band") {
  const OnHopper machine;
  std::mt19937 random(4);
  const GpuWeight weight(DType::q4_0, 270, 64, random);
  const GpuOperand x(Arithmetic::bf16, 64 * 9 + 1, 64, normals((64 * 9 + 1) * 64, random));
  check_product(x, weight, product(x.view, weight.view()), expected_rounded);
}

TEST("parts, bias and residual") {
  const OnHopper machine;
  constexpr int64_t kCols = 128;
  constexpr int64_t kTokens = 41;
  std::mt19937 random(5);
  const GpuWeight q(DType::q4_0, 290, kCols, random);
  const GpuWeight k(DType::q8_0, 40, kCols, random);
  const GpuWeight v(DType::q4_0, 17, kCols, random);
  const std::vector<float> bias = normals(290, random);
  const std::vector<float> before = normals(kTokens * 400, random);
  const DeviceArray<float> bias_there(bias);
  const DeviceArray<float> out(before);
  const GpuOperand x(Arithmetic::bf16, kTokens, kCols, normals(kTokens * kCols, random));
  MatmulProblem problem;
  problem.x = x.view;
  problem.num_parts = 3;
  problem.parts[0] = {q.view(), bias_there.data(), out.data(), out.data(), 400};
  problem.parts[1] = {k.view(), nullptr, nullptr, out.data() + 290, 400};
  problem.parts[2] = {v.view(), nullptr, nullptr, out.data() + 330, 400};
  problem.rounds_weights = true;
  run_on_gpu(problem);
  const std::vector<float> got = out.values();
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t i = 0; i < 400; ++i) {
      const auto at = static_cast<size_t>(t * 400 + i);
      if (i >= 347) {
        CHECK_EQ(got[at], before[at]);
        continue;
      }
      const GpuWeight& weight = i < 290 ? q : i < 330 ? k : v;
      Expected expected = expected_rounded(x, t, weight, i < 290 ? i : i < 330 ? i - 290 : i - 330);
      if (i < 290) {
        expected.value += double{bias[static_cast<size_t>(i)]} + before[at];
        expected.slack += 0x1p-22 * (std::abs(expected.value) + std::abs(before[at]));
      }
      CHECK(is_near(got[at], expected));
    }
  }
}

TEST("GLU, as floats and as an operand with its padding") {
  const OnHopper machine;
  constexpr int64_t kTokens = 10;
  constexpr int64_t kRows = 150;
  std::mt19937 random(6);
  const GpuWeight gate(DType::q4_k, kRows, 256, random);
  const GpuWeight up(DType::q4_k, kRows, 256, random);
  const GpuOperand x(Arithmetic::bf16, kTokens, 256, normals(kTokens * 256, random));
  MatmulProblem problem;
  problem.x = x.view;
  problem.num_parts = 2;
  const DeviceArray<float> out(static_cast<size_t>(kTokens * kRows));
  problem.parts[0] = {gate.view(), nullptr, nullptr, out.data(), kRows};
  problem.parts[1] = {up.view(), nullptr, nullptr, nullptr, 0};
  problem.glu = UnaryOp::silu;
  problem.rounds_weights = true;
  run_on_gpu(problem);
  const std::vector<float> floats = out.values();
  for (int64_t i = 0; i < kTokens * kRows; ++i) {
    const Expected a = expected_rounded(x, i / kRows, gate, i % kRows);
    const Expected b = expected_rounded(x, i / kRows, up, i % kRows);
    const double value = a.value / (1 + std::exp(-a.value)) * b.value;
    // |silu'| is below 1.1.
    const double slack = 1.1 * a.slack * std::abs(b.value) + std::abs(a.value) * b.slack +
                         a.slack * b.slack + 0x1p-20 * std::abs(value);
    CHECK(is_near(floats[static_cast<size_t>(i)], {value, slack}));
  }
  const GpuOperand as_operand(Arithmetic::bf16, kTokens, kRows,
                              std::vector<float>(kTokens * kRows, 7.0f));
  problem.out_operand = as_operand.view;
  run_on_gpu(problem);
  check_operand(as_operand, floats, kRows);
}

TEST("an operand of many tokens") {
  const OnHopper machine;
  constexpr int64_t kTokens = 41;
  constexpr int64_t kRows = 150;
  std::mt19937 random(10);
  const GpuWeight weight(DType::q4_0, kRows, 128, random);
  const GpuOperand x(Arithmetic::bf16, kTokens, 128, normals(kTokens * 128, random));
  const std::vector<float> floats = product(x.view, weight.view());
  const GpuOperand out(Arithmetic::bf16, kTokens, kRows, std::vector<float>(kTokens * kRows, 7.0f));
  MatmulProblem problem = problem_of(x.view, weight.view(), nullptr);
  problem.out_operand = out.view;
  run_on_gpu(problem);
  check_operand(out, floats, kRows);
}

TEST("nothing to do") {
  const OnHopper machine;
  std::mt19937 random(7);
  const GpuWeight weight(DType::q4_0, 16, 64, random);
  const GpuOperand x(Arithmetic::bf16, 1, 64, normals(64, random));
  CHECK(product(x.slice(0, 0), weight.view()).empty());
}

TEST("each barrier, wait and fence") {
  const OnHopper machine;
  std::mt19937 random(8);
  constexpr int64_t kCols = 64 * 11;
  const GpuWeight weight(DType::q8_0, 256, kCols, random);
  const GpuOperand x(Arithmetic::bf16, 3, kCols, normals(3 * kCols, random));
  const std::vector<float> expected = product(x.view, weight.view());
  expect_every_barrier_matters([&] { return same_bits(product(x.view, weight.view()), expected); },
                               40);
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
