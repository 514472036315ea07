// What the Python tests cannot reach: operands as outputs, strides, in-place use, refusals of the
// registry; and that every operator's errors are typed.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "arrays.h"
#include "check.h"
#include "cpu/operand.h"
#include "effinfer/error.h"
#include "effinfer/ops/activation.h"
#include "effinfer/ops/convert_rows.h"
#include "effinfer/ops/elementwise.h"
#include "effinfer/ops/embedding.h"
#include "effinfer/ops/norm.h"
#include "effinfer/ops/rope.h"
#include "ops/activation.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/norm.h"
#include "ops/operand.h"
#include "ops/registry.h"
#include "ops/rope.h"

using namespace effinfer;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

ThreadPool& pool() {
  static ThreadPool instance(2);
  return instance;
}

std::vector<float> random_values(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  return normals(count, random);
}

TensorView view(const std::vector<float>& values, const Dims& dims) {
  return {values.data(), DType::f32, dims};
}
TensorView view(const std::vector<int32_t>& values, const Dims& dims) {
  return {values.data(), DType::i32, dims};
}

StridedView rows(std::vector<float>& values, const Dims& dims) {
  return StridedView::dense(values.data(), DType::f32, dims);
}

// 64-byte aligned rows of an operand.
struct Operand {
  ops::Operand act;
  std::vector<uint8_t> storage;

  Operand(ops::Arithmetic arithmetic, int64_t rows, int64_t cols) {
    act = {arithmetic, rows, cols, nullptr};
    storage.assign(static_cast<size_t>(rows * act.row_bytes() + 64), 0xcd);
    void* data = storage.data();
    size_t space = storage.size();
    act.data = std::align(64, static_cast<size_t>(rows * act.row_bytes()), data, space);
  }
};

}  // namespace

TEST("rms_norm: an operand is that of the float result") {
  constexpr int64_t kRows = 5;
  at_every_isa([] {
    for (const int64_t cols : {64, 100, 576}) {
      const std::vector<float> x = random_values(kRows * cols, 1);
      const std::vector<float> weight = random_values(cols, 2);
      const std::vector<float> residual = random_values(kRows * cols, 3);
      std::vector<float> sum = residual, out = x;
      ops::fused_add_rmsnorm(rows(out, {kRows, cols}), rows(sum, {kRows, cols}),
                             view(weight, {cols}), {}, pool());
      for (const auto arithmetic :
           {ops::Arithmetic::int8, ops::Arithmetic::bf16, ops::Arithmetic::f32}) {
        const Operand expected(arithmetic, kRows, cols);
        for (int64_t row = 0; row < kRows; ++row) {
          cpu::store_operand_row(current_isa())(expected.act, row, &out[row * cols]);
        }
        const Operand actual(arithmetic, kRows, cols);
        std::vector<float> actual_sum = x;
        ops::RmsNormProblem problem;
        problem.x = {actual_sum.data(), cols, cols};
        problem.rows = kRows;
        problem.cols = cols;
        problem.weight = weight.data();
        problem.add_to = {residual.data(), cols, cols};
        problem.sum_out = {actual_sum.data(), cols, cols};
        problem.out_operand = actual.act;
        ops::run_alone(problem, pool());
        CHECK(std::memcmp(actual.act.data, expected.act.data,
                          static_cast<size_t>(kRows * expected.act.row_bytes())) == 0);
        CHECK(actual_sum == sum);
      }
    }
  });
}

TEST("rms_norm: in place") {
  at_every_isa([] {
    std::vector<float> x = random_values(3 * 4 * 50, 4);
    const std::vector<float> weight = random_values(50, 5);
    std::vector<float> expected(x.size());
    const Dims dims{3, 4, 50};
    ops::rmsnorm(rows(x, dims), view(weight, {50}), {}, rows(expected, dims), pool());
    ops::rmsnorm(rows(x, dims), view(weight, {50}), {}, rows(x, dims), pool());
    CHECK(x == expected);
  });
}

TEST("unary: strided rows leave what lies between them alone") {
  at_every_isa([] {
    constexpr int64_t kRows = 7, kStride = 45, kOutStride = 41;
    for (const int64_t cols : {0, 1, 16, 37}) {
      const std::vector<float> x = random_values(kRows * kStride, 6);
      std::vector<float> out(kRows * kOutStride, 99.0f);
      ops::UnaryProblem problem{ops::UnaryOp::scale, 2.0f,      x.data(), kRows, cols, kStride,
                                out.data(),          kOutStride};
      ops::run_alone(problem, pool());
      for (int64_t i = 0; i < kRows * kOutStride; ++i) {
        const int64_t row = i / kOutStride, col = i % kOutStride;
        CHECK_EQ(out[i], col < cols ? 2.0f * x[row * kStride + col] : 99.0f);
      }
    }
  });
}

