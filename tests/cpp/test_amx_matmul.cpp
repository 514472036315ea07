// The AMX matmul against float64 and against itself, over a tile unit in plain C++; where the CPU
// has AMX the kernel of the library must agree with it.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>

#include "check.h"
#include "core/float16.h"
#include "cpu/matmul_amx.h"
#include "cpu/operand.h"
#include "effinfer/device.h"
#include "ops/matmul.h"
#include "ops/registry.h"

#if EFFINFER_X86
#include "emulated_amx.h"

void emulated::refuse(const char* expected) {
  throw std::logic_error(std::string("[amx] the tile unit expected ") + expected);
}

namespace {

using namespace effinfer;
using namespace effinfer::ops;

using Run = void (*)(const MatmulProblem&, Team&);

void require_avx512_bf16() {
  if (cpu_features().avx512_bf16) return;
  check::skip("the kernel dequantises with AVX512-BF16, which this CPU lacks");
}

void require_amx() {
#if EFFINFER_AMX
  if (cpu_features().best < Isa::amx) check::skip("this CPU has no AMX");
#else
  check::skip("the compiler has no AMX, so the kernel was not built");
#endif
}

struct Free {
  void operator()(void* pointer) const { std::free(pointer); }
};

std::vector<float> random_floats(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// A file's bytes of [rows, cols] weights, and the first rows of it packed.
struct Matrix {
  DType dtype;
  int64_t rows;
  int64_t cols;
  std::vector<uint8_t> bytes;

  Matrix(DType type, int64_t num_rows, int64_t num_cols, uint32_t seed)
      : dtype(type), rows(num_rows), cols(num_cols) {
    bytes.resize(TensorView{nullptr, dtype, {rows, cols}}.num_bytes());
    std::mt19937 random(seed);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    // Any 16 bits may be a scale or a number: give the upper byte a small exponent.
    for (size_t i = 1; i < bytes.size(); i += 2) {
      bytes[i] = static_cast<uint8_t>((bytes[i] & 0x83) | 0x28);
    }
  }

  PackedBuffer packed(int64_t first_rows) const {
    ThreadPool pool(1);
    return pack({bytes.data(), dtype, {first_rows, cols}}, pool);
  }

  // The values as the kernel multiplies them: rounded to bfloat16.
  std::vector<double> values() const {
    const PackedBuffer all = packed(rows);
    std::vector<float> group(static_cast<size_t>(16 * cols));
    std::vector<double> result;
    for (int64_t g = 0; g < all.view.groups(); ++g) {
      unpack_group(all.view, g, group.data());
      const int64_t count = std::min<int64_t>(16, rows - 16 * g) * cols;
      for (int64_t i = 0; i < count; ++i) {
        result.push_back(bf16_to_f32(f32_to_bf16(group[static_cast<size_t>(i)])));
      }
    }
    return result;
  }
};

// Rows of bfloat16 operands, with exactly the memory that they need.
struct OwnedOperand {
  Operand view;
  std::unique_ptr<void, Free> memory;

  OwnedOperand(int64_t rows, int64_t cols, const float* values,
               Arithmetic kind = Arithmetic::bf16) {
    view = {kind, rows, cols, nullptr};
    const auto bytes = static_cast<size_t>(rows * view.row_bytes());
    memory.reset(std::aligned_alloc(64, bytes));
    view.data = memory.get();
    std::memset(view.data, 0, bytes);
    for (int64_t t = 0; values != nullptr && t < rows; ++t) {
      cpu::store_operand_row(current_isa())(view, t, values + t * cols);
    }
  }

  double value(int64_t row, int64_t k) const {
    return bf16_to_f32(reinterpret_cast<const uint16_t*>(view.row(row))[k]);
  }
};

void run(const MatmulProblem& problem, int threads, Run kernel = emulated::matmul_bf16) {
  ThreadPool pool(threads, true);
  pool.reserve_scratch(cpu::amx_scratch_bytes(problem));
  pool.parallel([&](Team& team) { kernel(problem, team); });
}

// x W^T of one weight.
std::vector<float> multiply(const Operand& x, const PackedWeight& weight, int threads = 1,
                            Run kernel = emulated::matmul_bf16) {
  std::vector<float> out(static_cast<size_t>(x.rows * weight.rows), -7.0f);
  MatmulProblem problem;
  problem.x = x;
  problem.num_parts = 1;
  problem.parts[0] = {weight, nullptr, nullptr, out.data(), weight.rows};
  run(problem, threads, kernel);
  return out;
}

bool same_bits(const float* a, const float* b, int64_t count) {
  return std::memcmp(a, b, static_cast<size_t>(count) * sizeof(float)) == 0;
}

// The float64 results of all tokens and outputs, and the sums of the terms' magnitudes.
struct Reference {
  int64_t outputs;
  std::vector<double> sums;
  std::vector<double> magnitudes;
  double epsilon;

  Reference(const OwnedOperand& x, const Matrix& matrix) : outputs(matrix.rows) {
    const std::vector<double> w = matrix.values();
    const int64_t cols = matrix.cols;
    // A product meets up to 16 additions in its chain, one where the two chains meet, and one for
    // each of the K / 32 multiplications of tiles.
    epsilon = static_cast<double>(17 + (cols + 31) / 32) * 0x1p-24;
    std::vector<double> row(static_cast<size_t>(cols));
    for (int64_t t = 0; t < x.view.rows; ++t) {
      for (int64_t k = 0; k < cols; ++k) row[static_cast<size_t>(k)] = x.value(t, k);
      for (int64_t n = 0; n < outputs; ++n) {
        double sum = 0;
        double magnitude = 0;
        for (int64_t k = 0; k < cols; ++k) {
          const double term = row[static_cast<size_t>(k)] * w[static_cast<size_t>(n * cols + k)];
          sum += term;
          magnitude += std::abs(term);
        }
        sums.push_back(sum);
        magnitudes.push_back(magnitude);
      }
    }
  }

  void check(const std::vector<float>& got, int64_t rows, int64_t cols, const char* what) const {
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t n = 0; n < cols; ++n) {
        const auto i = static_cast<size_t>(t * outputs + n);
        const double value = got[static_cast<size_t>(t * cols + n)];
        if (std::abs(value - sums[i]) <= epsilon * magnitudes[i]) continue;
        check::fail(__FILE__, __LINE__,
                    std::string(what) + " of " + std::to_string(rows) + " tokens, " +
                        std::to_string(cols) + " outputs, token " + std::to_string(t) +
                        ", output " + std::to_string(n) + ": got " + std::to_string(value) +
                        ", expected " + std::to_string(sums[i]));
        return;
      }
    }
  }
};

