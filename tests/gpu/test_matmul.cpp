// Matmuls on the GPU against float64: every format, any number of tokens, parts, GLU, residuals and
// operands.
#include "cpp/check.h"
#include "effinfer/error.h"
#include "gpu/hopper_device.h"
#include "gpu/matmul_cases.h"
#include "gpu/mutations.h"
#include "gpu/paths.h"
#include "gpu/shared_bytes.h"

namespace effinfer {
namespace {

using ops::Arithmetic;
using ops::MatmulProblem;
using ops::UnaryOp;

// x times one weight's first `rows` rows.
std::vector<float> product(const ops::Operand& x, const ops::PackedWeight& weight) {
  const DeviceArray<float> out(static_cast<size_t>(x.rows * weight.rows));
  MatmulProblem problem;
  problem.x = x;
  problem.num_parts = 1;
  problem.parts[0] = {weight, nullptr, nullptr, out.data(), weight.rows};
  run_on_gpu(problem);
  return out.values();
}

// Every type with rows that end in the middle of a group, and a unit of one group: right, and the
// same bits for all numbers of tokens.
void check_type(DType dtype, Arithmetic arithmetic, int64_t cols, std::mt19937& random) {
  constexpr int64_t kRows = 45;
  constexpr int64_t kTokens = 33;
  const GpuWeight weight(dtype, kRows, cols, random);
  const GpuOperand x(arithmetic, kTokens, cols, normals(kTokens * cols, random));
  const std::vector<float> all = product(x.view, weight.view());
  check_product(x, weight, all, expected_output);
  for (const int64_t n : {1, 2, 5, 8, 9, 17}) {
    const std::vector<float> some = product(x.slice(kTokens - n, n), weight.view());
    CHECK(same_bits(some, {all.end() - n * kRows, all.end()}));
  }
}

TEST("every weight type times bf16 operands of 1 to 33 tokens") {
  std::mt19937 random(1);
  for (const DType dtype : matmul_types()) check_type(dtype, Arithmetic::bf16, 256, random);
}

TEST("slices of many superblocks") {
  std::mt19937 random(2);
  for (const DType dtype : {DType::q4_0, DType::q4_k, DType::q6_k, DType::bf16}) {
    const int64_t cols = 256 * 15;
    const GpuWeight weight(dtype, 20, cols, random);
    const GpuOperand x(Arithmetic::bf16, 33, cols, normals(33 * cols, random));
    const std::vector<float> all = product(x.view, weight.view());
    check_product(x, weight, all, expected_output);
    for (const int64_t n : {1, 9, 20}) {
      CHECK(same_bits(product(x.slice(0, n), weight.view()), {all.begin(), all.begin() + 20 * n}));
    }
  }
}

// A block of the one has four units of four slices, of the other one unit of sixteen.
TEST("parts with few rows and with many share one call") {
  constexpr int64_t kCols = 64 * 32;
  std::mt19937 random(12);
  const GpuWeight many(DType::q8_0, 265 * 32 + 1, kCols, random);
  const GpuWeight few(DType::q8_0, 40, kCols, random);
  const GpuOperand x(Arithmetic::bf16, 1, kCols, normals(kCols, random));
  const std::vector<float> alone[] = {product(x.view, many.view()), product(x.view, few.view())};
  check_product(x, many, alone[0], expected_output);
  const DeviceArray<float> out[] = {DeviceArray<float>(alone[0].size()),
                                    DeviceArray<float>(alone[1].size())};
  MatmulProblem problem;
  problem.x = x.view;
  problem.num_parts = 2;
  problem.parts[0] = {many.view(), nullptr, nullptr, out[0].data(), many.view().rows};
  problem.parts[1] = {few.view(), nullptr, nullptr, out[1].data(), few.view().rows};
  run_on_gpu(problem);
  for (int i = 0; i < 2; ++i) CHECK(same_bits(out[i].values(), alone[i]));
}

// From two places in the rings of eight warps to five in those of 16.
constexpr int64_t kSharedBytes[] = {64 << 10, 99 << 10, 120 << 10, 163 << 10, 227 << 10};

TEST("every weight type on GPUs with little shared memory and with much") {
  constexpr int64_t kRows = 40;
  constexpr int64_t kCols = 64 * 16 * 3;
  constexpr int64_t kTokens = 18;
  std::mt19937 random(14);
  for (const DType dtype : matmul_types()) {
    if (dtype == DType::f32) continue;
    const GpuWeight weight(dtype, kRows, kCols, random);
    const GpuOperand x(Arithmetic::bf16, kTokens, kCols, normals(kTokens * kCols, random));
    const std::vector<float> all = product(x.view, weight.view());
    check_product(x, weight, all, expected_output);
    // Of types with the same layout of places one has all sizes.
    const bool is_first = dtype == DType::q4_0 || dtype == DType::q6_k || dtype == DType::bf16;
    for (const int64_t bytes : of_one_path(std::span(kSharedBytes).first(is_first ? 5 : 1))) {
      const SharedBytes shared(bytes);
      for (const int64_t n : {3, 10, 18}) {
        const std::vector<float> some = product(x.slice(0, n), weight.view());
        CHECK(same_bits(some, {all.begin(), all.begin() + n * kRows}));
      }
    }
  }
}

TEST("every weight type times f32 operands") {
  std::mt19937 random(3);
  for (const DType dtype : matmul_types()) check_type(dtype, Arithmetic::f32, 256, random);
}

TEST("ragged shapes") {
  std::mt19937 random(4);
  for (const Arithmetic arithmetic : {Arithmetic::bf16, Arithmetic::f32}) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32, DType::q4_1, DType::q8_0}) {
      // The last one has more superblocks than a block of float32 products has warps.
      for (const int64_t cols : {1, 32, 63, 96, 160, 544}) {
        if (!is_dense(dtype) && cols % 32 != 0) continue;
        constexpr int64_t kRows[] = {33, 1, 16, 31, 200};
        for (const int64_t rows : of_one_path(kRows)) {
          const GpuWeight weight(dtype, rows, cols, random);
          const GpuOperand x(arithmetic, 3, cols, normals(3 * cols, random));
          check_product(x, weight, product(x.view, weight.view()), expected_output);
        }
      }
    }
  }
}