TEST("unary: levels with a fused multiply-add give the same bits") {
  std::vector<Isa> levels = available_isas();
  std::erase(levels, Isa::portable);
  if (levels.size() < 2) check::skip("needs two levels with a fused multiply-add");
  std::vector<float> x = random_values(5000, 8);
  for (size_t i = 0; i < x.size(); i += 3) x[i] *= 30.0f;  // where functions saturate, too
  const Isa before = current_isa();
  ops::for_unary_ops([&](ops::UnaryOp op) {
    std::vector<std::vector<float>> outs;
    for (const Isa isa : levels) {
      set_isa(isa);
      outs.emplace_back(x.size());
      ops::unary(op, view(x, {5000}), 3.0f, outs.back().data(), pool());
      CHECK(std::memcmp(outs.back().data(), outs[0].data(), x.size() * sizeof(float)) == 0);
    }
  });
  set_isa(before);
}

TEST("unary, binary and rope: in place") {
  at_every_isa([] {
    std::vector<float> x = random_values(6 * 2 * 70, 7);
    const std::vector<int32_t> positions = {0, 1, 5, 9, 100, 3000};
    std::vector<float> table(6 * 66), expected(x.size()), actual = x;
    RopeParameters parameters;
    parameters.dims = 66;
    ops::rope_table(view(positions, {6}), ops::rope_frequencies(parameters), table.data(), pool());
    for (const bool interleaved : {false, true}) {
      actual = x;
      const StridedView in_place = rows(actual, {6, 2, 70});
      ops::apply_rope(rows(x, {6, 2, 70}), in_place, view(table, {6, 66}), {}, interleaved,
                      rows(expected, {6, 2, 70}), in_place, pool());
      CHECK(actual == expected);
    }
    ops::silu(view(x, {840}), expected.data(), pool());
    actual = x;
    ops::silu(view(actual, {840}), actual.data(), pool());
    CHECK(actual == expected);
    ops::add(view(x, {840}), view(expected, {840}), expected.data(), pool());
    ops::add(view(x, {840}), view(actual, {840}), actual.data(), pool());
    CHECK(actual == expected);
  });
}

TEST("the registry refuses what no kernel can do, and says why") {
  const auto select = [](const auto& problem) {
    ops::table<std::decay_t<decltype(problem)>>().select(problem, current_target());
  };
  ops::EmbeddingProblem embedding;
  embedding.dtype = DType::i32;
  CHECK_THROWS(Unsupported, "dtype=i32", select(embedding));
  embedding.dtype = DType::q4_k;
  embedding.cols = 100;
  CHECK_THROWS(Unsupported, "whole number of blocks", select(embedding));
  ops::RmsNormProblem norm;
  CHECK_THROWS(Unsupported, "cols and groups must be positive", select(norm));
  norm.cols = 64;
  norm.groups = 2;
  norm.out_operand.cols = 128;
  CHECK_THROWS(Unsupported, "a matmul operand has one group", select(norm));
  ops::RopeProblem rope;
  rope.dims = 6;
  rope.head_dim = 4;
  CHECK_THROWS(Unsupported, "dims must be at most head_dim", select(rope));
  rope.dims = 3;
  CHECK_THROWS(Unsupported, "dims must be even", select(rope));
  ops::RopeTableProblem table;
  table.dims = 3;
  CHECK_THROWS(Unsupported, "dims must be even", select(table));
}

TEST("operators: every name is its operator, and nothing else is one") {
  ops::for_unary_ops([](ops::UnaryOp op) { CHECK(ops::parse_unary_op(name(op)) == op); });
  for (size_t i = 0; i < ops::kBinaryOpNames.size(); ++i) {
    const auto op = static_cast<ops::BinaryOp>(i);
    CHECK(ops::parse_binary_op(name(op)) == op);
  }
  CHECK_THROWS(InvalidArgument, "expected one of scale, softcap", ops::parse_unary_op("none"));
  CHECK_THROWS(InvalidArgument, "got \"swish\"", ops::parse_unary_op("swish"));
  const auto past = static_cast<ops::UnaryOp>(ops::kUnaryOps.size());
  CHECK_THROWS(InvalidArgument, "[unary] op", name(past));
  CHECK_THROWS(InvalidArgument, "[binary] op", name(static_cast<ops::BinaryOp>(100)));
  CHECK_EQ(names(ops::UnaryOp::softcap).parameter, "cap");
  CHECK(!ops::is_activation(past) && !ops::is_activation(ops::UnaryOp::softcap));

  ops::UnaryProblem none;
  CHECK_THROWS(Unsupported, "has no operation", ops::table<ops::UnaryProblem>().select(none, {}));
  ops::GatedProblem gated;
  gated.op = ops::UnaryOp::scale;
  CHECK_THROWS(Unsupported, "must be an activation",
               ops::table<ops::GatedProblem>().select(gated, {}));
}

