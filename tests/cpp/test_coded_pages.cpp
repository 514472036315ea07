// Pages in 4 and 2 bits: how near codes are to what they stand for, and attention over pages of
// both kinds, beside attention in double precision over the numbers that codes stand for.
#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <vector>

#include "coded_model.h"
#include "core/backend.h"

using namespace effinfer;
using namespace effinfer::coded;

namespace {

// Of numbers from `lowest` on to the nearest code: half a step, but at the ends what rounding the
// range to binary16 moved them: 2^-11 of its numbers, or half of the least one.
double bound(const CodedReader::Number& number, double lowest, int bits) {
  const double most_code = (1 << bits) - 1;
  const double f16 = 0x1p-11, least = 0x1p-25;
  const double inside = number.step * (0.5 + 0x1p-16);
  const double below = std::abs(lowest) * f16 + least;
  const double above = most_code * (number.step * 2 * f16 + least);
  return std::max({inside, below, above});
}

void check_codes(const BothKinds& pages, const Variant<EncodePagesProblem>& variant) {
  const KvLayer& kv = pages.layer;
  double worst = 0;  // error by bound
  pages.for_heads([&](int32_t page, int64_t head) {
    const CodedReader reader(kv.coded, kv.num_pages + page, head);
    const auto check = [&](auto&& number, auto&& given) {
      std::map<int64_t, float> lowest;  // by range
      for (int64_t i = 0; i < kPageSize * kv.head_dim; ++i) {
        const float x = given(i / kv.head_dim, i % kv.head_dim);
        const int64_t range = number(i / kv.head_dim, i % kv.head_dim).range;
        lowest[range] = std::min(lowest.emplace(range, x).first->second, x);
      }
      for (int64_t i = 0; i < kPageSize * kv.head_dim; ++i) {
        const CodedReader::Number found = number(i / kv.head_dim, i % kv.head_dim);
        const double error =
            std::abs(double{found.value} - given(i / kv.head_dim, i % kv.head_dim));
        worst = std::max(worst, error / bound(found, lowest[found.range], kv.coded.bits));
      }
      return lowest.size();
    };
    const size_t keys = check([&](int64_t t, int64_t d) { return reader.key(t, d); },
                              [&](int64_t t, int64_t d) { return pages.key(page, head, t, d); });
    CHECK_EQ(keys, static_cast<size_t>(kv.head_dim));  // a channel has its own
    const size_t values =
        check([&](int64_t t, int64_t d) { return reader.value(t, d); },
              [&](int64_t t, int64_t d) { return pages.value(page, head, t, d); });
    size_t blocks = 0;
    for (int32_t first = 0; first < kv.head_dim; first += kv.coded.block_dims(first)) ++blocks;
    CHECK_EQ(values, blocks * static_cast<size_t>(kPageSize));  // a token has one of each
  });
  if (worst > 1.0) check::fail(variant.name.c_str(), kv.coded.bits, "codes are too far away");
}

// Of each sequence the first and the last row.
void check_attention(const BothKinds& pages, ThreadPool& pool, std::mt19937& random,
                     int& compared) {
  const Batch batch = random_batch(pages.layer.num_pages, random);
  for (const Arithmetic arithmetic : {Arithmetic::f32, Arithmetic::bf16}) {
    Call call(pages, batch, 6, arithmetic, random);
    Reference reference(pages, batch, call);
    std::map<int32_t, std::vector<Reference::Result>> expected;  // by row
    for (size_t s = 0; s < batch.kv_len.size(); ++s) {
      for (const int32_t row : {batch.qo_indptr[s], batch.qo_indptr[s + 1] - 1}) {
        expected[row] = reference.results(s, row);
      }
    }
    for (const auto& variant : table<AttentionProblem>().variants()) {
      if (refusal(variant, call.problem, current_target()) != nullptr) continue;
      const std::vector<float> got = call.run(variant, pool);
      for (const auto& [row, results] : expected) {
        const float* first = got.data() + row * call.problem.out_stride;
        if (Reference::worst_error(results, first) <= 1.0) continue;
        check::fail(variant.name.c_str(), pages.layer.head_dim, "a row is too far away");
      }
      ++compared;
    }
  }
}

// Rows of a step have the bits that each of them has alone.
void check_rows_alone(const BothKinds& pages, ThreadPool& pool, std::mt19937& random) {
  const int32_t num_pages = pages.layer.num_pages;
  Batch together;
  together.add(9 * 64 + 20, 33, 8, num_pages, random);
  for (const Arithmetic arithmetic : {Arithmetic::f32, Arithmetic::bf16}) {
    Call call(pages, together, 6, arithmetic, random);
    for (const auto& variant : table<AttentionProblem>().variants()) {
      if (refusal(variant, call.problem, current_target()) != nullptr) continue;
      const std::vector<float> got = call.run(variant, pool);
      for (int32_t row = 0; row < 33; ++row) {
        Batch alone = together;
        alone.qo_indptr = {0, 1};
        alone.kv_len = {together.kv_len[0] - 32 + row};
        Call one(pages, alone, 6, arithmetic, random);
        const auto from = static_cast<std::ptrdiff_t>(row * call.problem.out_stride);
        std::copy_n(call.q.begin() + from, one.q.size(), one.q.begin());
        const std::vector<float> expected = one.run(variant, pool);
        CHECK(std::equal(expected.begin(), expected.end(), got.begin() + from));
      }
    }
  }
}

}  // namespace