// One multiplication of tiles with a[0][k] and b[k][0] given, the rest zeros: c[0][0].
float tile_dot(float c, const std::vector<float>& a, const std::vector<float>& b) {
  float sums[16 * 16] = {c};
  uint16_t left[16 * 32] = {};
  uint16_t right[16 * 32] = {};
  for (size_t k = 0; k < a.size(); ++k) {
    left[k] = f32_to_bf16(a[k]);
    right[k / 2 * 32 + k % 2] = f32_to_bf16(b[k]);
  }
  emulated::dpbf16ps(sums, left, right, 1);
  return sums[0];
}

TEST("the emulated tile unit rounds in the order of the manual") {
  require_avx512_bf16();
  const std::vector<float> ones(32, 1.0f);
  // Even k: 2^24 + 1 + 1 stays 2^24, each time a tie. Odd k: 1 + 1. Then c, a tie upwards.
  CHECK_EQ(tile_dot(1.0f, {0x1p24f, 0, 1, 1, 1, 1}, ones), 16777220.0f);
  CHECK_EQ(tile_dot(0.0f, {0x1p24f, 0, 1, 1, 1, 1}, ones), 16777218.0f);
  CHECK_EQ(tile_dot(0x1p24f, {1, 0, 1}, ones), 16777218.0f);
  CHECK_EQ(tile_dot(-1.5f, {1, 2, 3, 4}, {2, 3, 4, 5}), 38.5f);
}

