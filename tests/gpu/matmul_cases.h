// What tests of GPU matmuls share: packed weights and operands there, and what a matmul should
// give.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/float16.h"
#include "cpp/arrays.h"
#include "cpp/check.h"
#include "cpu/packed_lines.h"
#include "gpu/device_arrays.h"
#include "ops/matmul.h"

namespace effinfer {

// A packed [rows, cols] weight of random bytes, on the GPU, and its values.
struct GpuWeight {
  ops::PackedBuffer packed;
  DeviceArray<uint8_t> there;
  std::vector<float> values;
  // |scale (q - zero)| + |minimum| of each: what roundings are relative to. Where there are minima
  // a kernel may multiply q + 128.
  std::vector<float> magnitudes;

  GpuWeight(DType dtype, int64_t rows, int64_t cols, std::mt19937& random) {
    ThreadPool pool(1);
    TensorView view{nullptr, dtype, {rows, cols}};
    std::vector<uint8_t> bytes(view.num_bytes());
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    // Any 16 bits may be a scale or a number: give the upper byte a small exponent.
    for (size_t i = 1; i < bytes.size(); i += 2) {
      bytes[i] = static_cast<uint8_t>((bytes[i] & 0x83) | 0x28);
    }
    view.data = bytes.data();
    packed = ops::pack(view, pool);
    there = DeviceArray<uint8_t>(
        std::vector<uint8_t>(packed.view.data, packed.view.data + packed.view.num_bytes()));
    values.resize(static_cast<size_t>(rows * cols));
    for (int64_t r = 0; r < rows; ++r) unpack_row(packed.view, r, values.data() + r * cols);
    find_magnitudes();
  }

  // Its first rows.
  ops::PackedWeight view(int64_t rows) const {
    ops::PackedWeight weight = packed.view;
    weight.data = there.data();
    weight.rows = rows;
    return weight;
  }
  ops::PackedWeight view() const { return view(packed.view.rows); }

 private:
  void find_magnitudes() {
    const ops::PackedWeight& weight = packed.view;
    magnitudes = values;
    for (float& x : magnitudes) x = std::abs(x);
    if (!weight.format.has_min) return;
    const int64_t step = weight.format.sub_block;
    for (int64_t group = 0; group * 16 < weight.rows; ++group) {
      for (int64_t first = 0; first < weight.cols; first += step) {
        const cpu::Affine affine =
            cpu::load_affine(weight.format, weight, weight.group(group), first / ops::kSuperblock,
                             first % ops::kSuperblock / step);
        for (int64_t row = group * 16; row < std::min(weight.rows, group * 16 + 16); ++row) {
          const float minimum = affine.min[row % 16];
          const float scale = std::abs(affine.scale[row % 16]);
          for (int64_t k = first; k < std::min(weight.cols, first + step); ++k) {
            const auto i = static_cast<size_t>(row * weight.cols + k);
            magnitudes[i] = std::abs(values[i] - minimum) + std::abs(minimum) + 256 * scale;
          }
        }
      }
    }
  }
};

// Rows of activations as an operand on the GPU. What lies behind its padding are NaNs.
struct GpuOperand {
  ops::Operand view;
  std::vector<float> values;  // as rounded
  DeviceArray<uint8_t> there;

  GpuOperand(ops::Arithmetic arithmetic, int64_t rows, int64_t cols, std::vector<float> x)
      : view{arithmetic, rows, cols, nullptr}, values(std::move(x)) {
    const bool narrow = arithmetic == ops::Arithmetic::bf16;
    std::vector<uint8_t> bytes(static_cast<size_t>(rows * view.row_bytes()), 0xff);
    for (int64_t t = 0; t < rows; ++t) {
      uint8_t* row = bytes.data() + t * view.row_bytes();
      std::memset(row, 0, static_cast<size_t>(ops::padded_cols(cols) * (narrow ? 2 : 4)));
      for (int64_t k = 0; k < cols; ++k) {
        float& value = values[static_cast<size_t>(t * cols + k)];
        if (narrow) {
          const uint16_t bits = f32_to_bf16(value);
          std::memcpy(row + k * 2, &bits, 2);
          value = bf16_to_f32(bits);
        } else {
          std::memcpy(row + k * 4, &value, 4);
        }
      }
    }
    there = DeviceArray<uint8_t>(bytes);
    view.data = there.data();
  }