TEST("errors of the element-by-element operators are typed") {
  const std::vector<float> x(6);
  const TensorView floats = view(x, {2, 3});
  const TensorView halves{x.data(), DType::f16, {2, 3}};
  std::vector<float> out(6);
  for (const auto op : {ops::silu, ops::gelu_tanh, ops::relu_squared, ops::sigmoid}) {
    CHECK_THROWS(InvalidArgument, "x: expected dtype f32, got f16", op(halves, out.data(), pool()));
  }
  for (const auto op : {ops::softcap, ops::scale}) {
    CHECK_THROWS(InvalidArgument, "x: expected dtype", op(halves, 1.0f, out.data(), pool()));
  }
  for (const float cap : {0.0f, -1.0f, kNan}) {
    CHECK_THROWS(InvalidArgument, "[softcap] cap", ops::softcap(floats, cap, out.data(), pool()));
  }
  for (const auto op : {ops::add, ops::mul}) {
    CHECK_THROWS(InvalidArgument, "b: expected shape [2, 3], got [3, 2]",
                 op(floats, view(x, {3, 2}), out.data(), pool()));
    CHECK_THROWS(InvalidArgument, "a: expected dtype", op(halves, floats, out.data(), pool()));
    CHECK_THROWS(InvalidArgument, "b: expected dtype", op(floats, halves, out.data(), pool()));
  }
}

TEST("conversions: a factor, saturation, groups with strides, in place") {
  // Rows of 2 x 3 numbers in 2 x 4 places: what lies between stays as it is.
  std::vector<float> x = {1.0f, -2.0f, 1e6f, 0.0f, 3.0f, -1e6f, 0.25f, 0.0f};
  StridedView from = rows(x, {2, 4});
  from.dims = {2, 3};
  std::vector<uint8_t> narrow(8, 0xcd);
  StridedView to = StridedView::dense(narrow.data(), DType::f8_e4m3, {2, 4});
  to.dims = {2, 3};
  ops::convert_rows(from, 2.0f, to, pool());
  const std::vector<uint8_t> expected = {0x40, 0xc8, 0x7e, 0xcd, 0x4c, 0xfe, 0x30, 0xcd};
  CHECK(narrow == expected);
  ops::convert_rows(from, 0.5f, from, pool());
  CHECK(x == std::vector<float>({0.5f, -1.0f, 5e5f, 0.0f, 1.5f, -5e5f, 0.125f, 0.0f}));
}

TEST("errors of the norms and look-ups are typed") {
  const std::vector<float> x(6);
  const TensorView floats = view(x, {2, 3});
  std::vector<float> out(6), sum(6);
  const StridedView to = rows(out, {2, 3});
  const auto norm = [&](const TensorView& weight, const ops::RmsNormOptions& options) {
    ops::rmsnorm(to, weight, options, to, pool());
  };
  CHECK_THROWS(InvalidArgument, "[rmsnorm] weight", norm(view(x, {6}), {}));
  CHECK_THROWS(InvalidArgument, "[rmsnorm] eps", norm({}, {kNan}));
  CHECK_THROWS(InvalidArgument, "[rmsnorm] out", ops::rmsnorm(to, {}, {}, rows(sum, {6}), pool()));
  CHECK_THROWS(InvalidArgument, "[fused_add_rmsnorm] residual",
               ops::fused_add_rmsnorm(to, rows(sum, {6}), {}, {}, pool()));
  CHECK_THROWS(InvalidArgument, "[layernorm] beta",
               ops::layernorm(to, view(x, {3}), view(x, {6}), 1e-6f, to, pool()));
  CHECK_THROWS(InvalidArgument, "[convert_rows] out: expected shape [2, 3], got [6]",
               ops::convert_rows(to, 1.0f, rows(sum, {6}), pool()));
  CHECK_THROWS(InvalidArgument, "[convert_rows] scale", ops::convert_rows(to, kNan, to, pool()));
  CHECK_THROWS(InvalidArgument, "[quantize] rows: expected dtype f32, f16, bf16",
               ops::convert_rows(StridedView::dense(sum.data(), DType::i32, {2, 3}), 1.0f, to,
                                 pool(), {"quantize", "rows", "out"}));
  CHECK_THROWS(InvalidArgument, "[silu_and_mul] input", ops::silu_and_mul(to, to, pool()));
  const std::vector<int32_t> ids = {1, 2};
  CHECK_THROWS(InvalidArgument, "[embedding] ids[1]",
               ops::embedding(view(ids, {2}), floats, 1.0f, out.data(), pool()));
  CHECK_THROWS(InvalidArgument, "[embedding] table",
               ops::embedding(view(ids, {1}), view(x, {6}), 1.0f, out.data(), pool()));
  CHECK_THROWS(
      InvalidArgument, "[embedding] table",
      ops::embedding(view(ids, {1}), {x.data(), DType::q8_0, {2, 3}}, 1.0f, out.data(), pool()));
  CHECK_THROWS(InvalidArgument, "[select_rows] rows[1]",
               ops::select_rows(floats, view(ids, {2}), out.data(), pool()));
  CHECK_THROWS(InvalidArgument, "[select_rows] rows",
               ops::select_rows(floats, floats, out.data(), pool()));
}

