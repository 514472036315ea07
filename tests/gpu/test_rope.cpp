// The rope table and the rotation of heads on the GPU.
#include "cpp/arrays.h"
#include "cpp/check.h"
#include "gpu/float_rows.h"
#include "ops/rope.h"

namespace effinfer {
namespace {

TEST("cosines and sines are those of the float32 angle, correctly rounded") {
  for (const int32_t dims : {2, 20, 128}) {
    for (const float theta : {1e4f, 5e5f}) {
      RopeParameters parameters;
      parameters.dims = dims;
      parameters.theta = theta;
      std::vector<float> inv_freq(static_cast<size_t>(dims / 2));
      ops::rope_inv_freq(parameters, nullptr, inv_freq.data());
      std::vector<int32_t> positions = {0,    1,    2,      3,       11,       333,
                                        4095, 8191, 99'991, 131'071, 1'000'000};
      for (int32_t i = 0; i < 200; ++i) positions.push_back(i * 5003 + 17);
      positions.push_back(std::numeric_limits<int32_t>::max());
      const DeviceArray<float> inv_freq_there(inv_freq);
      const DeviceArray<int32_t> positions_there(positions);
      const DeviceArray<float> out(positions.size() * static_cast<size_t>(dims));
      ops::RopeTableProblem p;
      p.positions = positions_there.data();
      p.rows = static_cast<int64_t>(positions.size());
      p.dims = dims;
      p.inv_freq = inv_freq_there.data();
      p.factor = 1.25f;
      p.out = out.data();
      run_on_gpu(p);
      const std::vector<float> got = out.values();
      const auto half = inv_freq.size();
      for (size_t row = 0; row < positions.size(); ++row) {
        for (size_t i = 0; i < half; ++i) {
          const double angle = static_cast<float>(positions[row]) * inv_freq[i];
          CHECK_EQ(got[row * 2 * half + i], static_cast<float>(std::cos(angle)) * 1.25f);
          CHECK_EQ(got[(row * 2 + 1) * half + i], static_cast<float>(std::sin(angle)) * 1.25f);
        }
      }
    }
  }
}

TEST("positions become places in chunks, and rows of long texts larger") {
  const std::vector<float> inv_freq = {1.0f, 0.1f};
  const std::vector<int32_t> positions = {0, 255, 256, 1000, 319, 320, 5000, 77, 600};
  // Two rows of a sequence that the map is not for, and one of none.
  const std::vector<int32_t> qo_indptr = {0, 3, 5, 8};
  const std::vector<uint8_t> unchunked = {0, 1, 0};
  const DeviceArray<float> inv_freq_there(inv_freq), out(positions.size() * 4);
  const DeviceArray<int32_t> positions_there(positions), qo_indptr_there(qo_indptr);
  const DeviceArray<uint8_t> unchunked_there(unchunked);
  ops::RopeTableProblem p;
  p.positions = positions_there.data();
  p.rows = static_cast<int64_t>(positions.size());
  p.dims = 4;
  p.inv_freq = inv_freq_there.data();
  p.map = {256, 256, 319, 320};
  p.batch.num_sequences = 3;
  p.batch.qo_indptr = qo_indptr_there.data();
  p.batch.unchunked = unchunked_there.data();
  p.out = out.data();
  run_on_gpu(p);
  const std::vector<float> got = out.values();
  for (size_t row = 0; row < positions.size(); ++row) {
    const bool mapped = row < 3 || (row >= 5 && row < 8);
    const double tokens = positions[row] + 1.0;
    const double root = 0.1 * std::log(std::max(tokens / 320, 1.0)) + 1.0;
    const float growth = mapped && tokens > 320 ? static_cast<float>(root * root) : 1.0f;
    const int32_t place = mapped ? std::min(positions[row] % 256 + 256, 319) : positions[row];
    for (size_t i = 0; i < 2; ++i) {
      const double angle = static_cast<float>(place) * inv_freq[i];
      CHECK_EQ(got[row * 4 + i], static_cast<float>(std::cos(angle)) * growth);
      CHECK_EQ(got[row * 4 + 2 + i], static_cast<float>(std::sin(angle)) * growth);
    }
  }
}

// Angles near multiples of pi / 2, where little is left after the reduction, and infinite ones.
TEST("angles of all sizes") {
  std::vector<float> angles = {0.0f, -0.0f, 1e-30f, 0.785398f, 0.785399f, 3.1415927f, -7.0f};
  for (int i = 1; i < 2000; i += 7) angles.push_back(static_cast<float>(i * M_PI_2));
  for (float x = 1e3f; x < 2e9f; x *= 1.37f) angles.push_back(x);
  angles.push_back(std::numeric_limits<float>::infinity());
  angles.push_back(std::numeric_limits<float>::quiet_NaN());
  const DeviceArray<float> there(angles);
  const DeviceArray<int32_t> position(std::vector<int32_t>{1});
  const DeviceArray<float> out(2 * angles.size());
  ops::RopeTableProblem p;
  p.positions = position.data();
  p.rows = 1;
  p.dims = static_cast<int32_t>(2 * angles.size());
  p.inv_freq = there.data();
  p.out = out.data();
  run_on_gpu(p);
  const std::vector<float> got = out.values();
  for (size_t i = 0; i < angles.size(); ++i) {
    const double angle = angles[i];
    CHECK(same_bits(got[i], static_cast<float>(std::cos(angle))));
    // Either zero is one.
    CHECK(same_bits(got[angles.size() + i] + 0.0f, static_cast<float>(std::sin(angle)) + 0.0f));
  }
}

struct Heads {
  int32_t heads;
  int32_t head_dim;
  int32_t dims;
  int64_t gap = 0;  // elements between heads
  int64_t offset = 0;
};

void check_rope(DType dtype, bool interleaved, bool in_place, bool has_positions,
                const Heads& shape, std::mt19937& random) {
  constexpr int64_t kRows = 5;
  constexpr int64_t kAngles = 9;
  const std::vector<int32_t> positions = {8, 0, 3, 3, 7};
  const int64_t group_stride = shape.head_dim + shape.gap;
  const int64_t stride = shape.heads * group_stride + shape.gap;
  const std::vector<float> x = rounded(dtype, normals(kRows * stride, random));
  const std::vector<float> table = normals(kAngles * shape.dims, random);
  const FloatRows x_there(dtype, x, shape.offset);
  const FloatRows out_there(dtype, kRows * stride);
  const DeviceArray<float> table_there(table);
  const DeviceArray<int32_t> positions_there(positions);
  ops::RopeProblem p;
  p.dtype = dtype;
  p.x = {x_there.data(), stride, group_stride};
  p.rows = kRows;
  p.heads = shape.heads;
  p.head_dim = shape.head_dim;
  p.dims = shape.dims;
  p.interleaved = interleaved;
  p.cos_sin = table_there.data();
  p.positions = has_positions ? positions_there.data() : nullptr;
  p.out = {in_place ? x_there.data() : out_there.data(), stride, group_stride};
  run_on_gpu(p);
  const std::vector<float> got = in_place ? x_there.values() : out_there.values();
  const int64_t half = shape.dims / 2;
  for (int64_t i = 0; i < kRows * shape.heads; ++i) {
    const int64_t row = i / shape.heads;
    const int64_t first = row * stride + i % shape.heads * group_stride;
    const auto value = [&](int64_t d) { return x[static_cast<size_t>(first + d)]; };
    const int64_t angles = has_positions ? positions[static_cast<size_t>(row)] : row;
    for (int64_t d = 0; d < shape.head_dim; ++d) {
      const float y = got[static_cast<size_t>(first + d)];
      if (d >= shape.dims) {
        CHECK_EQ(y, value(d));
        continue;
      }
      const bool is_first = interleaved ? d % 2 == 0 : d < half;
      const int64_t pair = interleaved ? d / 2 : d % half;
      const int64_t other = interleaved ? d ^ 1 : (d + half) % shape.dims;
      const double cos = table[static_cast<size_t>(angles * shape.dims + pair)];
      const double sin = table[static_cast<size_t>(angles * shape.dims + half + pair)];
      const double product = value(other) * sin;
      const double expected = value(d) * cos + (is_first ? -product : product);
      const double size = std::abs(value(d) * cos) + std::abs(product);
      CHECK(std::abs(y - expected) <=
            size * 0x1p-23 + (std::abs(expected) + size * 0x1p-23) * rounding(dtype) + 0x1p-25);
    }
    for (int64_t k = 0; k < shape.gap && !in_place; ++k) {
      CHECK(std::isnan(got[static_cast<size_t>(first + shape.head_dim + k)]));
    }
  }
}

TEST("rotations of every type, pairing and shape") {
  std::mt19937 random(2);
  const Heads shapes[] = {{3, 64, 64},    {2, 128, 96},     {4, 80, 80}, {5, 10, 6},
                          {1, 2, 2},      {3, 96, 20, 1},   {1, 64, 0},  {40, 256, 256},
                          {2, 32, 16, 8}, {3, 64, 64, 0, 1}};
  for (const DType dtype : kRowTypes) {
    for (const Heads& shape : shapes) {
      for (const bool interleaved : {false, true}) {
        for (const bool in_place : {false, true}) {
          check_rope(dtype, interleaved, in_place, interleaved != in_place, shape, random);
        }
      }
    }
  }
}

TEST("no rows") {
  ops::RopeTableProblem table;
  table.dims = 64;
  run_on_gpu(table);
  ops::RopeProblem rope;
  rope.heads = 2;
  rope.head_dim = rope.dims = 64;
  run_on_gpu(rope);
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
