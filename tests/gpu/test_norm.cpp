// RMS norm and layer norm on the GPU against float64.
#include "cpp/arrays.h"
#include "cpp/check.h"
#include "effinfer/error.h"
#include "gpu/float_rows.h"
#include "gpu/hopper_device.h"
#include "gpu/mutations.h"
#include "ops/norm.h"

namespace effinfer {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// What a sum of squares is off, relatively: at most 60 additions follow one another for a number,
// each wrong by 2^-24; a dozen roundings more on the way to a result.
constexpr double kSums = 72 * 0x1p-24;

// Rows of vectors and how they lie.
struct Shape {
  int64_t rows = 1;
  int64_t groups = 1;
  int64_t cols = 1;
  int64_t gap = 0;     // elements between vectors
  int64_t offset = 0;  // elements before the first one

  int64_t group_stride() const { return cols + gap; }
  int64_t stride() const { return groups * group_stride() + gap; }
  int64_t size() const { return rows * stride(); }
  size_t at(int64_t row, int64_t group, int64_t k) const {
    return static_cast<size_t>(row * stride() + group * group_stride() + k);
  }
  template <class View>
  View view(void* data) const {
    return {data, stride(), group_stride()};
  }
};

// Lengths on both sides of a warp's rows and of the numbers that threads keep, with and without
// whole chunks; strides of vector loads and others.
std::vector<Shape> shapes() {
  return {{3, 1, 1},          {9, 2, 3, 1},      {2, 5, 64},        {3, 2, 128, 8},
          {2, 1, 511},        {2, 1, 512},       {1, 1, 513, 0, 1}, {2, 1, 1000, 24},
          {1, 2, 1024, 0, 1}, {1, 1, 8192 + 72}, {1, 1, 9001, 3}};
}

struct Expected {
  std::vector<double> v;  // the row, with what is added
  std::vector<double> y;
  std::vector<double> error;  // of y, before it is rounded
};

using Numbers = std::vector<float>;

Expected rms_norm(const Numbers& x, const Numbers& add_to, const Numbers& weight, double offset,
                  double eps, const Shape& shape, int64_t row, int64_t group) {
  Expected out;
  double squares = 0;
  for (int64_t k = 0; k < shape.cols; ++k) {
    const size_t at = shape.at(row, group, k);
    const double added = add_to.empty() ? 0.0 : add_to[at];
    out.v.push_back(x[at] + added);
    squares += out.v.back() * out.v.back();
  }
  const double scale = 1 / std::sqrt(squares / static_cast<double>(shape.cols) + eps);
  for (int64_t k = 0; k < shape.cols; ++k) {
    const auto i = static_cast<size_t>(k);
    const double w = weight.empty() ? 1.0 : weight[i] + offset;
    // The weight and the offset may cancel each other out.
    const double w_error = weight.empty() ? 0 : (std::abs(weight[i]) + std::abs(offset)) * 0x1p-24;
    out.y.push_back(out.v[i] * scale * w);
    out.error.push_back(std::abs(out.y[i]) * kSums + std::abs(out.v[i] * scale) * w_error);
  }
  return out;
}

void check_row(const Numbers& got, const Expected& expected, DType dtype, const Shape& shape,
               int64_t row, int64_t group) {
  for (int64_t k = 0; k < shape.cols; ++k) {
    const auto i = static_cast<size_t>(k);
    const double y = expected.y[i];
    const double error = std::abs(got[shape.at(row, group, k)] - y);
    const double allowed = expected.error[i] + std::abs(y) * rounding(dtype) + 0x1p-25;
    if (error <= allowed) continue;
    check::fail(__FILE__, __LINE__,
                std::string(name(dtype)) + " cols=" + std::to_string(shape.cols) + " [" +
                    std::to_string(row) + "," + std::to_string(group) + "," + std::to_string(k) +
                    "]: " + std::to_string(got[shape.at(row, group, k)]) + ", expected " +
                    std::to_string(y));
    return;
  }
}

TEST("rms_norm of every type and shape") {
  std::mt19937 random(1);
  for (const DType dtype : kRowTypes) {
    for (const Shape& shape : shapes()) {
      for (const DType weight_dtype : {DType::f32, dtype}) {
        const Numbers x = rounded(dtype, normals(shape.size(), random));
        const Numbers weight = rounded(weight_dtype, normals(shape.cols, random));
        const FloatRows x_there(dtype, x, shape.offset);
        const FloatRows weight_there(weight_dtype, weight);
        const FloatRows out_there(dtype, shape.size());
        ops::RmsNormProblem p;
        p.dtype = dtype;
        p.x = shape.view<ops::ConstRows>(x_there.data());
        p.rows = shape.rows;
        p.groups = shape.groups;
        p.cols = shape.cols;
        p.weight_dtype = weight_dtype;
        p.weight = weight_there.data();
        p.weight_offset = 1.0f;
        p.eps = 1e-3f;
        p.out = shape.view<ops::Rows>(out_there.data());
        run_on_gpu(p);
        const Numbers got = out_there.values();
        for (int64_t i = 0; i < shape.rows * shape.groups; ++i) {
          const int64_t row = i / shape.groups, group = i % shape.groups;
          check_row(got, rms_norm(x, {}, weight, 1.0, 1e-3f, shape, row, group), dtype, shape, row,
                    group);
          for (int64_t k = 0; k < shape.gap; ++k) {
            CHECK(std::isnan(got[shape.at(row, group, shape.cols + k)]));
          }
        }
      }
    }
  }
}

TEST("what is added becomes the row, in place") {
  std::mt19937 random(2);
  for (const DType dtype : kRowTypes) {
    for (const Shape& shape : shapes()) {
      const Numbers x = rounded(dtype, normals(shape.size(), random));
      const Numbers residual = rounded(dtype, normals(shape.size(), random));
      const FloatRows x_there(dtype, x);
      const FloatRows residual_there(dtype, residual, shape.offset);
      ops::RmsNormProblem p;
      p.dtype = dtype;
      p.x = shape.view<ops::ConstRows>(x_there.data());
      p.rows = shape.rows;
      p.groups = shape.groups;
      p.cols = shape.cols;
      p.add_to = shape.view<ops::ConstRows>(residual_there.data());
      p.sum_out = shape.view<ops::Rows>(residual_there.data());
      p.out = shape.view<ops::Rows>(x_there.data());
      run_on_gpu(p);
      const Numbers got = x_there.values();
      const Numbers sums = residual_there.values();
      for (int64_t i = 0; i < shape.rows * shape.groups; ++i) {
        const int64_t row = i / shape.groups, group = i % shape.groups;
        const Expected expected = rms_norm(x, residual, {}, 0, 1e-6f, shape, row, group);
        check_row(got, expected, dtype, shape, row, group);
        for (int64_t k = 0; k < shape.cols; ++k) {
          const size_t at = shape.at(row, group, k);
          CHECK_EQ(sums[at], rounded(dtype, x[at] + residual[at]));
        }
      }
    }
  }
}

// The same rows by themselves, and off the alignment of vector loads.
TEST("a row's bits depend on the row alone") {
  std::mt19937 random(3);
  for (const DType dtype : kRowTypes) {
    for (const int64_t cols : {128, 640, 8264}) {
      const Shape shape{3, 1, cols};
      const Numbers x = rounded(dtype, normals(shape.size(), random));
      const Numbers weight = normals(cols, random);
      const FloatRows weight_there(DType::f32, weight);
      const auto run = [&]<class Problem>(Problem p, int64_t first, int64_t rows, int64_t offset) {
        const FloatRows x_there(dtype, x, offset);
        const FloatRows out_there(dtype, rows * cols);
        p.dtype = dtype;
        p.x = shape.view<ops::ConstRows>(x_there.data());
        p.x.data =
            static_cast<const char*>(p.x.data) + first * cols * dtype_info(dtype).block_bytes;
        p.rows = rows;
        p.cols = cols;
        p.weight = weight_there.data();
        p.out = shape.view<ops::Rows>(out_there.data());
        run_on_gpu(p);
        return out_there.values();
      };
      const auto compare = [&]<class Problem>(const Problem& p) {
        const Numbers all = run(p, 0, 3, 0);
        CHECK(same_bits(run(p, 0, 3, 1), all));
        for (int64_t row = 0; row < 3; ++row) {
          const auto begin = all.begin() + row * cols;
          CHECK(same_bits(run(p, row, 1, row), Numbers(begin, begin + cols)));
        }
      };
      compare(ops::RmsNormProblem{});
      ops::LayerNormProblem layer;
      layer.bias = weight_there.data();
      compare(layer);
    }
  }
}

// Of one multiprocessor, so that blocks have several rows.
TEST("rows that share a block have the bits that they have alone") {
  const OnHopper device(1);
  std::mt19937 random(7);
  for (const DType dtype : kRowTypes) {
    for (const Shape& shape : {Shape{17, 3, 72}, Shape{9, 1, 1000}, Shape{9, 1, 1001}}) {
      const Numbers x = rounded(dtype, normals(shape.size(), random));
      const Numbers weight = normals(shape.cols, random);
      const FloatRows x_there(dtype, x);
      const FloatRows weight_there(DType::f32, weight);
      const auto run = [&]<class Problem>(Problem p, int64_t first, int64_t rows) {
        const FloatRows out_there(dtype, shape.size());
        const int64_t skipped = first * shape.stride() * dtype_info(dtype).block_bytes;
        p.dtype = dtype;
        p.x = shape.view<ops::ConstRows>(static_cast<char*>(x_there.data()) + skipped);
        p.out = shape.view<ops::Rows>(static_cast<char*>(out_there.data()) + skipped);
        p.rows = rows;
        p.groups = shape.groups;
        p.cols = shape.cols;
        p.weight = weight_there.data();
        run_on_gpu(p);
        return out_there.values();
      };
      const auto compare = [&]<class Problem>(const Problem& p) {
        const Numbers all = run(p, 0, shape.rows);
        for (int64_t row = 0; row < shape.rows; ++row) {
          const Numbers alone = run(p, row, 1);
          const auto part = [&](const Numbers& of) {
            const auto begin = of.begin() + row * shape.stride();
            return Numbers(begin, begin + shape.stride());
          };
          CHECK(same_bits(part(alone), part(all)));
        }
      };
      ops::RmsNormProblem rms;
      rms.weight_is_fixed = true;
      compare(rms);
      ops::LayerNormProblem layer;
      layer.bias = weight_there.data();
      compare(layer);
    }
  }
}

template <class Problem>
void expect_barriers_matter(Problem p, const FloatRows& weight, const Shape& shape) {
  std::mt19937 random(6);
  const FloatRows x(DType::f32, normals(shape.size(), random));
  const auto run = [&] {
    const FloatRows out(DType::f32, shape.size());
    p.x = shape.view<ops::ConstRows>(x.data());
    p.rows = shape.rows;
    p.cols = shape.cols;
    p.weight = weight.data();
    p.out = shape.view<ops::Rows>(out.data());
    run_on_gpu(p);
    return out.values();
  };
  const Numbers right = run();
  expect_every_barrier_matters([&] { return same_bits(run(), right); }, 5);
}

TEST("rows of a block need their barriers, one row or several") {
  const FloatRows weight(DType::f32, Numbers(600, 1.0f));
  ops::LayerNormProblem layer;
  layer.bias = weight.data();
  const OnHopper device(1);
  for (const Shape& shape : {Shape{2, 1, 600}, Shape{11, 1, 600}}) {
    expect_barriers_matter(ops::RmsNormProblem{}, weight, shape);
    expect_barriers_matter(layer, weight, shape);
  }
}

TEST("into a matmul operand, padded with zeros though the row be NaN") {
  std::mt19937 random(4);
  for (const DType dtype : kRowTypes) {
    for (const ops::Arithmetic arithmetic : {ops::Arithmetic::bf16, ops::Arithmetic::f32}) {
      const DType made = arithmetic == ops::Arithmetic::bf16 ? DType::bf16 : DType::f32;
      for (const int64_t cols : {1, 5, 100, 128, 700, 8200}) {
        const Shape shape{3, 1, cols};
        Numbers x = rounded(dtype, normals(shape.size(), random));
        x[static_cast<size_t>(cols)] = kNaN;
        x[static_cast<size_t>(2 * cols)] = std::numeric_limits<float>::infinity();
        const Numbers weight = normals(cols, random);
        const FloatRows x_there(dtype, x);
        const FloatRows weight_there(DType::f32, weight);
        ops::RmsNormProblem p;
        p.dtype = dtype;
        p.x = shape.view<ops::ConstRows>(x_there.data());
        p.rows = shape.rows;
        p.cols = cols;
        p.weight = weight_there.data();
        p.out_operand = {arithmetic, shape.rows, cols, nullptr};
        const int64_t row_values = p.out_operand.row_bytes() / dtype_info(made).block_bytes;
        const FloatRows out_there(made, shape.rows * row_values);
        p.out_operand.data = out_there.data();
        run_on_gpu(p);
        const Numbers got = out_there.values();
        const Shape records{3, 1, cols, 0};
        Numbers first(got.begin(), got.begin() + cols);
        check_row(first, rms_norm(x, {}, weight, 0, 1e-6f, records, 0, 0), made, records, 0, 0);
        for (int64_t row = 0; row < 3; ++row) {
          for (int64_t k = 0; k < ops::padded_cols(cols); ++k) {
            const float y = got[static_cast<size_t>(row * row_values + k)];
            if (k >= cols) CHECK_EQ(y, 0.0f);
            // 1 / sqrt(infinity) is 0: the infinity becomes a NaN, all others of its row zeros.
            if (k < cols && row == 1) CHECK(std::isnan(y));
            if (k < cols && row == 2) CHECK(k == 0 ? std::isnan(y) : y == 0.0f);
          }
        }
      }
    }
  }
}

TEST("layer_norm of every type and shape, in place") {
  std::mt19937 random(5);
  for (const DType dtype : kRowTypes) {
    for (const Shape& shape : shapes()) {
      for (const DType weight_dtype : {DType::f32, dtype}) {
        Numbers x = normals(shape.size(), random);
        for (float& value : x) value += 3;
        x = rounded(dtype, x);
        const Numbers weight = rounded(weight_dtype, normals(shape.cols, random));
        const Numbers bias = rounded(weight_dtype, normals(shape.cols, random));
        const FloatRows x_there(dtype, x, shape.offset);
        const FloatRows weight_there(weight_dtype, weight);
        const FloatRows bias_there(weight_dtype, bias);
        ops::LayerNormProblem p;
        p.dtype = dtype;
        p.x = shape.view<ops::ConstRows>(x_there.data());
        p.rows = shape.rows;
        p.groups = shape.groups;
        p.cols = shape.cols;
        p.weight_dtype = weight_dtype;
        p.weight = weight_there.data();
        p.bias = bias_there.data();
        p.eps = 1e-2f;
        p.out = shape.view<ops::Rows>(x_there.data());
        run_on_gpu(p);
        const Numbers got = x_there.values();
        for (int64_t i = 0; i < shape.rows * shape.groups; ++i) {
          const int64_t row = i / shape.groups, group = i % shape.groups;
          const auto cols = static_cast<double>(shape.cols);
          double mean = 0, size = 0, squares = 0;
          for (int64_t k = 0; k < shape.cols; ++k) mean += x[shape.at(row, group, k)] / cols;
          for (int64_t k = 0; k < shape.cols; ++k) {
            const double v = x[shape.at(row, group, k)];
            size += std::abs(v) / cols;
            squares += (v - mean) * (v - mean) / cols;
          }
          const double scale = 1 / std::sqrt(squares + 1e-2f);
          Expected expected;
          for (int64_t k = 0; k < shape.cols; ++k) {
            const auto j = static_cast<size_t>(k);
            const double z = (x[shape.at(row, group, k)] - mean) * scale;
            expected.y.push_back(z * weight[j] + bias[j]);
            // The mean is off by kSums of what was added.
            expected.error.push_back(kSums * (std::abs(weight[j]) * (std::abs(z) + size * scale) +
                                              std::abs(expected.y[j])));
          }
          check_row(got, expected, dtype, shape, row, group);
        }
      }
    }
  }
}

TEST("no rows, and operands that a GPU does not multiply") {
  ops::RmsNormProblem p;
  p.cols = 64;
  run_on_gpu(p);
  ops::LayerNormProblem layer;
  layer.cols = 64;
  run_on_gpu(layer);
  p.out_operand = {ops::Arithmetic::int8, 0, 64, nullptr};
  CHECK_THROWS(Unsupported, "multiplies in bf16 or f32", run_on_gpu(p));
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