TEST("errors of rope are typed") {
  const std::vector<float> x(16);
  std::vector<float> out(16);
  RopeParameters parameters;
  CHECK_THROWS(InvalidArgument, "[rope_frequencies] dims", ops::rope_frequencies(parameters));
  parameters.dims = 4;
  CHECK_THROWS(InvalidArgument, "[rope_frequencies] divisors",
               ops::rope_frequencies(parameters, view(x, {3})));
  parameters.scaling = RopeScaling::llama3;
  CHECK_THROWS(InvalidArgument, "original_max_position", ops::rope_frequencies(parameters));
  CHECK_THROWS(InvalidArgument, "[rope] scaling", parse_rope_scaling("NTK"));
  CHECK_THROWS(InvalidArgument, "[rope_table] positions",
               ops::rope_table(view(x, {4}), {{1.0f}, 1.0f}, out.data(), pool()));
  const auto apply = [&](const StridedView& q, const TensorView& table) {
    ops::apply_rope(q, q, table, {}, false, q, q, pool());
  };
  CHECK_THROWS(InvalidArgument, "[apply_rope] q", apply(rows(out, {16}), view(x, {2, 8})));
  CHECK_THROWS(InvalidArgument, "[apply_rope] q", apply(rows(out, {2, 1, 8}), view(x, {1, 8})));
  CHECK_THROWS(InvalidArgument, "[apply_rope] cos_sin_cache",
               apply(rows(out, {2, 2, 4}), view(x, {2, 8})));
}

TEST("null data is an error unless the tensor is empty") {
  const std::vector<float> x(16);
  const std::vector<int32_t> ids = {0, 1};
  std::vector<float> out(16);
  const TensorView null_floats{nullptr, DType::f32, {2, 8}};
  const TensorView null_ids{nullptr, DType::i32, {2}};
  const TensorView floats = view(x, {2, 8});
  CHECK_THROWS(InvalidArgument, "x: expected data, got null",
               ops::silu(null_floats, out.data(), pool()));
  CHECK_THROWS(InvalidArgument, "out: expected data", ops::silu(floats, nullptr, pool()));
  CHECK_THROWS(InvalidArgument, "b: expected data",
               ops::add(floats, null_floats, out.data(), pool()));
  CHECK_THROWS(InvalidArgument, "out: expected data", ops::mul(floats, floats, nullptr, pool()));
  const StridedView null_rows = StridedView::dense(nullptr, DType::f32, {2, 8});
  CHECK_THROWS(InvalidArgument, "out: expected data",
               ops::rmsnorm(rows(out, {2, 8}), {}, {}, null_rows, pool()));
  CHECK_THROWS(InvalidArgument, "residual: expected data",
               ops::fused_add_rmsnorm(rows(out, {2, 8}), null_rows, {}, {}, pool()));
  CHECK_THROWS(InvalidArgument, "ids: expected data",
               ops::embedding(null_ids, floats, 1.0f, out.data(), pool()));
  CHECK_THROWS(InvalidArgument, "table: expected data",
               ops::embedding(view(ids, {2}), null_floats, 1.0f, out.data(), pool()));
  CHECK_THROWS(InvalidArgument, "out: expected data",
               ops::select_rows(floats, view(ids, {2}), nullptr, pool()));
  CHECK_THROWS(InvalidArgument, "positions: expected data",
               ops::rope_table(null_ids, {{1.0f}, 1.0f}, out.data(), pool()));
  const StridedView heads = rows(out, {2, 1, 8});
  CHECK_THROWS(InvalidArgument, "cos_sin_cache: expected data",
               ops::apply_rope(heads, heads, null_floats, {}, false, heads, heads, pool()));
  ops::silu({nullptr, DType::f32, {0, 8}}, nullptr, pool());
  const StridedView no_rows = StridedView::dense(nullptr, DType::f32, {0, 8});
  ops::rmsnorm(no_rows, {}, {}, no_rows, pool());
}

CHECK_MAIN()
