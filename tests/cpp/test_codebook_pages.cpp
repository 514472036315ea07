// Coded pages of numbers of vectors: whether these are the nearest ones, and attention over them,
// beside attention in double precision over what they stand for.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "codebook_pages.h"
#include "core/backend.h"

using namespace effinfer;
using namespace effinfer::coded;

namespace {

using Shape = CodebookPages::Shape;

constexpr int64_t kDims = PageCodebooks::kDims;
constexpr int64_t kVectors = PageCodebooks::kVectors;

// No vector is nearer than the one that was chosen, but for what float32 rounds.
void check_codes(const CodebookPages& all, const Variant<EncodePagesProblem>& variant) {
  const Shape& shape = all.shape;
  double worst = 0;
  const auto check = [&](int which, int32_t page, int64_t head, int64_t t, const double* row) {
    for (int64_t group = 0; group < all.groups(); ++group) {
      double nearest = 1e300, chosen = 0, magnitude = 1e-6;
      for (int64_t code = 0; code < kVectors; ++code) {
        double distance = 0, size = 0;
        for (int64_t d = 0; d < kDims; ++d) {
          const double x = row[all.dim_of(which, group, d)];
          const double c = all.number(which, head, group, code, d);
          distance += (x - c) * (x - c);
          size += 4 * std::abs(x * c) + c * c;
        }
        magnitude = std::max(magnitude, size);
        nearest = std::min(nearest, distance);
        if (code == all.code(which, page, head, group, t)) chosen = distance;
      }
      worst = std::max(worst, (chosen - nearest) / (32 * kFloat * magnitude));
    }
  };
  for (int32_t page = 0; page < CodebookPages::kPages; ++page) {
    for (int64_t head = 0; head < shape.heads; ++head) {
      for (int64_t t = 0; t < kPageSize; ++t) {
        std::vector<double> key, value;
        for (int64_t d = 0; d < shape.dim; ++d) {
          key.push_back(all.pages.key(page, head, t, d));
          value.push_back(all.pages.value(page, head, t, d));
        }
        shape.turn.apply(CodebookPages::position(page, t), -1.0, key.data());
        check(0, page, head, t, key.data());
        check(1, page, head, t, value.data());
      }
    }
  }
  if (worst > 1.0) check::fail(variant.name.c_str(), worst, "another vector is nearer");
}

const Shape kShapes[] = {
    {DType::bf16, 2, 64, {32, false}}, {DType::f32, 3, 16, {8, true}},
    {DType::bf16, 1, 80, {20, false}}, {DType::f32, 2, 48, {0, false}},
    {DType::bf16, 2, 256, {7, true}},
};

}  // namespace

TEST("no vector is nearer than the chosen one") {
  std::mt19937 random(1);
  ThreadPool pool(2);
  for (const Shape& shape : kShapes) {
    CodebookPages all(shape, random);
    for (const auto& variant : table<EncodePagesProblem>().variants()) {
      if (variant.isa > current_isa()) continue;
      std::fill(all.pages.coded.begin(), all.pages.coded.end(), uint8_t{0xa5});
      all.encode(variant, pool);
      check_codes(all, variant);
    }
  }
}

// Of each sequence the first and the last row.
TEST("attention over numbers of vectors is that of what these stand for") {
  std::mt19937 random(2);
  ThreadPool pool(2);
  for (const Shape& shape : kShapes) {
    CodebookPages all(shape, random);
    all.encode(table<EncodePagesProblem>().variants().front(), pool);
    const Expanded coded = expand(all);
    const Batch batch = random_batch(CodebookPages::kPages, random);
    int compared = 0;
    for (const Arithmetic arithmetic : {Arithmetic::f32, Arithmetic::bf16}) {
      Call call(all.pages, batch, 2 * shape.heads, arithmetic, random);
      for (const auto& variant : table<AttentionProblem>().variants()) {
        if (refusal(variant, call.problem, current_target()) != nullptr) continue;
        const std::vector<float> got = call.run(variant, pool);
        for (size_t s = 0; s < batch.kv_len.size(); ++s) {
          for (const int32_t row : {batch.qo_indptr[s], batch.qo_indptr[s + 1] - 1}) {
            const float* first = got.data() + row * call.problem.out_stride;
            const double worst = worst_of_row(all.pages, coded, batch, call, s, row, first);
            if (worst > 1.0) check::fail(variant.name.c_str(), worst, "a row is too far away");
          }
        }
        ++compared;
      }
    }
    CHECK(compared > 0);
  }
}

TEST("a page of numbers of vectors takes 2 bits a number, and a row of 64 bytes") {
  const PageCodebooks books;
  CodedPages pages = {2, 0, 1, 128, nullptr};
  pages.codebooks = &books;
  CHECK_EQ(pages.head_bytes(), size_t{2 * 128 * 64 / 4 + 64});
}

CHECK_MAIN()
