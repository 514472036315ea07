// Ternary weights: packing, the int8_token operand, and products that are the same bits in every
// variant of the table.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>

#include "check.h"
#include "core/digest.h"
#include "cpu/operand.h"
#include "cpu/ternary_lines.h"
#include "effinfer/error.h"
#include "effinfer/gguf.h"
#include "effinfer/tuning.h"
#include "ops/matmul.h"
#include "ops/registry.h"
#include "ternary_weights.h"

#if EFFINFER_X86
#include "emulated_amx.h"

void emulated::refuse(const char* expected) {
  throw std::logic_error(std::string("[amx] the tile unit expected ") + expected);
}
#endif

namespace {

using namespace effinfer;
using namespace effinfer::ops;

struct OwnedOperand {
  Operand view;
  Memory memory;

  OwnedOperand(const std::vector<float>& values, int64_t rows, int64_t cols, Isa isa) {
    view = {Arithmetic::int8_token, rows, cols, nullptr};
    memory = allocate(static_cast<size_t>(rows * view.row_bytes()));
    view.data = memory.get();
    for (int64_t t = 0; t < rows; ++t)
      cpu::store_operand_row(isa)(view, t, values.data() + t * cols);
  }
};

std::vector<float> random_floats(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// The definition of a product (ops/matmul.h), by loops.
float reference(const OwnedOperand& x, int64_t t, const Ternary& weight, int64_t r) {
  const TokenRow row = token_row(x.view, t);
  bool uniform = true;
  for (int64_t g = r / 16 * 16; g < std::min(r / 16 * 16 + 16, weight.rows); ++g) {
    for (int64_t b = 1; b < weight.blocks(); ++b) {
      uniform = uniform && weight.scale(g, b) == weight.scale(g, 0);
    }
  }
  int64_t total = 0;
  float s = 0;
  for (int64_t b = 0; b < weight.blocks(); ++b) {
    int64_t sum = 0;
    for (int64_t k = 256 * b; k < std::min(256 * b + 256, weight.cols); ++k) {
      sum += (weight.digit(r, k) - 1) * row.q[k];
    }
    total += sum;
    s = std::fma(static_cast<float>(sum), weight.scale(r, b), s);
  }
  if (uniform) return static_cast<float>(total) * (row.scale * weight.scale(r, 0));
  return s * row.scale;
}

// The variants that this machine runs, and the kernel of AMX over an emulated tile unit.
std::vector<Variant<MatmulProblem>> runnable_variants() {
  const std::vector<Isa> isas = available_isas();
  std::vector<Variant<MatmulProblem>> variants;
  for (const Variant<MatmulProblem>& variant : table<MatmulProblem>().variants()) {
    if (std::find(isas.begin(), isas.end(), variant.isa) == isas.end()) continue;
    variants.push_back(variant);
    if (variant.name != std::string_view("matmul.avx512.ternary")) continue;
#if EFFINFER_X86
    if (!cpu_features().avx512_bf16) continue;  // what the helper is compiled for
    variants.push_back(
        {"emulated.amx.ternary", Isa::amx, variant.rejects, emulated::matmul_ternary});
#endif
  }
  return variants;
}

// Runs the problem in every variant that takes it, the portable ones too.
template <class Body>
void for_variants(const MatmulProblem& problem, int threads, Body&& check) {
  int count = 0;
  ThreadPool pool(threads, true);
  for (const Variant<MatmulProblem>& variant : runnable_variants()) {
    if (variant.rejects(problem) != nullptr) continue;
    if (variant.scratch_bytes != nullptr) pool.reserve_scratch(variant.scratch_bytes(problem));
    pool.parallel([&](Team& team) { variant.run(problem, team); });
    check(variant.name);
    ++count;
  }
  CHECK(count >= 1);
}

TEST("products run on the emulated tile unit, too") {
#if EFFINFER_X86
  if (!cpu_features().avx512_bf16) check::skip("the emulation needs AVX512-BF16");
  const std::vector<Variant<MatmulProblem>> variants = runnable_variants();
  CHECK_EQ(std::count_if(variants.begin(), variants.end(),
                         [](const auto& v) { return v.run == emulated::matmul_ternary; }),
           1);
#else
  check::skip("other processors have no AMX");
#endif
}

void check_product(const PackedWeight& packed, const Ternary& weight, const OwnedOperand& x,
                   int threads) {
  const int64_t tokens = x.view.rows;
  std::vector<float> expected;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t r = 0; r < weight.rows; ++r) expected.push_back(reference(x, t, weight, r));
  }
  std::vector<float> out(expected.size());
  MatmulProblem problem;
  problem.x = x.view;
  problem.num_parts = 1;
  problem.parts[0] = {packed, nullptr, nullptr, out.data(), weight.rows};
  for_variants(problem, threads, [&](const std::string& name) {
    size_t wrong = 0;
    for (size_t i = 0; i < out.size(); ++i) wrong += out[i] != expected[i];
    if (wrong > 0) {
      check::fail(__FILE__, __LINE__,
                  name + ": " + std::to_string(wrong) + " of " + std::to_string(out.size()) +
                      " differ, rows=" + std::to_string(weight.rows) +
                      " cols=" + std::to_string(weight.cols) + " tokens=" + std::to_string(tokens) +
                      " " + to_string(packed.format));
    }
    std::fill(out.begin(), out.end(), -1.0f);
  });
}

