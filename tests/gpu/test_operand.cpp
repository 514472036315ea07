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

// Rows with numbers of all kinds, which both write.
void check_integers(Arithmetic arithmetic, int64_t cols, int64_t stride, std::mt19937& random) {
  constexpr int64_t kRows = 6;
  std::vector<float> x = normals(kRows * stride, random);
  const auto row = [&](int64_t i) { return x.begin() + i * stride; };
  row(0)[cols - 1] = 40.0f;
  std::fill_n(row(1), cols, 0.0f);
  row(2)[cols / 2] = std::numeric_limits<float>::quiet_NaN();
  row(3)[0] = -std::numeric_limits<float>::infinity();
  for (int64_t k = 0; k < cols; ++k) row(4)[k] *= 1e-37f;  // below the smallest scale
  const ops::Operand shape{arithmetic, kRows, cols, nullptr};
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
  const int64_t written = arithmetic == Arithmetic::int8 ? padded + padded / 4 * 2 + padded / 8
                                                         : padded + 8 + (padded + 255) / 256 * 4;
  // NaNs may be any, where floats begin.
  const auto is_nan = [](const uint8_t* bytes_of) {
    float value;
    std::memcpy(&value, bytes_of, 4);
    return std::isnan(value);
  };
  for (int64_t i = 0; i < kRows; ++i) {
    cpu::store_operand_row(Isa::portable)(here, i, x.data() + i * stride);
    const uint8_t* record = got.data() + i * shape.row_bytes();
    CHECK(std::memcmp(record, here.row(i), static_cast<size_t>(padded)) == 0);
    for (int64_t at = padded; at < written; at += 4) {
      const bool same = std::memcmp(record + at, here.row(i) + at, 4) == 0;
      CHECK(same || (is_nan(record + at) && is_nan(here.row(i) + at)));
    }
  }
}

TEST("rows of integers have the CPU's bits") {
  std::mt19937 random(2);
  for (const Arithmetic arithmetic : {Arithmetic::int8, Arithmetic::int8_token}) {
    for (const int64_t cols : {1, 63, 64, 255, 256, 257, 2047, 2560, 7000}) {
      for (const int64_t stride : {cols, cols + 1, (cols + 7) / 4 * 4}) {
        check_integers(arithmetic, cols, stride, random);
      }
    }
  }
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
