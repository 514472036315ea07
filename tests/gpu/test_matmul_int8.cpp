// Products of int8 operands on the GPU: the bits of the CPU's kernels.
#include <effinfer/ops/matmul.h>

#include <cstring>

#include "cpp/check.h"
#include "cpu/operand.h"
#include "gpu/matmul_cases.h"
#include "gpu/mutations.h"

namespace effinfer {
namespace {

using ops::Arithmetic;
using ops::MatmulProblem;

constexpr DType kTypes[] = {DType::q4_0,   DType::q4_1,   DType::q5_0,  DType::q5_1, DType::q8_0,
                            DType::q2_k,   DType::q3_k,   DType::q4_k,  DType::q5_k, DType::q6_k,
                            DType::iq4_nl, DType::iq4_xs, DType::tq1_0, DType::tq2_0};

// int8 rows in both memories.
struct Rows {
  Rows(int64_t rows, int64_t cols, std::mt19937& random)
      : here{Arithmetic::int8, rows, cols, nullptr},
        bytes(static_cast<size_t>(rows * here.row_bytes()) + 64) {
    here.data = bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64);
    const std::vector<float> x = normals(rows * cols, random);
    for (int64_t t = 0; t < rows; ++t) {
      cpu::store_operand_row(current_isa())(here, t, x.data() + t * cols);
    }
    there = DeviceArray<uint8_t>(
        std::vector<uint8_t>(here.row(0), here.row(0) + rows * here.row_bytes()));
  }
  ops::Operand view(int64_t first, int64_t rows) const {
    ops::Operand operand = here;
    operand.data = there.data() + first * here.row_bytes();
    operand.rows = rows;
    return operand;
  }

  ops::Operand here;
  std::vector<uint8_t> bytes;
  DeviceArray<uint8_t> there;
};

MatmulProblem problem_of(const ops::Operand& x, const ops::PackedWeight& weight, float* out) {
  MatmulProblem problem;
  problem.x = x;
  problem.num_parts = 1;
  problem.parts[0] = {weight, nullptr, nullptr, out, weight.rows};
  return problem;
}

std::vector<float> on_cpu(const Rows& x, const GpuWeight& weight) {
  std::vector<float> out(static_cast<size_t>(x.here.rows * weight.packed.view.rows));
  ThreadPool pool(1);
  run_alone(problem_of(x.here, weight.packed.view, out.data()), pool);
  return out;
}

std::vector<float> there(const ops::Operand& x, const GpuWeight& weight) {
  const DeviceArray<float> out(static_cast<size_t>(x.rows * weight.packed.view.rows));
  run_on_gpu(problem_of(x, weight.view(), out.data()));
  return out.values();
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST("weights of all types, and any number of rows") {
  std::mt19937 random(1);
  for (const DType dtype : kTypes) {
    const int64_t cols = 256 * (1 + static_cast<int64_t>(random() % 4));
    const int64_t rows = 5 + static_cast<int64_t>(random() % 40);
    const GpuWeight weight(dtype, rows, cols, random);
    const Rows x(19, cols, random);
    const std::vector<float> expected = on_cpu(x, weight);
    for (const int64_t n : {1, 5, 8, 19}) {
      CHECK(
          same_bits(there(x.view(19 - n, n), weight), {expected.end() - n * rows, expected.end()}));
    }
  }
}

TEST("columns that are no whole superblocks") {
  std::mt19937 random(2);
  for (const int64_t cols : {32, 96, 544, 1120}) {
    for (const DType dtype : {DType::q4_0, DType::q5_1, DType::q8_0}) {
      const GpuWeight weight(dtype, 17, cols, random);
      const Rows x(3, cols, random);
      CHECK(same_bits(there(x.view(0, 3), weight), on_cpu(x, weight)));
    }
  }
}

TEST("the operator, with a bias and a residual") {
  std::mt19937 random(3);
  constexpr int64_t kRows = 40, kCols = 512, kTokens = 9;
  std::vector<uint8_t> bytes(TensorView{nullptr, DType::q4_k, {kRows, kCols}}.num_bytes());
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  for (size_t i = 1; i < bytes.size(); i += 2) bytes[i] = (bytes[i] & 0x83) | 0x28;
  ThreadPool pool(1);
  const ops::PackedMatrix weight({bytes.data(), DType::q4_k, {kRows, kCols}}, pool);
  const std::vector<float> x = normals(kTokens * kCols, random);
  const std::vector<float> bias = normals(kRows, random);
  const std::vector<float> residual = normals(kTokens * kRows, random);
  std::vector<float> expected(residual.size());
  ops::matmul(x.data(), kTokens, weight, ops::MatmulArithmetic::int8, bias.data(), residual.data(),
              expected.data(), pool);
  const DeviceArray<float> x_there(x), bias_there(bias), out(residual);
  const ops::PackedMatrix weight_there = weight.to(kGpu);
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  ops::matmul(x_there.data(), kTokens, weight_there, ops::MatmulArithmetic::int8, bias_there.data(),
              out.data(), out.data(), *queue);
  queue->wait();
  CHECK(same_bits(out.values(), expected));
}

TEST("both barriers matter") {
  std::mt19937 random(4);
  const GpuWeight weight(DType::q4_k, 20, 1024, random);
  const Rows x(3, 1024, random);
  const std::vector<float> right = on_cpu(x, weight);
  expect_every_barrier_matters([&] { return same_bits(there(x.view(0, 3), weight), right); });
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