TEST("the emulated tile unit takes denormals as zeros") {
  require_avx512_bf16();
  CHECK_EQ(tile_dot(0.0f, {0x1p-130f}, {0x1p100f}), 0.0f);
  CHECK_EQ(tile_dot(0.0f, {0x1p100f}, {0x1p-130f}), 0.0f);
  CHECK_EQ(tile_dot(0.0f, {0x1p-70f}, {0x1p-70f}), 0.0f);
  CHECK_EQ(tile_dot(0x1p-130f, {0.0f}, {0.0f}), 0.0f);
  CHECK_EQ(tile_dot(0x1p-125f, {-0x1p-63f}, {0x1.8p-63f}), 0.0f);
  CHECK_EQ(tile_dot(0.0f, {0x1p-63f}, {0x1p-63f}), 0x1p-126f);
}

TEST("the emulated tile unit refuses what the hardware would") {
  require_avx512_bf16();
  float c[17 * 16] = {};
  const uint16_t values[17 * 32] = {};
  CHECK_THROWS(std::logic_error, "up to 16 x 64 bytes", emulated::dpbf16ps(c, values, values, 17));
  CHECK_THROWS(std::logic_error, "a configured tile", emulated::dpbf16ps(c, values, values, 0));
}

TEST("every weight type on odd shapes against float64") {
  require_avx512_bf16();
  for (int type = 0; type < kNumDTypes; ++type) {
    const auto dtype = static_cast<DType>(type);
    const DTypeInfo& info = dtype_info(dtype);
    const bool dense = dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
    if ((!info.quantized && !dense) || info.tail_bytes > 0) continue;
    for (const int64_t wanted : {1, 63, 64, 320, 4160}) {
      const int64_t block = dense ? 1 : info.block_size;
      const int64_t cols = (wanted + block - 1) / block * block;
      if (cols != wanted && wanted < 64) continue;
      const Matrix matrix(dtype, 64, cols, static_cast<uint32_t>(type));
      const std::vector<float> x = random_floats(100 * cols, 41);
      const Reference reference(OwnedOperand(100, cols, x.data()), matrix);
      for (const int64_t outputs : {1, 16, 17, 33, 64}) {
        const PackedBuffer weight = matrix.packed(outputs);
        for (const int64_t rows : {1, 15, 16, 17, 31, 33, 100}) {
          if (cols > 4000 && (outputs == 16 || rows == 15 || rows == 31)) continue;
          const OwnedOperand operand(rows, cols, x.data());
          reference.check(multiply(operand.view, weight.view), rows, outputs, info.name.data());
        }
      }
    }
  }
}

TEST("a row's bits do not depend on its place, on other rows or on the team") {
  require_avx512_bf16();
  for (const int64_t cols : {96, 4160}) {
    const Matrix matrix(DType::q4_1, 300, cols, 5);
    const PackedBuffer weight = matrix.packed(300);
    const std::vector<float> x = random_floats(50 * cols, 6);
    const OwnedOperand all(50, cols, x.data());
    const std::vector<float> whole = multiply(all.view, weight.view);
    for (const int64_t row : {0, 1, 15, 16, 33, 47, 49}) {
      const OwnedOperand one(1, cols, x.data() + row * cols);
      CHECK(same_bits(multiply(one.view, weight.view).data(), whole.data() + row * 300, 300));
    }
    for (const int64_t first : {1, 7, 16, 21}) {
      const OwnedOperand some(50 - first, cols, x.data() + first * cols);
      const std::vector<float> got = multiply(some.view, weight.view, 3);
      CHECK(same_bits(got.data(), whole.data() + first * 300, (50 - first) * 300));
    }
  }
}