  // Its rows from `first` on.
  ops::Operand slice(int64_t first, int64_t rows) const {
    ops::Operand part = view;
    part.data = there.data() + first * view.row_bytes();
    part.rows = rows;
    return part;
  }
};

// A sum in float64, and how far one in float32 may be from it.
struct Expected {
  double value = 0;
  double slack = 0;
};

// Products are exact. A sum has at most as many roundings as terms, whatever their order, each of
// at most one unit in the last place (tensor cores cut off) of partial sums that the magnitudes
// bound; scales and minima add three more.
inline Expected expected_output(const GpuOperand& x, int64_t token, const GpuWeight& weight,
                                int64_t row) {
  const int64_t cols = x.view.cols;
  const float* a = x.values.data() + token * cols;
  double sum = 0;
  double magnitude = 0;
  for (int64_t k = 0; k < cols; ++k) {
    const auto at = static_cast<size_t>(row * cols + k);
    sum += static_cast<double>(a[k]) * weight.values[at];
    magnitude += std::abs(static_cast<double>(a[k]) * weight.magnitudes[at]);
  }
  // A random walk of roundings stays far below their number; 8 sigma of it.
  const double roundings = 3 + std::min<double>(cols, 8 * std::sqrt(static_cast<double>(cols)));
  return {sum, roundings * 0x1p-24 * magnitude + 1e-30};
}

inline bool is_near(float got, const Expected& expected) {
  return std::abs(got - expected.value) <= expected.slack;
}

// Every type of file that has a matmul here.
inline std::vector<DType> matmul_types() {
  std::vector<DType> types;
  for (int type = 0; type < kNumDTypes; ++type) {
    const auto dtype = static_cast<DType>(type);
    const DTypeInfo& info = dtype_info(dtype);
    const bool dense = dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
    if ((info.quantized || dense) && info.tail_bytes == 0) types.push_back(dtype);
  }
  return types;
}

inline bool is_dense(DType dtype) {
  return !dtype_info(dtype).quantized;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// `out`, [x.rows, weight.rows], is what `expected(x, token, weight, row)` says.
template <class Of>
void check_product(const GpuOperand& x, const GpuWeight& weight, const std::vector<float>& out,
                   Of&& expected) {
  const int64_t rows = weight.packed.view.rows;
  for (int64_t i = 0; i < x.view.rows * rows; ++i) {
    const Expected wanted = expected(x, i / rows, weight, i % rows);
    const float got = out[static_cast<size_t>(i)];
    if (is_near(got, wanted)) continue;
    check::fail(__FILE__, __LINE__,
                std::string(name(weight.packed.view.source)) + " at " + std::to_string(i) +
                    ": got " + std::to_string(got) + ", expected " + std::to_string(wanted.value) +
                    " +- " + std::to_string(wanted.slack));
    return;
  }
}

// A NaN and an infinity in two tokens change what `product(x, weight)` gives of these alone.
template <class Product>
void check_tokens_apart(ops::Arithmetic arithmetic, DType dtype, std::mt19937& random,
                        Product&& product) {
  const GpuWeight weight(dtype, 20, 256, random);
  std::vector<float> values = normals(11 * 256, random);
  const GpuOperand clean(arithmetic, 11, 256, values);
  values[3 * 256 + 100] = NAN;
  values[9 * 256 + 255] = INFINITY;
  const GpuOperand x(arithmetic, 11, 256, values);
  const std::vector<float> expected = product(clean.view, weight.view());
  const std::vector<float> got = product(x.view, weight.view());
  for (size_t i = 0; i < got.size(); ++i) {
    const size_t token = i / 20;
    if (token == 3) CHECK(std::isnan(got[i]));
    if (token == 9) CHECK(!std::isfinite(got[i]));
    if (token != 3 && token != 9) CHECK_EQ(got[i], expected[i]);
  }
}

}  // namespace effinfer