TEST("the int8_token operand: the definition, at every level") {
  for (const int64_t cols : {1, 15, 64, 100, 256, 257, 700, 2560}) {
    std::vector<float> x = random_floats(7 * cols, static_cast<uint32_t>(cols));
    std::fill_n(x.begin() + cols, cols, 0.0f);
    std::fill_n(x.begin() + 2 * cols, cols, 1e-37f);
    x[static_cast<size_t>(3 * cols)] = std::numeric_limits<float>::infinity();
    x[static_cast<size_t>(5 * cols - 1)] = std::numeric_limits<float>::quiet_NaN();
    x[static_cast<size_t>(5 * cols)] = 1e30f;
    for (const Isa isa : available_isas()) {
      const OwnedOperand operand(x, 7, cols, isa);
      for (int64_t t = 0; t < 7; ++t) {
        const TokenRow row = token_row(operand.view, t);
        const float* values = x.data() + t * cols;
        float max = 0;
        for (int64_t k = 0; k < cols; ++k) max = std::max(max, std::abs(values[k]));
        const bool finite = t != 3 && t != 4;
        const bool zero = !finite || max < kSmallestBlock;
        if (finite) CHECK_EQ(row.scale, zero ? 0.0f : max / 127.0f);
        if (!finite) CHECK(std::isnan(row.scale));
        int32_t sum = 0;
        for (int64_t k = 0; k < padded_cols(cols); ++k) {
          const float q = zero || k >= cols ? 0.0f : std::nearbyint(values[k] * (127.0f / max));
          CHECK_EQ(static_cast<int>(row.q[k]), static_cast<int>(q));
          sum += static_cast<int32_t>(q);
          if (k % 256 == 255 || k + 1 == padded_cols(cols)) {
            int32_t before = 0;
            for (int64_t b = 0; b < k / 256; ++b) before += row.sums[b];
            CHECK_EQ(row.sums[k / 256], sum - before);
          }
        }
        CHECK_EQ(row.sum, sum);
      }
    }
  }
}