TEST("codes are the nearest ones, and the same at every level") {
  std::mt19937 random(1);
  ThreadPool pool(2);
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const int32_t bits : {4, 2}) {
      for (const int32_t dim : {16, 64, 80, 128, 256}) {
        BothKinds pages(dtype, bits, 3, 2, dim, random);
        std::vector<uint8_t> first;
        for (const auto& variant : table<EncodePagesProblem>().variants()) {
          if (variant.isa > current_isa()) continue;
          std::fill(pages.coded.begin(), pages.coded.end(), uint8_t{0xa5});
          pages.encode(variant, pool);
          check_codes(pages, variant);
          if (first.empty()) first = pages.coded;
          CHECK(first == pages.coded);
        }
      }
    }
  }
}

// The mean square of what pages lack of their numbers, beside that of the numbers.
static double lost(const BothKinds& pages) {
  double error = 0, square = 0;
  pages.for_heads([&](int32_t page, int64_t head) {
    const CodedReader reader(pages.layer.coded, pages.layer.num_pages + page, head);
    for (int64_t t = 0; t < kPageSize; ++t) {
      for (int64_t d = 0; d < pages.layer.head_dim; ++d) {
        const double key = pages.key(page, head, t, d);
        const double value = pages.value(page, head, t, d);
        square += key * key + value * value;
        error += std::pow(key - reader.key(t, d).value, 2);
        error += std::pow(value - reader.value(t, d).value, 2);
      }
    }
  });
  return error / square;
}

TEST("outliers and factors hold what codes lack") {
  std::mt19937 random(5);
  ThreadPool pool(1);
  for (const auto& variant : table<EncodePagesProblem>().variants()) {
    if (variant.isa > current_isa()) continue;
    for (const int32_t dim : {16, 80}) {
      const auto loss = [&](int32_t rank, int32_t outliers) {
        std::mt19937 same(6);
        BothKinds pages(DType::bf16, 2, 3, 2, dim, same, rank, outliers);
        // Ten numbers of a head stand out.
        pages.for_heads([&](int32_t page, int64_t head) {
          for (int64_t i = 0; i < 10; ++i) {
            pages.set_key(page, head, 5 * i, i, i % 2 == 0 ? 50.0f : -60.0f);
            pages.set_value(page, head, 6 * i, i, i % 2 == 0 ? -80.0f : 70.0f);
          }
        });
        pages.encode(variant, pool);
        return lost(pages);
      };
      const double plain = loss(0, 0);
      CHECK(loss(0, 10) < 0.6 * plain);  // those, exactly
      CHECK(loss(0, 20) < loss(0, 10));
      // A pair of factors takes at least the squares of the longest of 64, or `dim`, rows, but for
      // its rounding.
      const double left = 1 - 0.99 / std::max(dim, 64);
      CHECK(loss(1, 20) < left * loss(0, 20));
      CHECK(loss(4, 20) < left * left * left * loss(1, 20));
      CHECK(loss(16, 0) < (dim == 16 ? 1e-4 : 0.5) * plain);  // of 16 dimensions, that is all
    }
  }
}