TEST("blocks of tokens: any number of them gives the same bits") {
  require_avx512_bf16();
  constexpr int64_t kRows = 1500;
  const Matrix matrix(DType::q8_0, 40, 64, 7);
  const PackedBuffer weight = matrix.packed(40);
  const std::vector<float> x = random_floats(kRows * 64, 8);
  const OwnedOperand all(kRows, 64, x.data());
  const std::vector<float> whole = multiply(all.view, weight.view);
  Reference(all, matrix).check(whole, kRows, 40, "q8_0");
  std::mt19937 random(9);
  for (int i = 0; i < 40; ++i) {
    const auto rows = static_cast<int64_t>(random() % kRows + 1);
    Operand x_view = all.view;
    x_view.rows = rows;
    const std::vector<float> got =
        multiply(x_view, weight.view, static_cast<int>(random() % 9 + 1));
    CHECK(same_bits(got.data(), whole.data(), rows * 40));
  }
}

TEST("scratch for the largest step serves smaller ones") {
  for (const int64_t cols : {64, 4096, 5000, 14336}) {
    MatmulProblem problem;
    problem.x = {Arithmetic::bf16, 0, cols, nullptr};
    problem.num_parts = 1;
    problem.parts[0].weight.rows = 4096;
    size_t last = 0;
    for (problem.x.rows = 1; problem.x.rows < 1200; ++problem.x.rows) {
      const size_t bytes = cpu::amx_scratch_bytes(problem);
      CHECK(bytes >= last);
      last = bytes;
      for (const int64_t team : {1, 2, 7, 64}) {
        const cpu::AmxPlan plan = cpu::amx_plan(problem, team);
        CHECK(static_cast<size_t>(2 * plan.panel_bytes() +
                                  plan.batch * plan.block * cpu::kUnitOutputs * 4) <= bytes);
        CHECK(plan.blocks * plan.block >= problem.x.rows);
        CHECK((plan.blocks - 1) * plan.block < problem.x.rows);
      }
    }
  }
}

TEST("parts of several types, bias and residual") {
  require_avx512_bf16();
  constexpr int64_t kCols = 256;
  const PackedBuffer q = Matrix(DType::q4_1, 96, kCols, 1).packed(96);
  const PackedBuffer k = Matrix(DType::bf16, 40, kCols, 2).packed(40);
  const PackedBuffer v = Matrix(DType::q6_k, 17, kCols, 3).packed(17);
  const OwnedOperand x(35, kCols, random_floats(35 * kCols, 4).data());
  const std::vector<float> bias = random_floats(40, 5);
  std::vector<float> out = random_floats(35 * 160, 6);  // three results side by side, and a gap
  const std::vector<float> before = out;
  MatmulProblem problem;
  problem.x = x.view;
  problem.num_parts = 3;
  problem.parts[0] = {q.view, nullptr, nullptr, out.data(), 160};
  problem.parts[1] = {k.view, bias.data(), nullptr, out.data() + 96, 160};
  problem.parts[2] = {v.view, nullptr, out.data() + 136, out.data() + 136, 160};
  run(problem, 2);
  const std::vector<float> q_alone = multiply(x.view, q.view);
  const std::vector<float> k_alone = multiply(x.view, k.view);
  const std::vector<float> v_alone = multiply(x.view, v.view);
  for (size_t t = 0; t < 35; ++t) {
    const float* row = out.data() + t * 160;
    CHECK(same_bits(row, q_alone.data() + t * 96, 96));
    for (size_t n = 0; n < 40; ++n) CHECK_EQ(row[96 + n], k_alone[t * 40 + n] + bias[n]);
    for (size_t n = 0; n < 17; ++n) {
      CHECK_EQ(row[136 + n], v_alone[t * 17 + n] + before[t * 160 + 136 + n]);
    }
    CHECK(same_bits(row + 153, before.data() + t * 160 + 153, 7));
  }
}

