// Matmul problems as a compiled step poses them: several parts, GLU, residuals and operands as
// output, at every ISA level, against float64.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>

#include "check.h"
#include "core/digest.h"
#include "cpu/operand.h"
#include "effinfer/error.h"
#include "ops/matmul.h"
#include "ops/registry.h"

namespace {

using namespace effinfer;
using namespace effinfer::ops;

struct Free {
  void operator()(void* pointer) const { std::free(pointer); }
};

std::vector<float> random_floats(int64_t count, uint32_t seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// A packed [rows, cols] weight of `dtype` and its values.
struct Weight {
  PackedBuffer packed;
  std::vector<float> values;

  Weight(DType dtype, int64_t rows, int64_t cols, uint32_t seed) {
    ThreadPool pool(1);
    TensorView view{nullptr, dtype, {rows, cols}};
    std::vector<uint8_t> bytes(view.num_bytes());
    std::mt19937 random(seed);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    // Any 16 bits may be a scale or a number: give the upper byte a small exponent.
    for (size_t i = 1; i < bytes.size(); i += 2) {
      bytes[i] = static_cast<uint8_t>((bytes[i] & 0x83) | 0x28);
    }
    view.data = bytes.data();
    packed = pack(view, pool);
    std::vector<float> group(static_cast<size_t>(16 * cols));
    for (int64_t g = 0; g < packed.view.groups(); ++g) {
      unpack_group(packed.view, g, group.data());
      const int64_t count = std::min<int64_t>(16, rows - 16 * g) * cols;
      values.insert(values.end(), group.begin(), group.begin() + count);
    }
    std::vector<float> row(static_cast<size_t>(cols));
    for (int64_t r = 0; r < rows; ++r) {
      unpack_row(packed.view, r, row.data());
      CHECK(std::memcmp(row.data(), values.data() + r * cols, row.size() * sizeof(float)) == 0);
    }
  }
};

// An operand and the values that it stands for.
struct OwnedOperand {
  Operand view;
  std::unique_ptr<void, Free> memory;

  OwnedOperand(Arithmetic arithmetic, int64_t rows, int64_t cols) {
    view = {arithmetic, rows, cols, nullptr};
    const auto bytes = static_cast<size_t>(rows * view.row_bytes());
    memory.reset(std::aligned_alloc(64, bytes));
    view.data = memory.get();
    std::memset(view.data, 0xee, bytes);
  }

  void store(const std::vector<float>& values, Isa isa) const {
    for (int64_t t = 0; t < view.rows; ++t) {
      cpu::store_operand_row(isa)(view, t, values.data() + t * view.cols);
    }
  }

  double value(int64_t row, int64_t k) const {
    if (view.arithmetic == Arithmetic::f32) {
      return reinterpret_cast<const float*>(view.row(row))[k];
    }
    const Int8Row record = int8_row(view, row);
    return static_cast<double>(record.scales[k / 16]) * record.q[k];
  }

  bool operator==(const OwnedOperand& other) const {
    return std::memcmp(view.data, other.view.data,
                       static_cast<size_t>(view.rows * view.row_bytes())) == 0;
  }
};

double dot(const OwnedOperand& x, int64_t row, const Weight& weight, int64_t output) {
  const int64_t cols = x.view.cols;
  double sum = 0;
  for (int64_t k = 0; k < cols; ++k) {
    sum += x.value(row, k) * weight.values[static_cast<size_t>(output * cols + k)];
  }
  return sum;
}

double activate(UnaryOp glu, double x) {
  if (glu == UnaryOp::silu) return x / (1 + std::exp(-x));
  if (glu == UnaryOp::gelu) return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
  if (glu == UnaryOp::relu_squared) return x > 0 ? x * x : 0;
  if (glu == UnaryOp::sigmoid) return 1 / (1 + std::exp(-x));
  return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

void run(const MatmulProblem& problem, Isa isa, ThreadPool& pool) {
  const Variant<MatmulProblem>& variant = table<MatmulProblem>().select(problem, {.isa = isa});
  if (variant.scratch_bytes != nullptr) pool.reserve_scratch(variant.scratch_bytes(problem));
  pool.parallel([&](Team& team) { variant.run(problem, team); });
}

void check_close(double got, double expected, double magnitude, const char* what) {
  if (std::abs(got - expected) <= 1e-6 * magnitude + 1e-30) return;
  check::fail(__FILE__, __LINE__,
              std::string(what) + ": got " + std::to_string(got) + ", expected " +
                  std::to_string(expected));
}

TEST("every weight type, packed and multiplied at every level") {
  for (int type = 0; type < kNumDTypes; ++type) {
    const auto dtype = static_cast<DType>(type);
    const DTypeInfo& info = dtype_info(dtype);
    const bool dense = dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
    if ((!info.quantized && !dense) || info.tail_bytes > 0) continue;
    const int64_t cols = dense ? 100 : info.block_size == 32 ? 96 : 256;
    const Weight weight(dtype, 33, cols, static_cast<uint32_t>(type));
    double largest = 0;
    for (const float value : weight.values) largest = std::max<double>(largest, std::abs(value));
    for (const Isa isa : available_isas()) {
      for (const Arithmetic arithmetic : {Arithmetic::int8, Arithmetic::f32}) {
        if (dense && arithmetic == Arithmetic::int8) continue;
        for (const int64_t rows : {1, 2, 3, 9, 12, 14}) {
          const OwnedOperand operand(arithmetic, rows, cols);
          operand.store(random_floats(rows * cols, 41), isa);
          std::vector<float> out(static_cast<size_t>(rows * 33));
          MatmulProblem problem;
          problem.x = operand.view;
          problem.num_parts = 1;
          problem.parts[0] = {weight.packed.view, nullptr, nullptr, out.data(), 33};
          ThreadPool pool(2);
          run(problem, isa, pool);
          for (int64_t i = 0; i < rows * 33; ++i) {
            const double expected = dot(operand, i / 33, weight, i % 33);
            check_close(out[static_cast<size_t>(i)], expected, largest * static_cast<double>(cols),
                        info.name.data());
          }
        }
      }
    }
  }
}

TEST("parts of several types share one call") {
  constexpr int64_t kCols = 256;
  const Weight q(DType::q4_1, 96, kCols, 1);
  const Weight k(DType::q6_k, 40, kCols, 2);
  const Weight v(DType::q8_0, 17, kCols, 3);
  const std::vector<float> x = random_floats(7 * kCols, 4);
  const std::vector<float> bias = random_floats(40, 5);
  for (const Isa isa : available_isas()) {
    for (const Arithmetic arithmetic : {Arithmetic::int8, Arithmetic::f32}) {
      const OwnedOperand operand(arithmetic, 7, kCols);
      operand.store(x, isa);
      std::vector<float> out(7 * 200, -1.0f);  // the three results side by side, with a gap
      MatmulProblem problem;
      problem.x = operand.view;
      problem.num_parts = 3;
      problem.parts[0] = {q.packed.view, nullptr, nullptr, out.data(), 200};
      problem.parts[1] = {k.packed.view, bias.data(), nullptr, out.data() + 96, 200};
      problem.parts[2] = {v.packed.view, nullptr, nullptr, out.data() + 136, 200};
      ThreadPool pool(2);
      run(problem, isa, pool);
      for (int64_t t = 0; t < 7; ++t) {
        const float* row = out.data() + t * 200;
        for (int64_t n = 0; n < 96; ++n) check_close(row[n], dot(operand, t, q, n), 200, "q");
        for (int64_t n = 0; n < 40; ++n) {
          const double expected = dot(operand, t, k, n) + bias[static_cast<size_t>(n)];
          check_close(row[96 + n], expected, 4000, "k");
        }
        for (int64_t n = 0; n < 17; ++n) {
          check_close(row[136 + n], dot(operand, t, v, n), 200, "v");
        }
        for (int64_t n = 153; n < 200; ++n) CHECK_EQ(row[n], -1.0f);
      }
    }
  }
}

// The GLU of two weights as floats, with a residual in place, and as operands of both kinds.
void check_glu(UnaryOp glu, Arithmetic arithmetic, int64_t rows, int64_t outputs, Isa isa) {
  constexpr int64_t kCols = 96;
  const Weight gate(DType::q4_0, outputs, kCols, 11);
  const Weight up(DType::q5_0, outputs, kCols, 12);
  const std::vector<float> x = random_floats(rows * kCols, 13, 3.0f);
  const std::vector<float> residual = random_floats(rows * outputs, 14);
  const OwnedOperand operand(arithmetic, rows, kCols);
  operand.store(x, isa);
  std::vector<float> plain(residual.size());
  std::vector<float> out = residual;
  MatmulProblem problem;
  problem.x = operand.view;
  problem.num_parts = 2;
  problem.glu = glu;
  problem.parts[0] = {gate.packed.view, nullptr, nullptr, plain.data(), outputs};
  problem.parts[1] = {up.packed.view, nullptr, nullptr, nullptr, 0};
  ThreadPool pool(2);
  run(problem, isa, pool);
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t n = 0; n < outputs; ++n) {
      const double g = dot(operand, t, gate, n);
      const double u = dot(operand, t, up, n);
      const double expected = activate(glu, g) * u;
      check_close(plain[static_cast<size_t>(t * outputs + n)], expected,
                  (std::abs(g) + 20) * (std::abs(u) + 20), "glu");
    }
  }
  problem.parts[0].residual = out.data();
  problem.parts[0].out = out.data();
  run(problem, isa, pool);
  for (size_t i = 0; i < out.size(); ++i) CHECK_EQ(out[i], plain[i] + residual[i]);

  problem.parts[0].residual = nullptr;
  for (const Arithmetic kind : {Arithmetic::int8, Arithmetic::f32, Arithmetic::bf16}) {
    const OwnedOperand expected(kind, rows, outputs);
    const OwnedOperand got(kind, rows, outputs);
    std::memset(expected.view.data, 0, static_cast<size_t>(rows * expected.view.row_bytes()));
    std::memset(got.view.data, 0, static_cast<size_t>(rows * got.view.row_bytes()));
    expected.store(plain, isa);
    problem.out_operand = got.view;
    run(problem, isa, pool);
    CHECK(got == expected);
  }
}

TEST("GLU: floats, residual and operands") {
  for (const Isa isa : available_isas()) {
    for (const UnaryOp glu : {UnaryOp::silu, UnaryOp::gelu_tanh}) {
      for (const Arithmetic arithmetic : {Arithmetic::int8, Arithmetic::f32}) {
        check_glu(glu, arithmetic, 1, 64, isa);
        check_glu(glu, arithmetic, 3, 33, isa);
        check_glu(glu, arithmetic, 14, 80, isa);
      }
    }
  }
}

TEST("activations of GLU far from zero") {
  // One weight column carries the value, so that the sums are x itself and 1.
  const std::vector<float> xs = {-200, -90, -88, -30, -5, -1, -1e-6f, 0, 1e-6f, 1, 5, 30, 90, 200};
  const auto rows = static_cast<int64_t>(xs.size());
  const std::vector<float> ones = {1.0f, 0.0f};
  const std::vector<float> second = {0.0f, 1.0f};
  ThreadPool pool(1);
  const PackedBuffer gate = pack({ones.data(), DType::f32, {1, 2}}, pool);
  const PackedBuffer up = pack({second.data(), DType::f32, {1, 2}}, pool);
  std::vector<float> x;
  for (const float value : xs) x.insert(x.end(), {value, 1.0f});
  for (const Isa isa : available_isas()) {
    for (const UnaryOp glu : {UnaryOp::silu, UnaryOp::gelu, UnaryOp::gelu_tanh,
                              UnaryOp::relu_squared, UnaryOp::sigmoid}) {
      const OwnedOperand operand(Arithmetic::f32, rows, 2);
      operand.store(x, isa);
      std::vector<float> out(xs.size());
      MatmulProblem problem;
      problem.x = operand.view;
      problem.num_parts = 2;
      problem.glu = glu;
      problem.parts[0] = {gate.view, nullptr, nullptr, out.data(), 1};
      problem.parts[1] = {up.view, nullptr, nullptr, nullptr, 0};
      run(problem, isa, pool);
      for (size_t i = 0; i < xs.size(); ++i) {
        const double expected = activate(glu, xs[i]);
        // exp(-x) is right to 2 units in the last place of its argument times ln 2.
        const double slack = 4e-7 * (std::abs(expected) + std::abs(expected * xs[i])) + 1e-34;
        CHECK(std::abs(out[i] - expected) <= slack);
      }
    }
  }
}

TEST("an operand as the output of one part") {
  const Weight weight(DType::q4_1, 70, 64, 21);
  const std::vector<float> x = random_floats(5 * 64, 22);
  for (const Isa isa : available_isas()) {
    const OwnedOperand operand(Arithmetic::int8, 5, 64);
    operand.store(x, isa);
    std::vector<float> plain(5 * 70);
    MatmulProblem problem;
    problem.x = operand.view;
    problem.num_parts = 1;
    problem.parts[0] = {weight.packed.view, nullptr, nullptr, plain.data(), 70};
    ThreadPool pool(3, true);
    run(problem, isa, pool);
    const OwnedOperand expected(Arithmetic::int8, 5, 70);
    const OwnedOperand got(Arithmetic::int8, 5, 70);
    std::memset(expected.view.data, 0, static_cast<size_t>(5 * expected.view.row_bytes()));
    std::memset(got.view.data, 0, static_cast<size_t>(5 * got.view.row_bytes()));
    expected.store(plain, isa);
    problem.out_operand = got.view;
    run(problem, isa, pool);
    CHECK(got == expected);
  }
}

// The k highest of a row as its lists say, over the members of a team.
std::vector<TopList::Entry> merged(const std::vector<TopList>& lists, int64_t rows, int64_t row,
                                   int32_t k) {
  TopList all;
  for (size_t i = static_cast<size_t>(row); i < lists.size(); i += static_cast<size_t>(rows)) {
    for (int32_t j = 0; j < lists[i].count; ++j) all.add(lists[i].entries[j], k);
  }
  return {all.entries, all.entries + all.count};
}

// Compares the lists of `rows` rows' highest outputs with a sort of all outputs, at every level
// that has a kernel; returns whether one has.
bool check_highest(const Weight& weight, int64_t rows, Arithmetic arithmetic) {
  const int64_t outputs = weight.packed.view.rows;
  const int64_t cols = weight.packed.view.cols;
  const OwnedOperand operand(arithmetic, rows, cols);
  std::vector<float> out(static_cast<size_t>(rows * outputs));
  ThreadPool pool(3, true);
  bool checked = false;
  for (const Isa isa : available_isas()) {
    MatmulProblem problem;
    problem.x = operand.view;
    problem.num_parts = 1;
    problem.parts[0] = {weight.packed.view, nullptr, nullptr, out.data(), outputs};
    if (table<MatmulProblem>().find(problem, {.isa = isa}) == nullptr) continue;
    checked = true;
    operand.store(random_floats(rows * cols, 52), isa);
    run(problem, isa, pool);
    problem.parts[0].out = nullptr;
    for (const int32_t k : {1, 5, kMaxTop}) {
      if (k > outputs) continue;
      std::vector<TopList> lists(static_cast<size_t>(3 * rows));
      problem.top = lists.data();
      problem.top_k = k;
      run(problem, isa, pool);
      for (int64_t row = 0; row < rows; ++row) {
        const float* values = out.data() + row * outputs;
        std::vector<int32_t> order(static_cast<size_t>(outputs));
        std::iota(order.begin(), order.end(), 0);
        std::ranges::stable_sort(order,
                                 [&](int32_t a, int32_t b) { return values[a] > values[b]; });
        const std::vector<TopList::Entry> got = merged(lists, rows, row, k);
        CHECK_EQ(got.size(), static_cast<size_t>(k));
        for (size_t i = 0; i < got.size(); ++i) {
          CHECK_EQ(got[i].index, order[i]);
          CHECK_EQ(got[i].value, values[order[i]]);
        }
      }
    }
  }
  return checked;
}

// Outputs have many ties: rows of few different weights.
bool check_highest(Arithmetic arithmetic) {
  bool checked = false;
  for (const int64_t outputs : {7, 33, 500}) {
    const Weight weight(DType::q8_0, outputs, 64, 51);
    for (int64_t g = 1; g < weight.packed.view.groups(); g += 2) {
      auto* data = static_cast<uint8_t*>(weight.packed.storage.get());
      const auto bytes = static_cast<size_t>(weight.packed.view.group_bytes);
      std::memcpy(data + static_cast<size_t>(g) * bytes, data, bytes);
    }
    for (const int64_t rows : {1, 3, 20}) checked |= check_highest(weight, rows, arithmetic);
  }
  return checked;
}

TEST("the highest outputs are those that a sort of all outputs gives") {
  CHECK(check_highest(Arithmetic::int8));
  CHECK(check_highest(Arithmetic::f32));
}

TEST("the highest outputs are those that a sort of all outputs gives, with bf16 operands") {
  if (!check_highest(Arithmetic::bf16)) {
    check::skip("this build has no bf16 kernel for this CPU");
  }
}

TEST("lists of the highest outputs: both zeros alike, infinities in order, NaNs told") {
  std::vector<float> row = {-0.0f, 0.0f, 3.0f, -INFINITY, INFINITY, -1.0f, 3.0f};
  ThreadPool pool(2);
  for (const bool nan : {false, true}) {
    if (nan) row[5] = -NAN;
    const PackedBuffer weight =
        pack({row.data(), DType::f32, {static_cast<int64_t>(row.size()), 1}}, pool);
    for (const Isa isa : available_isas()) {
      const OwnedOperand operand(Arithmetic::f32, 1, 1);
      operand.store({1.0f}, isa);
      std::vector<TopList> lists(2);
      MatmulProblem problem;
      problem.x = operand.view;
      problem.num_parts = 1;
      problem.parts[0].weight = weight.view;
      problem.top = lists.data();
      problem.top_k = 6;
      run(problem, isa, pool);
      CHECK_EQ(lists[0].nans + lists[1].nans > 0, nan);
      if (nan) continue;
      const std::vector<TopList::Entry> got = merged(lists, 1, 0, 6);
      const std::vector<int32_t> expected = {4, 2, 6, 0, 1, 5};
      CHECK_EQ(got.size(), expected.size());
      for (size_t i = 0; i < got.size(); ++i) CHECK_EQ(got[i].index, expected[i]);
    }
  }
}

TEST("what no kernel fits is refused with reasons") {
  const Weight weight(DType::q4_0, 32, 64, 31);
  ThreadPool pool(1);
  const std::vector<float> values = random_floats(32 * 64, 32);
  const PackedBuffer dense = pack({values.data(), DType::f32, {32, 64}}, pool);
  MatmulProblem problem;
  problem.x = {Arithmetic::int8, 1, 64, nullptr};
  problem.num_parts = 1;
  problem.parts[0].weight = dense.view;
  CHECK_THROWS(Unsupported, "dense weights need f32 or bf16 operands",
               table<MatmulProblem>().select(problem, current_target()));
  problem.parts[0].weight = weight.packed.view;
  problem.x.cols = 32;
  CHECK_THROWS(Unsupported, "different inner sizes",
               table<MatmulProblem>().select(problem, current_target()));
  problem.x.cols = 64;
  problem.glu = UnaryOp::silu;
  CHECK_THROWS(Unsupported, "GLU needs two weights",
               table<MatmulProblem>().select(problem, current_target()));
  problem.num_parts = 2;
  problem.parts[1].weight = weight.packed.view;
  problem.glu = UnaryOp::softcap;
  CHECK_THROWS(Unsupported, "the gate of a GLU is an activation",
               table<MatmulProblem>().select(problem, current_target()));
}

// Packed weights are kept on disk. When this fails because the layout was changed: raise
// kPackedLayoutVersion, then put the new fingerprint here.
TEST("the packed layout is that of its version") {
  ThreadPool pool(1);
  std::vector<Digest> digests;
  for (const DType dtype :
       {DType::f32, DType::f16, DType::bf16, DType::q4_0, DType::q4_1, DType::q5_0, DType::q5_1,
        DType::q8_0, DType::q2_k, DType::q3_k, DType::q4_k, DType::q5_k, DType::q6_k, DType::iq4_nl,
        DType::iq4_xs, DType::tq1_0, DType::tq2_0}) {
    const Weight weight(dtype, 19, 256, 7);
    digests.push_back(digest({weight.packed.view.data, weight.packed.view.num_bytes()}, pool));
  }
  CHECK_EQ(kPackedLayoutVersion, 2u);
  CHECK_EQ(to_hex(digest_chunks(digests, 0)), "b356a0cd918fdd3c21346d222fbcd18f");
}

TEST("packing refuses bad shapes") {
  ThreadPool pool(1);
  const uint8_t byte = 0;
  CHECK_THROWS(InvalidArgument, "[rows, cols]", pack({&byte, DType::q4_0, {32}}, pool));
  CHECK_THROWS(InvalidArgument, "[rows, cols]", pack({&byte, DType::q4_0, {0, 32}}, pool));
  CHECK_THROWS(InvalidArgument, "weight type", pack({&byte, DType::i32, {1, 1}}, pool));
  CHECK_THROWS(InvalidArgument, "", pack({&byte, DType::q4_0, {1, 33}}, pool));
  const int64_t huge = int64_t{1} << 31;
  CHECK_THROWS(Error, "", pack({&byte, DType::f32, {huge, huge}}, pool));
}

}  // namespace

CHECK_MAIN()