// With as many outliers as stand out, their own errors are what bfloat16 rounds of them, and the
// others have the ranges, and so the errors, that they would have without them.
TEST("outliers leave ranges to the others") {
  constexpr int64_t kCount = 12;
  std::mt19937 random(7);
  ThreadPool pool(1);
  for (const int32_t bits : {4, 2}) {
    for (const int32_t dim : {16, 80}) {
      BothKinds pages(DType::f32, bits, 3, 2, dim, random, 0, kCount);
      std::map<int64_t, float> far;  // of keys by their place, of values behind them
      const auto value_place = [&](int64_t t, int64_t d) { return (kPageSize + t) * dim + d; };
      for (int64_t i = 0; i < kCount; ++i) {
        far[(5 * i) * dim + i] = i % 2 == 0 ? 500.0f : -600.0f;
        far[value_place(5 * i, i)] = i % 2 == 0 ? -800.0f : 700.0f;
      }
      pages.for_heads([&](int32_t page, int64_t head) {
        for (int64_t i = 0; i < kCount; ++i) {
          pages.set_key(page, head, 5 * i, i, far[(5 * i) * dim + i]);
          pages.set_value(page, head, 5 * i, i, far[value_place(5 * i, i)]);
        }
      });
      for (const auto& variant : table<EncodePagesProblem>().variants()) {
        if (variant.isa > current_isa()) continue;
        pages.encode(variant, pool);
        double worst = 0;  // error by bound
        pages.for_heads([&](int32_t page, int64_t head) {
          const CodedReader reader(pages.layer.coded, pages.layer.num_pages + page, head);
          const auto check = [&](int64_t first, auto&& number, auto&& given) {
            std::map<int64_t, float> lowest, highest;  // of the others of a range
            const auto for_numbers = [&](auto&& f) {
              for (int64_t i = 0; i < kPageSize * dim; ++i) {
                f(far.count(first + i) != 0, number(i / dim, i % dim), given(i / dim, i % dim));
              }
            };
            for_numbers([&](bool is_far, const CodedReader::Number& found, float x) {
              if (is_far) return;
              float& low = lowest.emplace(found.range, x).first->second;
              float& high = highest.emplace(found.range, x).first->second;
              low = std::min(low, x);
              high = std::max(high, x);
            });
            for_numbers([&](bool is_far, const CodedReader::Number& found, float x) {
              const float low = lowest[found.range];
              const double step = (highest[found.range] - low) / ((1 << bits) - 1.0);
              // What an outlier says is its distance from a number of the range.
              const double most =
                  is_far ? (std::abs(x) + 100.0) * 0x1p-8
                         : bound({found.value, static_cast<float>(step * 1.01), 0}, low, bits);
              worst = std::max(worst, std::abs(double{found.value} - x) / most);
            });
          };
          check(
              0, [&](int64_t t, int64_t d) { return reader.key(t, d); },
              [&](int64_t t, int64_t d) { return pages.key(page, head, t, d); });
          check(
              value_place(0, 0), [&](int64_t t, int64_t d) { return reader.value(t, d); },
              [&](int64_t t, int64_t d) { return pages.value(page, head, t, d); });
        });
        if (worst > 1.0) check::fail(variant.name.c_str(), worst, "numbers are too far away");
      }
    }
  }
}

TEST("a coded page takes 28.1 or 17.2 % of a page") {
  for (const int32_t dim : {64, 128, 256}) {
    const CodedPages four = {4, 0, 1, dim, nullptr};
    const CodedPages two = {2, 0, 1, dim, nullptr};
    CHECK_EQ(four.head_bytes(), static_cast<size_t>(72 * dim));
    CHECK_EQ(two.head_bytes(), static_cast<size_t>(44 * dim));
  }
}

TEST("attention over coded pages is that of what their codes stand for") {
  std::mt19937 random(2);
  ThreadPool pool(2);
  int compared = 0;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const int32_t bits : {4, 2}) {
      for (const int32_t dim : {16, 64, 80, 112, 256}) {
        BothKinds pages(dtype, bits, 7, 2, dim, random, dim % 3, dim == 112 ? 256 : dim % 5 * 9);
        pages.encode(table<EncodePagesProblem>().variants().front(), pool);
        check_attention(pages, pool, random, compared);
      }
    }
  }
  CHECK(compared >= 20);
}

TEST("a row over coded pages has the same bits alone and among others") {
  std::mt19937 random(4);
  ThreadPool pool(2);
  for (const int32_t bits : {4, 2}) {
    for (const int32_t dim : {48, 64, 128}) {
      BothKinds pages(DType::bf16, bits, 7, 2, dim, random, dim == 48 ? 2 : 0, dim % 5 * 4);
      pages.encode(table<EncodePagesProblem>().variants().front(), pool);
      check_rows_alone(pages, pool, random);
    }
  }
}

TEST("attention visits words of coded pages") {
  std::mt19937 random(3);
  ThreadPool pool(2);
  constexpr int32_t kPages = 6;
  BothKinds pages(DType::bf16, 4, kPages, 1, 64, random);
  pages.encode(table<EncodePagesProblem>().variants().front(), pool);
  Batch batch;
  batch.add(6 * 64, 2, 4, kPages, random);
  Call call(pages, batch, 3, Arithmetic::f32, random);
  std::vector<uint64_t> words;
  for (int i = 0; i < 6; ++i) words.push_back(i % 2 == 0 ? random() : ~uint64_t{0});
  const int32_t first_block = 0;
  VisitPlan& visits = call.problem.visits;
  visits.num_blocks = 1;
  visits.first_block = &first_block;
  visits.num_kv_heads = 1;
  visits.list_words = 6;
  visits.words = words.data();
  Reference reference(pages, batch, call);
  for (const auto& variant : table<AttentionProblem>().variants()) {
    if (refusal(variant, call.problem, current_target()) != nullptr) continue;
    const std::vector<float> got = call.run(variant, pool);
    for (const int32_t row : {0, 1}) {
      const auto expected = reference.results(0, row, words.data());
      CHECK(Reference::worst_error(expected, &got[static_cast<size_t>(row) * 3 * 64]) <= 1.0);
    }
  }
}

CHECK_MAIN()
