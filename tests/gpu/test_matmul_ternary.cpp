// Ternary matmuls on the GPU: the bits of the CPU's kernels.
#include <cstring>

#include "cpp/check.h"
#include "cpp/ternary_weights.h"
#include "cpu/operand.h"
#include "gpu/device_arrays.h"
#include "gpu/hopper_device.h"
#include "gpu/mutations.h"
#include "gpu/shared_bytes.h"
#include "ops/matmul.h"

namespace {

constexpr TernaryForm kForms[] = {TernaryForm::t2, TernaryForm::t1_6};

std::vector<float> random_floats(int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// int8_token rows in both memories.
struct Tokens {
  Operand here;
  Memory memory;
  DeviceArray<uint8_t> there;

  Tokens(int64_t rows, int64_t cols, const std::vector<float>& x)
      : here{Arithmetic::int8_token, rows, cols, nullptr} {
    const auto bytes = static_cast<size_t>(rows * here.row_bytes());
    memory = allocate(bytes);
    here.data = memory.get();
    for (int64_t t = 0; t < rows; ++t) {
      cpu::store_operand_row(current_isa())(here, t, x.data() + t * cols);
    }
    there = DeviceArray<uint8_t>(std::vector<uint8_t>(here.row(0), here.row(0) + bytes));
  }
  Operand view(int64_t first, int64_t rows) const {
    Operand operand = here;
    operand.data = there.data() + first * here.row_bytes();
    operand.rows = rows;
    return operand;
  }
};

DeviceArray<uint8_t> upload(const PackedWeight& weight) {
  return DeviceArray<uint8_t>(std::vector<uint8_t>(weight.data, weight.data + weight.num_bytes()));
}

std::vector<float> on_cpu(const Tokens& x, const PackedWeight& weight) {
  std::vector<float> out(static_cast<size_t>(x.here.rows * weight.rows));
  MatmulProblem problem;
  problem.x = x.here;
  problem.num_parts = 1;
  problem.parts[0] = {weight, nullptr, nullptr, out.data(), weight.rows};
  ThreadPool pool(1);
  run_alone(problem, pool);
  return out;
}

std::vector<float> on_gpu(const Operand& x, PackedWeight weight) {
  const DeviceArray<uint8_t> data = upload(weight);
  const DeviceArray<float> out(static_cast<size_t>(x.rows * weight.rows));
  weight.data = data.data();
  MatmulProblem problem;
  problem.x = x;
  problem.num_parts = 1;
  problem.parts[0] = {weight, nullptr, nullptr, out.data(), weight.rows};
  run_on_gpu(problem);
  return out.values();
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void check_weight(const PackedWeight& weight, std::mt19937& random) {
  const Tokens x(19, weight.cols, random_floats(19 * weight.cols, random));
  const std::vector<float> expected = on_cpu(x, weight);
  for (const int64_t n : {1, 2, 5, 8, 9, 17, 19}) {
    const std::vector<float> right(expected.end() - n * weight.rows, expected.end());
    CHECK(same_bits(on_gpu(x.view(19 - n, n), weight), right));
  }
}

void check_scales() {
  std::mt19937 random(1);
  for (const Scales scales : {Scales::row, Scales::block}) {
    for (const int64_t cols : {256, 2816}) {
      const Ternary ternary = random_ternary(45, cols, scales, 2);
      const std::vector<uint8_t> bytes = to_tq2_0(ternary);
      ThreadPool pool(1);
      for (const TernaryForm form : kForms) {
        const PackedBuffer packed = pack({bytes.data(), DType::tq2_0, {45, cols}}, pool, form);
        check_weight(packed.view, random);
      }
    }
  }
}

void check_files() {
  std::mt19937 random(13);
  const Ternary ternary = random_ternary(33, 384, Scales::row, 14);
  const std::vector<uint8_t> bytes = to_i2_s(ternary, 0.25f);
  ThreadPool pool(1);
  for (const TernaryForm form : kForms) {
    check_weight(pack({bytes.data(), DType::i2_s, {33, 384}}, pool, form).view, random);
  }
}

void check_shapes() {
  std::mt19937 random(3);
  for (const int64_t cols : {4, 64, 100, 192, 320, 400, 448, 2300}) {
    for (const int64_t rows : {1, 17, 70}) {
      const Ternary ternary = random_ternary(rows, cols, Scales::row, 4);
      for (const QuantBits bits : {QuantBits::t2, QuantBits::t1_6}) {
        const RowPacked weight(ternary, bits);
        const Tokens x(3, cols, random_floats(3 * cols, random));
        const std::vector<float> expected = on_cpu(x, weight.view);
        CHECK(same_bits(on_gpu(x.view(0, 3), weight.view), expected));
      }
    }
  }
}

void check_parts() {
  std::mt19937 random(5);
  constexpr int64_t kCols = 512;
  const Ternary ternary = random_ternary(40, kCols, Scales::row, 6);
  const RowPacked first(ternary, QuantBits::t2);
  const RowPacked second(ternary, QuantBits::t1_6);
  const RowPacked third(random_ternary(17, kCols, Scales::row, 7), QuantBits::t2);
  const Tokens x(2, kCols, random_floats(2 * kCols, random));
  const std::vector<float> bias = random_floats(40, random);
  const std::vector<float> residual = random_floats(2 * 40, random);
  const DeviceArray<float> bias_there(bias);
  const DeviceArray<float> out(residual);
  const DeviceArray<float> out2(size_t{2 * 40});
  const DeviceArray<float> out3(size_t{2 * 17});
  const DeviceArray<uint8_t> data[] = {upload(first.view), upload(second.view), upload(third.view)};
  MatmulProblem problem;
  problem.x = x.view(0, 2);
  problem.num_parts = 3;
  problem.parts[0] = {first.view, bias_there.data(), out.data(), out.data(), 40};
  problem.parts[1] = {second.view, nullptr, nullptr, out2.data(), 40};
  problem.parts[2] = {third.view, nullptr, nullptr, out3.data(), 17};
  for (int i = 0; i < 3; ++i) problem.parts[i].weight.data = data[i].data();
  run_on_gpu(problem);
  const std::vector<float> plain = on_cpu(x, first.view);
  const std::vector<float> got = out.values();
  for (size_t i = 0; i < got.size(); ++i) CHECK_EQ(got[i], plain[i] + bias[i % 40] + residual[i]);
  CHECK(same_bits(out2.values(), plain));
  CHECK(same_bits(out3.values(), on_cpu(x, third.view)));
}

void check_glu() {
  std::mt19937 random(8);
  constexpr int64_t kCols = 256;
  const RowPacked gate(random_ternary(37, kCols, Scales::row, 9), QuantBits::t2);
  const RowPacked up(random_ternary(37, kCols, Scales::row, 10), QuantBits::t2);
  const Tokens x(3, kCols, random_floats(3 * kCols, random));
  const DeviceArray<uint8_t> data[] = {upload(gate.view), upload(up.view)};
  Operand operand{Arithmetic::f32, 3, 37, nullptr};
  const DeviceArray<float> out(static_cast<size_t>(3 * operand.row_bytes() / 4));
  operand.data = out.data();
  MatmulProblem problem;
  problem.x = x.view(0, 3);
  problem.num_parts = 2;
  problem.glu = UnaryOp::relu_squared;
  problem.out_operand = operand;
  problem.parts[0].weight = gate.view;
  problem.parts[1].weight = up.view;
  for (int i = 0; i < 2; ++i) problem.parts[i].weight.data = data[i].data();
  run_on_gpu(problem);
  const std::vector<float> g = on_cpu(x, gate.view);
  const std::vector<float> u = on_cpu(x, up.view);
  const std::vector<float> got = out.values();
  for (size_t t = 0; t < 3; ++t) {
    const float* row = got.data() + t * static_cast<size_t>(operand.row_bytes() / 4);
    for (size_t i = 0; i < 64; ++i) {
      if (i >= 37) {
        CHECK_EQ(row[i], 0.0f);
        continue;
      }
      const float value = g[t * 37 + i];
      CHECK_EQ(row[i], (value > 0 ? value * value : 0.0f) * u[t * 37 + i]);
    }
  }
}

TEST("scales of rows and of blocks, both packings") {
  check_scales();
}
TEST("files with one scale a tensor") {
  check_files();
}
TEST("any number of columns and rows") {
  check_shapes();
}
TEST("several weights, biases and residuals") {
  check_parts();
}
TEST("GLU") {
  check_glu();
}

// Where weights come by other copies; of many columns in several rounds.
TEST("the same on Hopper") {
  const OnHopper machine;
  std::mt19937 random(21);
  for (const Scales scales : {Scales::row, Scales::block}) {
    const int64_t cols = 256 * 37;
    const std::vector<uint8_t> bytes = to_tq2_0(random_ternary(33, cols, scales, 22));
    ThreadPool pool(1);
    for (const TernaryForm form : kForms) {
      check_weight(pack({bytes.data(), DType::tq2_0, {33, cols}}, pool, form).view, random);
    }
  }
  check_scales();
  check_files();
  check_shapes();
  check_parts();
  check_glu();
}

// Both kinds of scales, whose sums go other ways.
void expect_barriers_matter(int64_t tokens, int64_t blocks, TernaryForm form,
                            std::mt19937& random) {
  const int64_t cols = 256 * blocks;
  for (const Scales scales : {Scales::row, Scales::block}) {
    const std::vector<uint8_t> bytes = to_tq2_0(random_ternary(32, cols, scales, 16));
    ThreadPool pool(1);
    const PackedBuffer packed = pack({bytes.data(), DType::tq2_0, {32, cols}}, pool, form);
    const Tokens x(tokens, cols, random_floats(tokens * cols, random));
    const std::vector<float> expected = on_cpu(x, packed.view);
    const auto is_right = [&] {
      return same_bits(on_gpu(x.view(0, tokens), packed.view), expected);
    };
    CHECK(is_right());
    expect_every_barrier_matters(is_right);
  }
}

TEST("every barrier matters") {
  std::mt19937 random(15);
  expect_barriers_matter(2, 17, TernaryForm::t1_6, random);
}

// Of more rounds than there are places for.
TEST("on Hopper every barrier matters") {
  if (cuda::host::detected_races() != cuda::host::Races::all) {
    check::skip("this build detects no races");
  }
  const OnHopper machine;
  std::mt19937 random(19);
  expect_barriers_matter(11, 26, TernaryForm::t2, random);
}

void check_little_memory() {
  std::mt19937 random(17);
  const int64_t cols = 256 * 9;
  const RowPacked weight(random_ternary(40, cols, Scales::row, 18), QuantBits::t2);
  const Tokens x(13, cols, random_floats(13 * cols, random));
  const std::vector<float> expected = on_cpu(x, weight.view);
  for (const int64_t bytes : {80 << 10, 227 << 10}) {
    const SharedBytes shared(bytes);
    CHECK(same_bits(on_gpu(x.view(0, 13), weight.view), expected));
  }
}

TEST("blocks with little shared memory have fewer tokens") {
  check_little_memory();
  const OnHopper machine;
  check_little_memory();
}

TEST("a NaN reaches its token alone") {
  std::mt19937 random(11);
  const RowPacked weight(random_ternary(20, 256, Scales::row, 12), QuantBits::t1_6);
  std::vector<float> values = random_floats(3 * 256, random);
  values[300] = NAN;
  const Tokens x(3, 256, values);
  const std::vector<float> got = on_gpu(x.view(0, 3), weight.view);
  for (size_t i = 0; i < got.size(); ++i) CHECK_EQ(std::isnan(got[i]), i / 20 == 1);
}

}  // namespace

CHECK_MAIN()
