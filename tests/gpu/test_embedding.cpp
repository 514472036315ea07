// Rows picked by index on the GPU: the bits of the CPU's decoders.
#include "cpp/arrays.h"
#include "cpp/check.h"
#include "effinfer/error.h"
#include "gpu/float_rows.h"
#include "ops/embedding.h"

namespace effinfer {
namespace {

constexpr int64_t kVocab = 37;  // two whole groups of 16 rows and a part of one
const std::vector<int32_t> kIds = {0, 36, 17, 15, 16, 17, 3};

// A [kVocab, cols] tensor of random bytes. Any 16 bits may be a scale or a number: the upper byte
// gets a small exponent.
std::vector<uint8_t> random_table(DType dtype, int64_t cols, uint32_t seed) {
  const TensorView view{nullptr, dtype, {kVocab, cols}};
  std::vector<uint8_t> bytes(view.num_bytes());
  std::mt19937 random(seed);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  for (size_t i = 1; i < bytes.size(); i += 2) {
    bytes[i] = static_cast<uint8_t>((bytes[i] & 0x83) | 0x28);
  }
  return bytes;
}

std::vector<float> run_embedding(ops::EmbeddingProblem problem, float scale) {
  const DeviceArray<int32_t> ids(kIds);
  problem.ids = ids.data();
  problem.rows = static_cast<int64_t>(kIds.size());
  problem.vocab_size = kVocab;
  problem.scale = scale;
  const DeviceArray<float> out(static_cast<size_t>(problem.rows * problem.cols));
  problem.out = out.data();
  run_on_gpu(problem);
  return out.values();
}

std::vector<float> expected_rows(const ops::PackedWeight& weight, float scale) {
  std::vector<float> all;
  std::vector<float> row(static_cast<size_t>(weight.cols));
  for (const int32_t id : kIds) {
    ops::unpack_row(weight, id, row.data());
    for (const float x : row) all.push_back(scale == 1.0f ? x : x * scale);
  }
  return all;
}

TEST("every packed format has the bits of unpack_row()") {
  ThreadPool pool(1);
  int formats = 0;
  for (int type = 0; type < kNumDTypes; ++type) {
    const auto dtype = static_cast<DType>(type);
    const DTypeInfo& info = dtype_info(dtype);
    const bool dense = dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
    if ((!info.quantized && !dense) || info.tail_bytes > 0) continue;
    const int64_t lengths[] = {dense ? 101 : info.block_size, dense ? 640 : 768};
    for (const int64_t cols : lengths) {
      const std::vector<uint8_t> bytes = random_table(dtype, cols, static_cast<uint32_t>(type));
      ops::PackedBuffer packed = ops::pack({bytes.data(), dtype, {kVocab, cols}}, pool);
      const DeviceArray<uint8_t> data(
          std::vector<uint8_t>(packed.view.data, packed.view.data + packed.view.num_bytes()));
      ops::PackedWeight there = packed.view;
      there.data = data.data();
      for (const float scale : {1.0f, 1.7f}) {
        ops::EmbeddingProblem problem;
        problem.packed = &there;
        problem.dtype = dtype;
        problem.cols = cols;
        if (same_bits(run_embedding(problem, scale), expected_rows(packed.view, scale))) continue;
        check::fail(__FILE__, __LINE__, std::string(info.name) + " differs");
      }
      ++formats;
    }
  }
  CHECK_EQ(formats, 2 * 17);
}

TEST("tables of numbers, of any alignment") {
  std::mt19937 random(2);
  for (const DType dtype : kRowTypes) {
    for (const int64_t cols : {1, 5, 64, 1032}) {
      for (const int64_t offset : {0, 1}) {
        const std::vector<float> table = rounded(dtype, normals(kVocab * cols, random));
        const FloatRows there(dtype, table, offset);
        ops::EmbeddingProblem problem;
        problem.table = static_cast<const uint8_t*>(there.data());
        problem.dtype = dtype;
        problem.cols = cols;
        const std::vector<float> got = run_embedding(problem, 0.3f);
        for (size_t i = 0; i < got.size(); ++i) {
          const auto id = static_cast<size_t>(kIds[i / static_cast<size_t>(cols)]);
          const size_t k = i % static_cast<size_t>(cols);
          CHECK_EQ(got[i], table[id * static_cast<size_t>(cols) + k] * 0.3f);
        }
      }
    }
  }
}

TEST("selected rows are copies") {
  std::mt19937 random(3);
  for (const int64_t cols : {3, 256, 1030}) {
    const std::vector<float> x = normals(9 * cols, random);
    const std::vector<int32_t> rows = {8, 0, 8, 4};
    const DeviceArray<float> x_there(x);
    const DeviceArray<int32_t> rows_there(rows);
    const DeviceArray<float> out(rows.size() * static_cast<size_t>(cols));
    ops::SelectRowsProblem problem{x_there.data(), rows_there.data(), 4, cols, out.data()};
    run_on_gpu(problem);
    const std::vector<float> got = out.values();
    for (size_t i = 0; i < got.size(); ++i) {
      const auto n = static_cast<size_t>(cols);
      CHECK_EQ(got[i], x[static_cast<size_t>(rows[i / n]) * n + i % n]);
    }
    problem.num_rows = 0;
    run_on_gpu(problem);
  }
}

TEST("what cannot be decoded is refused") {
  ops::PackedWeight ternary;
  ternary.format = ops::packed_format(DType::tq2_0, ops::TernaryForm::t2);
  ops::EmbeddingProblem problem;
  problem.cols = 256;
  problem.dtype = DType::tq2_0;
  problem.packed = &ternary;
  CHECK_THROWS(Unsupported, "ternary", run_on_gpu(problem));
  problem.packed = nullptr;
  problem.dtype = DType::q4_0;
  CHECK_THROWS(Unsupported, "must be packed", run_on_gpu(problem));
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