// With many blocks kernels load less far ahead, and with many units they cut k less: the first rows
// alone show that the former changes no bits.
TEST("many rows") {
  std::mt19937 random(5);
  for (const DType dtype : matmul_types()) {
    const int64_t rows = 161 * 32 + 1;
    const GpuWeight weight(dtype, rows, 512, random);
    const GpuOperand x(Arithmetic::bf16, 1, 512, normals(512, random));
    const std::vector<float> all = product(x.view, weight.view());
    check_product(x, weight, all, expected_output);
    CHECK(same_bits(product(x.view, weight.view(77)), {all.begin(), all.begin() + 77}));
  }
  const GpuWeight weight(DType::q8_0, 32 * 1024, 256, random);
  const GpuOperand x(Arithmetic::bf16, 2, 256, normals(2 * 256, random));
  check_product(x, weight, product(x.view, weight.view()), expected_output);
}

TEST("more tokens than a block takes") {
  std::mt19937 random(6);
  for (const Arithmetic arithmetic : {Arithmetic::bf16, Arithmetic::f32}) {
    const GpuWeight weight(DType::q5_k, 40, 256, random);
    const GpuOperand x(arithmetic, 70, 256, normals(70 * 256, random));
    const std::vector<float> all = product(x.view, weight.view());
    check_product(x, weight, all, expected_output);
    CHECK(same_bits(product(x.slice(69, 1), weight.view()), {all.end() - 40, all.end()}));
  }
}

TEST("parts of several types share one call") {
  constexpr int64_t kCols = 256;
  std::mt19937 random(7);
  const GpuWeight q(DType::q4_k, 96, kCols, random);
  const GpuWeight k(DType::q6_k, 40, kCols, random);
  const GpuWeight v(DType::q4_k, 17, kCols, random);
  const GpuWeight f(DType::f32, 5, kCols, random);
  const std::vector<float> bias = normals(40, random);
  const DeviceArray<float> bias_there(bias);
  for (const Arithmetic arithmetic : {Arithmetic::bf16, Arithmetic::f32}) {
    for (const int64_t n : {1, 7, 20}) {
      const GpuOperand x(arithmetic, n, kCols, normals(n * kCols, random));
      const DeviceArray<float> out(static_cast<size_t>(n * 200));
      MatmulProblem problem;
      problem.x = x.view;
      problem.num_parts = 4;
      problem.parts[0] = {q.view(), nullptr, nullptr, out.data(), 200};
      problem.parts[1] = {k.view(), bias_there.data(), nullptr, out.data() + 96, 200};
      problem.parts[2] = {v.view(), nullptr, nullptr, out.data() + 136, 200};
      problem.parts[3] = {f.view(), nullptr, nullptr, out.data() + 160, 200};
      run_on_gpu(problem);
      const std::vector<float> all = out.values();
      for (int64_t t = 0; t < n; ++t) {
        const float* row = all.data() + t * 200;
        for (int64_t i = 0; i < 96; ++i) CHECK(is_near(row[i], expected_output(x, t, q, i)));
        for (int64_t i = 0; i < 40; ++i) {
          Expected expected = expected_output(x, t, k, i);
          expected.value += bias[static_cast<size_t>(i)];
          expected.slack += 0x1p-23 * (std::abs(expected.value) + 4);
          CHECK(is_near(row[96 + i], expected));
        }
        for (int64_t i = 0; i < 17; ++i) CHECK(is_near(row[136 + i], expected_output(x, t, v, i)));
        for (int64_t i = 0; i < 5; ++i) CHECK(is_near(row[160 + i], expected_output(x, t, f, i)));
        for (int64_t i = 165; i < 200; ++i) CHECK(std::isnan(row[i]));
        for (int64_t i = 153; i < 160; ++i) CHECK(std::isnan(row[i]));
      }
    }
  }
}

