// Matmuls of prompts on the GPU, whose weights are rounded to bfloat16: against float64, and with
// the same bits for all numbers of tokens.
#include <set>

#include "cpp/check.h"
#include "cuda/tile_launch.h"
#include "gpu/matmul_cases.h"
#include "gpu/mutations.h"

namespace effinfer {
namespace {

using ops::Arithmetic;
using ops::MatmulProblem;
using ops::UnaryOp;

// Prompts go to kernels of Hopper's own there (test_matmul_wgmma.cpp).
void skip_on_hopper() {
  if (current_target(kGpu).arch == 90) check::skip("needs a GPU whose prompts go to tiles");
}

// Weights as the kernels multiply them.
float rounded(float value) {
  return bf16_to_f32(f32_to_bf16(value));
}

MatmulProblem problem_of(const ops::Operand& x) {
  MatmulProblem problem;
  problem.x = x;
  problem.rounds_weights = true;
  return problem;
}

// x times one weight.
std::vector<float> product(const ops::Operand& x, const ops::PackedWeight& weight) {
  const DeviceArray<float> out(static_cast<size_t>(x.rows * weight.rows));
  MatmulProblem problem = problem_of(x);
  problem.num_parts = 1;
  problem.parts[0] = {weight, nullptr, nullptr, out.data(), weight.rows};
  run_on_gpu(problem);
  return out.values();
}

// The same with a kernel of a certain shape.
std::vector<float> shaped(const ops::Operand& x, const ops::PackedWeight& weight,
                          cuda::TileShape shape) {
  const DeviceArray<float> out(static_cast<size_t>(x.rows * weight.rows));
  MatmulProblem problem = problem_of(x);
  problem.num_parts = 1;
  problem.parts[0] = {weight, nullptr, nullptr, out.data(), weight.rows};
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  multiply_tiled(problem, {true}, shape, *queue);
  queue->wait();
  return out.values();
}

constexpr cuda::TileShape kShapes[] = {{8, false},  {16, false}, {32, false},
                                       {64, false}, {64, true},  {128, true}};

// Weights are made of a scale times quant and constants, whose roundings are relative to 160 scales
// at most and may turn the one to bfloat16.
constexpr double kTurned = 0x1p-16;

Expected expected_tile(const GpuOperand& x, int64_t token, const GpuWeight& weight, int64_t row) {
  const int64_t cols = x.view.cols;
  const float* a = x.values.data() + token * cols;
  double sum = 0;
  double magnitude = 0;
  for (int64_t k = 0; k < cols; ++k) {
    const auto at = static_cast<size_t>(row * cols + k);
    sum += static_cast<double>(a[k]) * rounded(weight.values[at]);
    magnitude += std::abs(static_cast<double>(a[k]) * weight.magnitudes[at]);
  }
  const double roundings = 3 + std::min<double>(cols, 8 * std::sqrt(static_cast<double>(cols)));
  return {sum, (roundings * 0x1p-24 + kTurned) * magnitude + 1e-30};
}

// Those that the kernels of tiles have.
std::vector<DType> tile_types() {
  std::vector<DType> types = matmul_types();
  std::erase(types, DType::f32);
  return types;
}

// One-hot tokens tell the weights, each in its place.
TEST("weights are rounded once") {
  skip_on_hopper();
  std::mt19937 random(1);
  constexpr int64_t kRows = 45;
  constexpr int64_t kCols = 256;
  std::vector<float> ones(kCols * kCols);
  for (int64_t k = 0; k < kCols; ++k) ones[static_cast<size_t>(k * kCols + k)] = 1.0f;
  const GpuOperand x(Arithmetic::bf16, kCols, kCols, ones);
  for (const DType dtype : tile_types()) {
    const GpuWeight weight(dtype, kRows, kCols, random);
    const std::vector<float> out = product(x.view, weight.view());
    // Scales of 11 bits, and those that files have in practice, leave nothing to round before.
    const bool direct = weight.packed.view.format.scales != ops::ScaleKind::super &&
                        !weight.packed.view.format.has_min;
    for (int64_t k = 0; k < kCols; ++k) {
      for (int64_t row = 0; row < kRows; ++row) {
        const float got = out[static_cast<size_t>(k * kRows + row)];
        const auto at = static_cast<size_t>(row * kCols + k);
        const float value = weight.values[at];
        if (direct) {
          CHECK_EQ(got, rounded(value));
        } else {
          float largest = weight.magnitudes[at];
          for (int64_t near = k / 16 * 16; near < k / 16 * 16 + 16; ++near) {
            largest = std::max(largest, weight.magnitudes[static_cast<size_t>(row * kCols + near)]);
          }
          CHECK_EQ(got, rounded(got));
          CHECK(std::abs(got - value) <= 0x1p-8 * std::abs(value) + kTurned * largest);
        }
      }
    }
  }
}

// Rows that end in the middle of a group, and a unit of one group.
void check_type(DType dtype, std::mt19937& random) {
  constexpr int64_t kRows = 45;
  constexpr int64_t kCols = 320;
  constexpr int64_t kTokens = 70;
  if (!is_dense(dtype) && kCols % dtype_info(dtype).block_size != 0) return;
  const GpuWeight weight(dtype, kRows, kCols, random);
  const GpuOperand x(Arithmetic::bf16, kTokens, kCols, normals(kTokens * kCols, random));
  const std::vector<float> all = product(x.view, weight.view());
  check_product(x, weight, all, expected_tile);
  for (const int64_t n : {1, 3, 8, 9, 17, 33, 64, 65}) {
    const std::vector<float> some = product(x.slice(kTokens - n, n), weight.view());
    CHECK(same_bits(some, {all.end() - n * kRows, all.end()}));
  }
  for (const cuda::TileShape& shape : kShapes) {
    CHECK(same_bits(shaped(x.view, weight.view(), shape), all));
  }
}

TEST("every weight type: the same bits for all numbers of tokens") {
  skip_on_hopper();
  std::mt19937 random(2);
  for (const DType dtype : tile_types()) check_type(dtype, random);
}

TEST("many rows, many superblocks and more tokens than run at the same time") {
  skip_on_hopper();
  std::mt19937 random(3);
  struct Case {
    DType dtype;
    int64_t tokens, rows, cols;
  };
  for (const Case& c : {Case{DType::q4_0, 1100, 16, 64}, Case{DType::q6_k, 66, 16 * 33 + 1, 256},
                        Case{DType::q4_k, 66, 20, 256 * 9}, Case{DType::bf16, 200, 520, 130},
                        Case{DType::q8_0, 130, 257, 32 * 13}, Case{DType::f16, 1, 1, 1},
                        Case{DType::q4_1, 129, 31, 96}}) {
    const GpuWeight weight(c.dtype, c.rows, c.cols, random);
    const GpuOperand x(Arithmetic::bf16, c.tokens, c.cols, normals(c.tokens * c.cols, random));
    const std::vector<float> all = product(x.view, weight.view());
    check_product(x, weight, all, expected_tile);
    for (const cuda::TileShape& shape : kShapes) {
      CHECK(same_bits(shaped(x.view, weight.view(), shape), all));
    }
    const int64_t some = std::min<int64_t>(c.tokens, 5);
    CHECK(same_bits(product(x.slice(0, some), weight.view()),
                    {all.begin(), all.begin() + some * c.rows}));
  }
}

TEST("parts of several types share one call") {
  skip_on_hopper();
  constexpr int64_t kCols = 256;
  std::mt19937 random(4);
  const GpuWeight q(DType::q4_k, 300, kCols, random);
  const GpuWeight k(DType::q6_k, 40, kCols, random);
  const GpuWeight v(DType::q4_k, 17, kCols, random);
  const GpuWeight f(DType::f32, 5, kCols, random);
  const std::vector<float> bias = normals(40, random);
  const DeviceArray<float> bias_there(bias);
  for (const int64_t n : {1, 20, 70}) {
    const GpuOperand x(Arithmetic::bf16, n, kCols, normals(n * kCols, random));
    constexpr int64_t kStride = 300 + 40 + 17 + 5 + 2;
    const DeviceArray<float> out(static_cast<size_t>(n * kStride));
    MatmulProblem problem = problem_of(x.view);
    problem.num_parts = 4;
    problem.parts[0] = {q.view(), nullptr, nullptr, out.data(), kStride};
    problem.parts[1] = {k.view(), bias_there.data(), nullptr, out.data() + 300, kStride};
    problem.parts[2] = {v.view(), nullptr, nullptr, out.data() + 340, kStride};
    problem.parts[3] = {f.view(), nullptr, nullptr, out.data() + 357, kStride};
    run_on_gpu(problem);
    const std::vector<float> all = out.values();
    const std::vector<float> alone[] = {product(x.view, q.view()), product(x.view, k.view()),
                                        product(x.view, v.view()), product(x.view, f.view())};
    for (int64_t t = 0; t < n; ++t) {
      const float* row = all.data() + t * kStride;
      const auto of = [&](int part, int64_t rows, int64_t i) {
        return alone[part][static_cast<size_t>(t * rows + i)];
      };
      for (int64_t i = 0; i < 300; ++i) CHECK_EQ(row[i], of(0, 300, i));
      for (int64_t i = 0; i < 40; ++i) {
        CHECK_EQ(row[300 + i], of(1, 40, i) + bias[static_cast<size_t>(i)]);
      }
      for (int64_t i = 0; i < 17; ++i) CHECK_EQ(row[340 + i], of(2, 17, i));
      for (int64_t i = 0; i < 5; ++i) CHECK_EQ(row[357 + i], of(3, 5, i));
      for (int64_t i = 362; i < kStride; ++i) CHECK(std::isnan(row[i]));
    }
  }
}

float silu(float x) {
  return x / (1.0f + std::exp(-x));
}

struct Glu {
  DType gate;
  DType up;
  int64_t rows;
  int64_t outputs;
};

// The GLU of two weights with a bias as floats, with a residual in place, and as operands.
void check_glu(const Glu& glu, std::mt19937& random) {
  constexpr int64_t kCols = 256;
  const auto size = static_cast<size_t>(glu.rows * glu.outputs);
  const GpuWeight gate(glu.gate, glu.outputs, kCols, random);
  const GpuWeight up(glu.up, glu.outputs, kCols, random);
  const GpuOperand x(Arithmetic::bf16, glu.rows, kCols, normals(glu.rows * kCols, random));
  const std::vector<float> bias = normals(glu.outputs, random);
  const DeviceArray<float> bias_there(bias);
  const DeviceArray<float> out(size);
  MatmulProblem problem = problem_of(x.view);
  problem.num_parts = 2;
  problem.glu = UnaryOp::silu;
  problem.parts[0] = {gate.view(), nullptr, nullptr, out.data(), glu.outputs};
  problem.parts[1] = {up.view(), bias_there.data(), nullptr, nullptr, 0};
  run_on_gpu(problem);
  const std::vector<float> plain = out.values();
  if (glu.gate == glu.up) {
    const std::vector<float> gates = product(x.view, gate.view());
    const std::vector<float> ups = product(x.view, up.view());
    for (size_t i = 0; i < size; ++i) {
      const float linear = ups[i] + bias[i % static_cast<size_t>(glu.outputs)];
      const float expected = silu(gates[i]) * linear;
      CHECK(std::abs(plain[i] - expected) <= 1e-5f * std::abs(expected) + 1e-30f);
    }
  }

  const std::vector<float> residual = normals(static_cast<int64_t>(size), random);
  const DeviceArray<float> sum(residual);
  problem.parts[0].residual = sum.data();
  problem.parts[0].out = sum.data();
  run_on_gpu(problem);
  const std::vector<float> added = sum.values();
  for (size_t i = 0; i < size; ++i) CHECK_EQ(added[i], plain[i] + residual[i]);

  // The kernels of many rows, too.
  if (glu.gate == glu.up) {
    for (const cuda::TileShape shape : {cuda::TileShape{64, true}, cuda::TileShape{128, true}}) {
      if (glu.rows < 64) continue;
      const DeviceArray<float> again(residual);
      problem.parts[0].residual = again.data();
      problem.parts[0].out = again.data();
      const std::unique_ptr<Queue> queue = make_queue(kGpu);
      multiply_tiled(problem, {true, true}, shape, *queue);
      queue->wait();
      CHECK(same_bits(again.values(), added));
    }
  }

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
    const size_t width = kind == Arithmetic::bf16 ? 2 : 4;
    for (int64_t t = 0; t < glu.rows; ++t) {
      const uint8_t* row = bytes.data() + static_cast<size_t>(t) * row_bytes;
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
  skip_on_hopper();
  std::mt19937 random(5);
  check_glu({DType::q4_0, DType::q4_0, 2, 40}, random);
  check_glu({DType::q4_k, DType::q4_k, 67, 64}, random);
  check_glu({DType::q6_k, DType::q6_k, 19, 33}, random);
  check_glu({DType::bf16, DType::bf16, 140, 150}, random);
  check_glu({DType::q4_k, DType::q6_k, 3, 70}, random);
}

TEST("NaNs and infinities reach their token alone") {
  std::mt19937 random(6);
  for (const DType dtype : {DType::q4_k, DType::q8_0, DType::f16}) {
    check_tokens_apart(Arithmetic::bf16, dtype, random, product);
  }
}

TEST("shared memory has no bank conflicts") {
  if (cuda::host::detected_races() != cuda::host::Races::all) {
    check::skip("this build does not watch shared memory");
  }
  std::mt19937 random(7);
  for (const DType dtype : {DType::q4_0, DType::q6_k, DType::q8_0, DType::bf16, DType::f16}) {
    const GpuWeight weight(dtype, 64, 256, random);
    const GpuOperand x(Arithmetic::bf16, 128, 256, normals(128 * 256, random));
    for (const cuda::TileShape& shape : kShapes) {
      const cuda::host::Banks banks =
          cuda::host::count_banks([&] { shaped(x.view, weight.view(), shape); });
      if (banks.cycles != banks.least) check::fail(__FILE__, __LINE__, banks.worst);
      CHECK(banks.least > 0);
    }
  }
}

TEST("every barrier matters") {
  if (cuda::host::detected_races() != cuda::host::Races::all) {
    check::skip("this build detects no races");
  }
  std::mt19937 random(8);
  // The last activations lie where results go, as do copies of what is behind the end.
  constexpr int64_t kRows = 256;
  constexpr int64_t kCols = 64 * 7;
  const GpuWeight weight(DType::q4_0, kRows, kCols, random);
  const GpuOperand x(Arithmetic::bf16, 66, kCols, normals(66 * kCols, random));
  const auto check = [&](int64_t tokens, int64_t rows, cuda::TileShape shape) {
    std::vector<Expected> expected;
    for (int64_t i = 0; i < tokens * rows; ++i) {
      expected.push_back(expected_tile(x, i / rows, weight, i % rows));
    }
    expect_every_barrier_matters([&] {
      const std::vector<float> out = shaped(x.slice(0, tokens), weight.view(rows), shape);
      bool right = true;
      for (size_t i = 0; i < out.size(); ++i) right &= is_near(out[i], expected[i]);
      return right;
    });
  };
  check(5, 20, {8, false});
  check(66, kRows, {128, true});
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