TEST("packed ternary weights keep the file's values bit for bit") {
  ThreadPool pool(2, true);
  for (const Scales scales : {Scales::row, Scales::block}) {
    for (const int64_t rows : {1, 16, 37}) {
      Ternary weight = random_ternary(rows, 768, scales, 7);
      for (int64_t k = 256; k < 512; ++k) weight.digits[static_cast<size_t>(k)] = 1;
      weight.scales[1] = 0.0f;  // a block of zeros without a scale
      std::vector<uint8_t> bytes = to_tq2_0(weight);
      std::vector<float> expected(static_cast<size_t>(rows * 768));
      dequantize(DType::tq2_0, bytes.data(), rows * 768, expected.data());
      for (const TernaryForm form : {TernaryForm::t2, TernaryForm::t1_6}) {
        const PackedBuffer packed = pack({bytes.data(), DType::tq2_0, {rows, 768}}, pool, form);
        const bool uniform = scales == Scales::row || rows == 1;
        CHECK_EQ(cpu::is_uniform(packed.view.format, packed.view.data), uniform);
        std::vector<float> values(static_cast<size_t>(16 * 768));
        for (int64_t r = 0; r < rows; ++r) {
          const float* row = expected.data() + r * 768;
          unpack_row(packed.view, r, values.data());
          CHECK(std::memcmp(values.data(), row, 768 * sizeof(float)) == 0);
          unpack_group(packed.view, r / 16, values.data());
          CHECK(std::memcmp(values.data() + r % 16 * 768, row, 768 * sizeof(float)) == 0);
        }
      }
      bytes[0] |= 3;
      CHECK_THROWS(InvalidArgument, "codes 0, 1 and 2",
                   pack({bytes.data(), DType::tq2_0, {rows, 768}}, pool, TernaryForm::t2));
    }
  }
  const std::vector<uint8_t> other(2 * 34);
  CHECK_THROWS(InvalidArgument, "ternary type",
               pack({other.data(), DType::q8_0, {1, 64}}, pool, TernaryForm::t2));
}

// Raise kPackedLayoutVersion when this fails because the layout was changed (test_matmul.cpp).
TEST("the packed layout of ternary weights is that of its version") {
  ThreadPool pool(1);
  std::vector<Digest> digests;
  for (const Scales scales : {Scales::row, Scales::block}) {
    const std::vector<uint8_t> bytes = to_tq2_0(random_ternary(19, 768, scales, 3));
    for (const TernaryForm form : {TernaryForm::t2, TernaryForm::t1_6}) {
      const PackedBuffer packed = pack({bytes.data(), DType::tq2_0, {19, 768}}, pool, form);
      digests.push_back(digest({packed.view.data, packed.view.num_bytes()}, pool));
    }
  }
  CHECK_EQ(kPackedLayoutVersion, 2u);
  CHECK_EQ(to_hex(digest_chunks(digests, 0)), "23c8161d0b1e0a91a44642b4914f13d0");
}

TEST("tq1_0: all bytes, packed in both forms") {
  ThreadPool pool(1);
  std::vector<uint8_t> bytes(5 * 54);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i);
  for (size_t b = 0; b < 5; ++b) bytes[b * 54 + 53] = 0x2c;
  std::vector<float> expected(5 * 256);
  dequantize(DType::tq1_0, bytes.data(), 5 * 256, expected.data());
  for (const TernaryForm form : {TernaryForm::t2, TernaryForm::t1_6}) {
    const PackedBuffer packed = pack({bytes.data(), DType::tq1_0, {5, 256}}, pool, form);
    std::vector<float> values(16 * 256);
    unpack_group(packed.view, 0, values.data());
    CHECK(std::memcmp(values.data(), expected.data(), expected.size() * sizeof(float)) == 0);
  }
}

// Puts back the rows from which there are panels.
struct KeptPanels {
  PanelTuning t2 = panel_tuning(PackedTernary::t2);
  PanelTuning t1_6 = panel_tuning(PackedTernary::t1_6);
  ~KeptPanels() {
    set_panel_tuning(PackedTernary::t2, t2);
    set_panel_tuning(PackedTernary::t1_6, t1_6);
  }
};

TEST("products are the same bits from whatever rows on there are panels") {
  const KeptPanels kept;
  ThreadPool pool(1);
  const Ternary weight = random_ternary(70, 768, Scales::row, 13);
  const std::vector<uint8_t> bytes = to_tq2_0(weight);
  for (const int32_t rows : {0, 2, 3, 9, 17, 1024}) {
    for (const PackedTernary kind : kPackedTernary) {
      set_panel_tuning(kind, {rows, TuningSource::fixed, "a test"});
    }
    for (const TernaryForm form : {TernaryForm::t2, TernaryForm::t1_6}) {
      const PackedBuffer packed = pack({bytes.data(), DType::tq2_0, {70, 768}}, pool, form);
      for (const int64_t tokens : {1, 2, 3, 7, 8, 9, 16, 17, 40}) {
        const OwnedOperand x(random_floats(tokens * 768, 5), tokens, 768, Isa::portable);
        check_product(packed.view, weight, x, 3);
      }
    }
  }
}