double activate(UnaryOp glu, double x) {
  if (glu == UnaryOp::silu) return x / (1 + std::exp(-x));
  if (glu == UnaryOp::gelu) return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
  if (glu == UnaryOp::relu_squared) return x > 0 ? x * x : 0;
  if (glu == UnaryOp::sigmoid) return 1 / (1 + std::exp(-x));
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

struct Glu {
  UnaryOp op;
  Arithmetic arithmetic;
  DType gate;
  DType up;
  int64_t rows;
  int64_t outputs;
};

// The GLU of two weights with biases as floats, with a residual in place, and as operands.
void check_glu(const Glu& glu, std::mt19937& random) {
  constexpr int64_t kCols = 256;
  const auto size = static_cast<size_t>(glu.rows * glu.outputs);
  const GpuWeight gate(glu.gate, glu.outputs, kCols, random);
  const GpuWeight up(glu.up, glu.outputs, kCols, random);
  const GpuOperand x(glu.arithmetic, glu.rows, kCols, normals(glu.rows * kCols, random));
  const std::vector<float> bias = normals(glu.outputs, random);
  const DeviceArray<float> bias_there(bias);
  const DeviceArray<float> out(size);
  MatmulProblem problem;
  problem.x = x.view;
  problem.num_parts = 2;
  problem.glu = glu.op;
  problem.parts[0] = {gate.view(), nullptr, nullptr, out.data(), glu.outputs};
  problem.parts[1] = {up.view(), bias_there.data(), nullptr, nullptr, 0};
  run_on_gpu(problem);
  const std::vector<float> plain = out.values();
  for (size_t i = 0; i < size; ++i) {
    const auto token = static_cast<int64_t>(i) / glu.outputs;
    const auto output = static_cast<int64_t>(i) % glu.outputs;
    const Expected g = expected_output(x, token, gate, output);
    Expected u = expected_output(x, token, up, output);
    u.value += bias[static_cast<size_t>(output)];
    const double value = activate(glu.op, g.value);
    // No activation but relu_squared is steeper than 1.2.
    const double steepness = glu.op == UnaryOp::relu_squared ? 2 * std::abs(g.value) + 1e-3 : 1.2;
    const double slack = (steepness * g.slack + 1e-6 * (1 + std::abs(value))) * std::abs(u.value) +
                         (std::abs(value) + 1e-6) * (u.slack + 1e-6 * std::abs(u.value));
    CHECK(std::abs(plain[i] - value * u.value) <= slack + 1e-6);
  }

  const std::vector<float> residual = normals(static_cast<int64_t>(size), random);
  const DeviceArray<float> sum(residual);
  problem.parts[0].residual = sum.data();
  problem.parts[0].out = sum.data();
  run_on_gpu(problem);
  const std::vector<float> added = sum.values();
  for (size_t i = 0; i < size; ++i) CHECK_EQ(added[i], plain[i] + residual[i]);

  problem.parts[0].residual = nullptr;
  problem.parts[0].out = nullptr;
  for (const Arithmetic kind : {Arithmetic::f32, Arithmetic::bf16}) {
    ops::Operand operand{kind, glu.rows, glu.outputs, nullptr};
    const auto row_bytes = static_cast<size_t>(operand.row_bytes());
    const DeviceArray<uint8_t> record(
        std::vector<uint8_t>(static_cast<size_t>(glu.rows) * row_bytes, 0xee));
    operand.data = record.data();
    problem.out_operand = operand;
    run_on_gpu(problem);
    const std::vector<uint8_t> bytes = record.values();
    const auto padded = static_cast<size_t>(ops::padded_cols(glu.outputs));
    for (int64_t t = 0; t < glu.rows; ++t) {
      const uint8_t* row = bytes.data() + static_cast<size_t>(t) * row_bytes;
      const size_t width = kind == Arithmetic::bf16 ? 2 : 4;
      for (size_t i = 0; i < padded; ++i) {
        const float value = i < static_cast<size_t>(glu.outputs)
                                ? plain[static_cast<size_t>(t * glu.outputs) + i]
                                : 0.0f;
        uint32_t got = 0;
        std::memcpy(&got, row + i * width, width);
        CHECK_EQ(got, width == 2 ? f32_to_bf16(value) : std::bit_cast<uint32_t>(value));
      }
      for (size_t i = padded * width; i < row_bytes; ++i) CHECK_EQ(int{row[i]}, 0xee);
    }
  }
}

TEST("GLU: floats, residual and operands") {
  std::mt19937 random(8);
  const UnaryOp all[] = {UnaryOp::silu, UnaryOp::gelu, UnaryOp::gelu_tanh, UnaryOp::relu_squared,
                         UnaryOp::sigmoid};
  for (const UnaryOp op : all) {
    check_glu({op, Arithmetic::bf16, DType::q4_0, DType::q4_0, 2, 40}, random);
  }
  for (const Arithmetic arithmetic : {Arithmetic::bf16, Arithmetic::f32}) {
    check_glu({UnaryOp::silu, arithmetic, DType::q4_k, DType::q4_k, 1, 64}, random);
    check_glu({UnaryOp::silu, arithmetic, DType::q6_k, DType::q6_k, 19, 33}, random);
    check_glu({UnaryOp::silu, arithmetic, DType::q4_k, DType::q6_k, 3, 70}, random);
    check_glu({UnaryOp::silu, arithmetic, DType::q8_0, DType::q5_k, 12, 16}, random);
    check_glu({UnaryOp::silu, arithmetic, DType::f32, DType::bf16, 9, 17}, random);
  }
}

TEST("on Hopper, GLU of one format and of two") {
  const OnHopper machine;
  std::mt19937 random(24);
  check_glu({UnaryOp::silu, Arithmetic::bf16, DType::q4_k, DType::q4_k, 1, 64}, random);
  check_glu({UnaryOp::silu, Arithmetic::bf16, DType::q6_k, DType::q6_k, 19, 33}, random);
  check_glu({UnaryOp::silu, Arithmetic::bf16, DType::q4_k, DType::q6_k, 3, 70}, random);
  check_glu({UnaryOp::silu, Arithmetic::bf16, DType::q8_0, DType::bf16, 19, 16}, random);
}

TEST("an operand and a residual as the output of one part") {
  std::mt19937 random(9);
  const GpuWeight weight(DType::q4_1, 70, 64, random);
  const GpuOperand x(Arithmetic::bf16, 5, 64, normals(5 * 64, random));
  const std::vector<float> plain = product(x.view, weight.view());
  const std::vector<float> residual = normals(5 * 70, random);
  const DeviceArray<float> residual_there(residual);
  ops::Operand operand{Arithmetic::bf16, 5, 70, nullptr};
  const DeviceArray<uint8_t> record(static_cast<size_t>(5 * operand.row_bytes()));
  operand.data = record.data();
  MatmulProblem problem;
  problem.x = x.view;
  problem.num_parts = 1;
  problem.parts[0] = {weight.view(), nullptr, residual_there.data(), nullptr, 70};
  problem.out_operand = operand;
  run_on_gpu(problem);
  const std::vector<uint8_t> bytes = record.values();
  for (int64_t i = 0; i < 5 * 128; ++i) {
    uint16_t got = 0;
    std::memcpy(&got, bytes.data() + i / 128 * operand.row_bytes() + i % 128 * 2, 2);
    const auto at = static_cast<size_t>(i / 128 * 70 + i % 128);
    CHECK_EQ(got, i % 128 < 70 ? f32_to_bf16(plain[at] + residual[at]) : uint16_t{0});
  }
}

TEST("NaNs and infinities reach their token alone") {
  std::mt19937 random(10);
  for (const Arithmetic arithmetic : {Arithmetic::bf16, Arithmetic::f32}) {
    for (const DType dtype : {DType::q4_k, DType::q8_0, DType::f16}) {
      check_tokens_apart(arithmetic, dtype, random, product);
    }
  }
}

TEST("every barrier matters") {
  // What a warp read before a product and writes after it is in order without its barrier too, as
  // products wait for all lanes. Only the rules of memory ask for it.
  if (cuda::host::detected_races() != cuda::host::Races::all) {
    check::skip("this build detects no races");
  }
  std::mt19937 random(12);
  for (const Arithmetic arithmetic : {Arithmetic::bf16, Arithmetic::f32}) {
    // Five superblocks a warp: a place is taken again, and sums take the last one's.
    const int64_t cols = arithmetic == Arithmetic::bf16 ? 64 * 80 : 64 * 24;
    const GpuWeight weight(DType::q8_0, 20, cols, random);
    const GpuOperand x(arithmetic, 2, cols, normals(2 * cols, random));
    expect_every_barrier_matters([&] {
      bool right = true;
      for (const int64_t bytes : kSharedBytes) {
        const SharedBytes shared(bytes);
        const std::vector<float> out = product(x.view, weight.view());
        for (int64_t i = 0; i < 40; ++i) {
          right &= is_near(out[static_cast<size_t>(i)], expected_output(x, i / 20, weight, i % 20));
        }
        if (arithmetic == Arithmetic::f32) break;
      }
      return right;
    });
  }
}

// One to five places a slice, the first and the last of which may be half full; units that a
// block's warps share tokens of, and a last block that has fewer; one slice.
TEST("on Hopper weights come by other copies and have the same bits") {
  std::mt19937 random(21);
  const auto check = [&](DType dtype, int64_t rows, int64_t cols) {
    const GpuWeight weight(dtype, rows, cols, random);
    const GpuOperand x(Arithmetic::bf16, 33, cols, normals(33 * cols, random));
    for (const int64_t n : {1, 3, 11, 33}) {
      const std::vector<float> expected = product(x.slice(0, n), weight.view());
      const OnHopper machine;
      CHECK(same_bits(product(x.slice(0, n), weight.view()), expected));
    }
  };
  for (const DType dtype : matmul_types()) {
    if (dtype != DType::f32) check(dtype, 45, 256 * 5);
    if (!kEveryValue) return;
  }
  for (const DType dtype : {DType::q4_k, DType::q8_0, DType::bf16}) check(dtype, 20, 256 * 21);
  for (const DType dtype : {DType::q4_0, DType::bf16}) check(dtype, 600, 64);
}

TEST("on Hopper every barrier matters") {
  if (cuda::host::detected_races() != cuda::host::Races::all) {
    check::skip("this build detects no races");
  }
  const OnHopper machine;
  std::mt19937 random(22);
  // Of the first one two units share tokens; the second one meets one token.
  const GpuWeight weight(DType::q8_0, 60, 64 * 10, random);
  const GpuWeight one(DType::q4_k, 20, 64 * 160, random);  // three places a slice
  const GpuOperand x(Arithmetic::bf16, 11, 64 * 10, normals(11 * 64 * 10, random));
  const GpuOperand y(Arithmetic::bf16, 1, 64 * 160, normals(64 * 160, random));
  const std::vector<float> right = product(x.view, weight.view());
  const std::vector<float> right_one = product(y.view, one.view());
  expect_every_barrier_matters([&] {
    return same_bits(product(x.view, weight.view()), right) &&
           same_bits(product(y.view, one.view()), right_one);
  });
}

TEST("no tokens, and what no kernel fits") {
  std::mt19937 random(11);
  const GpuWeight weight(DType::q4_0, 32, 64, random);
  const GpuOperand x(Arithmetic::bf16, 1, 64, normals(64, random));
  CHECK(product(x.slice(0, 0), weight.view()).empty());
  const auto refuses = [](const MatmulProblem& problem, const char* why) {
    CHECK_THROWS(Unsupported, why,
                 ops::table<MatmulProblem>().select(problem, current_target(kGpu)));
  };
  MatmulProblem problem;
  problem.x = x.view;
  problem.num_parts = 1;
  problem.parts[0] = {weight.view(), nullptr, nullptr, nullptr, 32};
  ops::TopList list;
  problem.top = &list;
  refuses(problem, "keeps no highest outputs");
  problem.top = nullptr;
  problem.glu = UnaryOp::silu;
  refuses(problem, "GLU needs two weights");
  problem.glu = UnaryOp::none;
  problem.x.cols = 32;
  refuses(problem, "different inner sizes");
  problem.x = {Arithmetic::int8, 1, 64, nullptr};
  problem.out_operand = {Arithmetic::f32, 1, 32, &list};
  refuses(problem, "whose outputs are floats");
  problem.out_operand = {};
  const GpuWeight dense(DType::f16, 32, 64, random);
  problem.parts[0].weight = dense.view();
  refuses(problem, "an int8 operand needs quantised weights");
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
