// Rows into matmul operands on the GPU.
#include <cstring>

#include "cpp/arrays.h"
#include "cpp/check.h"
#include "cpu/operand.h"
#include "effinfer/error.h"
#include "gpu/float_rows.h"
#include "ops/operand.h"

namespace effinfer {
namespace {

using ops::Arithmetic;

TEST("rows of any length, padded with zeros") {
  std::mt19937 random(1);
  for (const Arithmetic arithmetic : {Arithmetic::bf16, Arithmetic::f32}) {
    const DType dtype = arithmetic == Arithmetic::bf16 ? DType::bf16 : DType::f32;
    for (const int64_t cols : {1, 7, 63, 64, 65, 512, 2047, 2049, 5000}) {
      for (const int64_t stride : {cols, cols + 3, (cols + 7) / 4 * 4}) {
        constexpr int64_t kRows = 3;
        std::vector<float> x = normals(kRows * stride, random);
        x[0] = std::numeric_limits<float>::quiet_NaN();
        x[static_cast<size_t>(stride + cols - 1)] = std::numeric_limits<float>::infinity();
        ops::Operand out{arithmetic, kRows, cols, nullptr};
        const FloatRows x_there(DType::f32, x);
        const auto row_values = out.row_bytes() / dtype_info(dtype).block_bytes;
        const FloatRows out_there(dtype, kRows * row_values);
        out.data = out_there.data();
        run_on_gpu(ops::ToOperandProblem{static_cast<const float*>(x_there.data()), stride, out});
        const std::vector<float> got = out_there.values();
        for (int64_t row = 0; row < kRows; ++row) {
          for (int64_t k = 0; k < row_values; ++k) {
            const float value = got[static_cast<size_t>(row * row_values + k)];
            if (k < cols) {
              CHECK(same_bits(value, rounded(dtype, x[static_cast<size_t>(row * stride + k)])));
            } else if (k < ops::padded_cols(cols)) {
              CHECK_EQ(value, 0.0f);
            }
          }
        }
      }
    }
  }
}

TEST("no rows") {
  const FloatRows there(DType::f32, 64);
  const ops::Operand out{Arithmetic::f32, 0, 64, there.data()};
  run_on_gpu(ops::ToOperandProblem{static_cast<const float*>(there.data()), 64, out});
  CHECK(std::isnan(there.values()[0]));
}

TEST("rows under one scale have the CPU's bits") {
  std::mt19937 random(2);
  for (const int64_t cols : {1, 63, 64, 255, 256, 257, 2047, 2560, 7000}) {
    for (const int64_t stride : {cols, cols + 1, (cols + 7) / 4 * 4}) {
      constexpr int64_t kRows = 6;
      std::vector<float> x = normals(kRows * stride, random);
      const auto row = [&](int64_t i) { return x.begin() + i * stride; };
      row(0)[cols - 1] = 40.0f;
      std::fill_n(row(1), cols, 0.0f);
      row(2)[cols / 2] = std::numeric_limits<float>::quiet_NaN();
      row(3)[0] = -std::numeric_limits<float>::infinity();
      for (int64_t k = 0; k < cols; ++k) row(4)[k] *= 1e-37f;  // below the smallest scale
      const ops::Operand shape{Arithmetic::int8_token, kRows, cols, nullptr};
      const auto bytes = static_cast<size_t>(kRows * shape.row_bytes());
      std::vector<uint8_t> expected(bytes + 64, 0xff);
      ops::Operand here = shape;
      here.data = expected.data() + (64 - reinterpret_cast<uintptr_t>(expected.data()) % 64);
      const DeviceArray<float> x_there(x);
      const DeviceArray<uint8_t> out_there(bytes);
      ops::Operand there = shape;
      there.data = out_there.data();
      run_on_gpu(ops::ToOperandProblem{x_there.data(), stride, there});
      const std::vector<uint8_t> got = out_there.values();
      const int64_t padded = ops::padded_cols(cols);
      const auto written = static_cast<size_t>(padded + 8 + (padded + 255) / 256 * 4);
      for (int64_t i = 0; i < kRows; ++i) {
        cpu::store_operand_row(Isa::portable)(here, i, x.data() + i * stride);
        CHECK(std::memcmp(got.data() + i * shape.row_bytes(), here.row(i), written) == 0);
      }
    }
  }
}

TEST("what a GPU does not multiply is refused") {
  const ops::ToOperandProblem problem{nullptr, 0, {Arithmetic::int8, 1, 64, nullptr}};
  CHECK_THROWS(Unsupported, "multiplies in bf16 or f32", run_on_gpu(problem));
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