TEST("products are the same bits in every variant") {
  ThreadPool pool(1);
  for (const Scales scales : {Scales::row, Scales::block}) {
    for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 256}, {16, 256}, {33, 512}, {70, 768}, {200, 2560}}) {
      const Ternary weight = random_ternary(rows, cols, scales, 11);
      const std::vector<uint8_t> bytes = to_tq2_0(weight);
      for (const TernaryForm form : {TernaryForm::t2, TernaryForm::t1_6}) {
        const PackedBuffer packed = pack({bytes.data(), DType::tq2_0, {rows, cols}}, pool, form);
        for (const int64_t tokens : {1, 2, 3, 5, 8, 9, 16, 33, 50, 100}) {
          if (rows * cols * tokens > 12'000'000) continue;
          const OwnedOperand x(random_floats(tokens * cols, 5), tokens, cols, Isa::portable);
          check_product(packed.view, weight, x, 3);
        }
      }
    }
  }
}

TEST("i2_s: values and products") {
  ThreadPool pool(2, true);
  for (const int64_t cols : {128, 384, 512, 2560}) {
    Ternary weight = random_ternary(21, cols, Scales::row, 41);
    std::fill(weight.scales.begin(), weight.scales.end(), 0.1f);  // no float16 value
    std::vector<uint8_t> bytes = to_i2_s(weight, 0.1f);
    const TensorView view{bytes.data(), DType::i2_s, {21, cols}};
    std::vector<float> expected(static_cast<size_t>(21 * cols));
    dequantize(DType::i2_s, bytes.data(), 21 * cols, expected.data());
    for (const TernaryForm form : {TernaryForm::u4, TernaryForm::t2, TernaryForm::t1_6}) {
      const PackedBuffer packed = pack(view, pool, form);
      std::vector<float> values(static_cast<size_t>(cols));
      for (int64_t r = 0; r < 21; ++r) {
        unpack_row(packed.view, r, values.data());
        const float* row = expected.data() + r * cols;
        CHECK(std::memcmp(values.data(), row, values.size() * sizeof(float)) == 0);
      }
      const OwnedOperand x(random_floats(3 * cols, 42), 3, cols, Isa::portable);
      check_product(packed.view, weight, x, 2);
    }
    bytes[40] = 0xc0;
    CHECK_THROWS(InvalidArgument, "codes 0, 1 and 2", pack(view, pool, TernaryForm::t1_6));
  }
}

TEST("products with ragged sizes") {
  for (const int64_t cols : {1, 63, 64, 65, 128, 192, 250, 320, 384, 448, 1000}) {
    for (const int64_t rows : {1, 17, 50}) {
      const Ternary weight = random_ternary(rows, cols, Scales::row, 13);
      for (const QuantBits bits : {QuantBits::t2, QuantBits::t1_6}) {
        const RowPacked packed(weight, bits);
        for (const int64_t tokens : {1, 2, 7, 20}) {
          const OwnedOperand x(random_floats(tokens * cols, 17), tokens, cols, Isa::portable);
          check_product(packed.view, weight, x, 2);
        }
      }
    }
  }
}

// What overflows where sums are kept in 16 bits for too long.
TEST("extreme sums are exact") {
  for (const int64_t cols : {6912, 17408, 131072}) {
    for (const int pattern : {0, 1, 2, 3}) {
      Ternary weight{2, cols, {}, {}};
      weight.digits.resize(static_cast<size_t>(2 * cols));
      weight.scales.assign(static_cast<size_t>(2 * weight.blocks()), 1.0f);
      std::vector<float> x(static_cast<size_t>(9 * cols));
      for (int64_t k = 0; k < cols; ++k) {
        const bool positive =
            pattern == 0 || (pattern == 2 && k % 2 == 0) || (pattern == 3 && k / 4 % 2 == 0);
        for (int64_t t = 0; t < 9; ++t) {
          x[static_cast<size_t>(t * cols + k)] = (t % 2 == 0) == positive ? 1.0f : -1.0f;
        }
        weight.digits[static_cast<size_t>(k)] = 2;
        weight.digits[static_cast<size_t>(cols + k)] = positive ? 2 : 0;
      }
      for (const QuantBits bits : {QuantBits::t2, QuantBits::t1_6}) {
        const RowPacked packed(weight, bits);
        for (const int64_t tokens : {1, 2, 9}) {
          if (tokens == 9 && cols > 20000) continue;
          const OwnedOperand operand(x, tokens, cols, Isa::portable);
          if (pattern == 0) {
            CHECK_EQ(reference(operand, 0, weight, 0),
                     static_cast<float>(127 * cols) * (1.0f / 127.0f));
          }
          check_product(packed.view, weight, operand, 1);
        }
      }
    }
  }
}