TEST("GLU, to floats and to an operand") {
  require_avx512_bf16();
  // The longer inner size is cut into stretches, with units in batches.
  for (const int64_t cols : {96, 4160}) {
    for (const int64_t rows : {3, 50}) {
      constexpr int64_t kOutputs = 336;
      const PackedBuffer gate = Matrix(DType::q4_0, kOutputs, cols, 11).packed(kOutputs);
      const PackedBuffer up = Matrix(DType::q5_0, kOutputs, cols, 12).packed(kOutputs);
      const OwnedOperand x(rows, cols, random_floats(rows * cols, 13).data());
      const std::vector<float> gates = multiply(x.view, gate.view);
      const std::vector<float> linear = multiply(x.view, up.view);
      std::vector<float> out(static_cast<size_t>(rows * kOutputs));
      MatmulProblem problem;
      problem.x = x.view;
      problem.num_parts = 2;
      problem.glu = UnaryOp::silu;
      problem.parts[0] = {gate.view, nullptr, nullptr, out.data(), kOutputs};
      problem.parts[1] = {up.view, nullptr, nullptr, nullptr, 0};
      run(problem, 2);
      for (size_t i = 0; i < out.size(); ++i) {
        const double expected = gates[i] / (1 + std::exp(-double{gates[i]})) * linear[i];
        CHECK(std::abs(out[i] - expected) <= 1e-6 * (1 + std::abs(gates[i])) * std::abs(expected));
      }
      const OwnedOperand expected(rows, kOutputs, out.data(), Arithmetic::int8);
      const OwnedOperand got(rows, kOutputs, nullptr, Arithmetic::int8);
      problem.out_operand = got.view;
      run(problem, 1);
      CHECK(std::memcmp(got.view.data, expected.view.data,
                        static_cast<size_t>(rows * got.view.row_bytes())) == 0);
    }
  }
}

TEST("the level chooses the kernel") {
  require_avx512_bf16();
  const PackedBuffer weight = Matrix(DType::q4_0, 32, 64, 21).packed(32);
  MatmulProblem problem;
  problem.x = {Arithmetic::bf16, 32, 64, nullptr};
  problem.num_parts = 1;
  problem.parts[0].weight = weight.view;
  const std::string_view below = table<MatmulProblem>().select(problem, {.isa = Isa::avx512}).name;
  const std::string_view amx = table<MatmulProblem>().select(problem, {.isa = Isa::amx}).name;
  CHECK_EQ(below, "matmul.avx512.bf16");
#if EFFINFER_AMX
  CHECK_EQ(amx, "matmul.amx.bf16");
#else
  CHECK_EQ(amx, "matmul.avx512.bf16");
#endif
}

// The manual gives TDPBF16PS operation by operation (chains of fused multiply-adds, their sum, the
// destination; nearest even, denormals flushed, MXCSR ignored) and the emulation does these. All
// else is one template, compiled without contraction: so both give the same bits.
TEST("the native kernel agrees with the emulated one") {
  require_amx();
  for (const DType dtype : {DType::q4_0, DType::q4_k, DType::q6_k, DType::f16, DType::bf16}) {
    for (const int64_t cols : {256, 4352}) {
      const Matrix matrix(dtype, 80, cols, 31);
      const PackedBuffer weight = matrix.packed(80);
      const std::vector<float> x = random_floats(77 * cols, 32);
      const Reference reference(OwnedOperand(77, cols, x.data()), matrix);
      for (const int64_t rows : {1, 16, 33, 77}) {
        const OwnedOperand operand(rows, cols, x.data());
        MatmulProblem problem;
        problem.x = operand.view;
        problem.num_parts = 1;
        problem.parts[0].weight = weight.view;
        const Variant<MatmulProblem>& native =
            table<MatmulProblem>().select(problem, {.isa = Isa::amx});
        CHECK_EQ(native.name, std::string("matmul.amx.bf16"));
        const std::vector<float> got = multiply(operand.view, weight.view, 2, native.run);
        const std::vector<float> expected = multiply(operand.view, weight.view);
        reference.check(got, rows, 80, "native");
        int64_t different = 0;
        for (size_t i = 0; i < got.size(); ++i) different += !same_bits(&got[i], &expected[i], 1);
        CHECK_EQ(different, 0);
      }
    }
  }
}

}  // namespace

#else

TEST("other processors have no AMX") {
  CHECK(effinfer::cpu_features().best < effinfer::Isa::amx);
}

#endif

CHECK_MAIN()