TEST("GLU with squared ReLU, parts, bias and residual") {
  constexpr int64_t kCols = 512;
  constexpr int64_t kRows = 45;
  ThreadPool pool(1);
  const Ternary gate = random_ternary(kRows, kCols, Scales::row, 21);
  const Ternary up = random_ternary(kRows, kCols, Scales::block, 22);
  const std::vector<uint8_t> gate_bytes = to_tq2_0(gate);
  const std::vector<uint8_t> up_bytes = to_tq2_0(up);
  const PackedBuffer packed_gate =
      pack({gate_bytes.data(), DType::tq2_0, {kRows, kCols}}, pool, TernaryForm::t1_6);
  const PackedBuffer packed_up =
      pack({up_bytes.data(), DType::tq2_0, {kRows, kCols}}, pool, TernaryForm::t2);
  for (const int64_t tokens : {1, 4, 40}) {
    const OwnedOperand x(random_floats(tokens * kCols, 23), tokens, kCols, Isa::portable);
    const std::vector<float> bias = random_floats(kRows, 24);
    const std::vector<float> residual = random_floats(tokens * kRows, 25);
    std::vector<float> out(static_cast<size_t>(tokens * kRows));
    std::vector<float> second(out.size());
    MatmulProblem problem;
    problem.x = x.view;
    problem.num_parts = 2;
    problem.parts[0] = {packed_gate.view, bias.data(), residual.data(), out.data(), kRows};
    problem.parts[1] = {packed_up.view, nullptr, nullptr, second.data(), kRows};
    const auto check = [&](bool glu) {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t r = 0; r < kRows; ++r) {
          const auto i = static_cast<size_t>(t * kRows + r);
          const float g = reference(x, t, gate, r) + bias[static_cast<size_t>(r)];
          const float u = reference(x, t, up, r);
          const float relu = std::max(0.0f, g);
          CHECK_EQ(out[i], glu ? relu * relu * u : g + residual[i]);
          if (!glu) CHECK_EQ(second[i], u);
        }
      }
    };
    for_variants(problem, 2, [&](const std::string&) { check(false); });
    problem.glu = UnaryOp::relu_squared;
    problem.parts[0].residual = nullptr;
    for_variants(problem, 2, [&](const std::string&) { check(true); });
    CHECK(describe(problem).find("relu_squared") != std::string::npos);
  }
}

TEST("what ternary kernels refuse") {
  const Ternary weight = random_ternary(16, 256, Scales::row, 31);
  const RowPacked packed(weight, QuantBits::t2);
  std::vector<float> out(16);
  MatmulProblem problem;
  problem.x = {Arithmetic::f32, 1, 256, nullptr};
  problem.num_parts = 1;
  problem.parts[0] = {packed.view, nullptr, nullptr, out.data(), 16};
  const auto select = [&] { table<MatmulProblem>().select(problem, {.isa = Isa::portable}); };
  CHECK_THROWS(Unsupported, "needs weights that are not ternary", select());
  problem.x.arithmetic = Arithmetic::int8;
  CHECK_THROWS(Unsupported, "no kernel for this weight format", select());
  problem.x.arithmetic = Arithmetic::int8_token;
  select();
  problem.out_operand = {Arithmetic::int8_token, 1, 16, out.data()};
  CHECK_THROWS(Unsupported, "by whole rows", select());
  problem.out_operand = {};
  problem.parts[0].weight.format = packed_format(DType::tq2_0);
  CHECK_THROWS(Unsupported, "packed as t2 or t1_6", select());
}

}  // namespace
CHECK_MAIN()
