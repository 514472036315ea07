// Coded pages on the GPU as attention reads them, beside what codes stand for in float64.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "cpp/coded_model.h"
#include "cuda/decode_pages.h"
#include "gpu/device_arrays.h"
#include "gpu/mutations.h"

namespace effinfer {
namespace {

using coded::BothKinds;

struct Case {
  DType dtype;
  int32_t bits;
  int32_t heads;
  int32_t dim;
  int32_t rank = 0;
  int32_t outliers = 0;
};

// Pages that the CPU encodes, some of them as parts of a GPU's pages.
class CodedCase {
 public:
  static constexpr int32_t kPages = 5;

  CodedCase(const Case& c, std::mt19937& random)
      : pages_(c.dtype, c.bits, kPages, c.heads, c.dim, random, c.rank, c.outliers) {
    ThreadPool pool(1);
    for (const auto& variant : ops::table<ops::EncodePagesProblem>().variants()) {
      if (variant.isa == Isa::portable) pages_.encode(variant, pool);
    }
    upload(random);
  }

  // Keys, then values, of each coded page in the order of `order`, behind one that is none.
  std::vector<uint8_t> run() const {
    std::vector<int32_t> numbers{-1};
    for (const int32_t page : order_) numbers.push_back(numbers_[static_cast<size_t>(page)]);
    const DeviceArray<int32_t> there(numbers);
    const DeviceArray<uint8_t> k(numbers.size() * plane()), v(numbers.size() * plane());
    ops::AttentionProblem p;
    p.k = ops::keys_of(pages_.layer);
    p.num_kv_heads = pages_.layer.num_kv_heads;
    p.coded = coded_;
    p.decoded = {there.data(), static_cast<int32_t>(numbers.size()), k.data(), v.data()};
    const std::unique_ptr<Queue> queue = make_queue(kGpu);
    cuda::launch_decode_pages(p, *queue);
    queue->wait();
    std::vector<uint8_t> out = k.values();
    const std::vector<uint8_t> values = v.values();
    out.insert(out.end(), values.begin(), values.end());
    return out;
  }

  bool is_right(const std::vector<uint8_t>& got) const {
    const ops::KvLayer& kv = pages_.layer;
    const auto touched = [&](size_t first) {
      return std::any_of(got.begin() + static_cast<std::ptrdiff_t>(first),
                         got.begin() + static_cast<std::ptrdiff_t>(first + plane()),
                         [](uint8_t byte) { return byte != 0xff; });
    };
    if (touched(0) || touched(got.size() / 2)) return false;
    double worst = 0;
    for (size_t i = 0; i < order_.size(); ++i) {
      for (int64_t head = 0; head < kv.num_kv_heads; ++head) {
        const CodedReader reader(kv.coded, kv.num_pages + order_[i], head);
        const uint8_t* k =
            got.data() + (i + 1) * plane() + static_cast<size_t>(head) * kv.head_bytes();
        const uint8_t* v = k + got.size() / 2;
        for (int64_t t = 0; t < ops::kPageSize; ++t) {
          for (int64_t d = 0; d < kv.head_dim; ++d) {
            const int64_t pair = pages_.pair();
            worst = std::max(
                {worst,
                 error(pages_.at(k, ops::k_offset(t, d, kv.head_dim, pair)), reader.key(t, d)),
                 error(pages_.at(v, ops::v_offset(t, d, kv.head_dim, pair)), reader.value(t, d))});
          }
        }
      }
    }
    return worst <= 1.0;
  }

 private:
  size_t plane() const {
    return pages_.layer.head_bytes() * static_cast<size_t>(pages_.layer.num_kv_heads);
  }

  // Two layers share the pool's pages, and this one's coded pages lie in the slots of both.
  void upload(std::mt19937& random) {
    const ops::CodedPages& own = pages_.layer.coded;
    const auto heads = static_cast<size_t>(own.num_kv_heads);
    const size_t part = heads * std::max(own.key_bytes(), own.behind_keys());
    const auto layer_parts = static_cast<int32_t>(plane() / part);
    const size_t layer = 2 * kPages * plane();
    pool_ = DeviceArray<uint8_t>(2 * layer);
    coded_ = own;
    coded_.data = nullptr;
    coded_.memory = {pool_.data(),
                     pool_.data() + kPages * plane(),
                     static_cast<int64_t>(plane()),
                     static_cast<int64_t>(layer),
                     layer_parts,
                     2 * layer_parts};
    std::vector<int32_t> places(static_cast<size_t>(kPages * 2 * layer_parts));
    std::iota(places.begin(), places.end(), 0);
    std::shuffle(places.begin(), places.end(), random);
    numbers_.assign(places.begin(), places.begin() + kPages);
    order_ = {3, 0, 4, 1};
    for (int32_t page = 0; page < kPages; ++page) {
      const int32_t id = coded_.first_page + numbers_[static_cast<size_t>(page)];
      for (int32_t head = 0; head < own.num_kv_heads; ++head) {
        const uint8_t* from = own.head(own.first_page + page, head);
        memory_of(kGpu).copy(coded_.keys_of(id, head), from, own.key_bytes());
        memory_of(kGpu).copy(coded_.values_of(id, head), from + own.key_bytes(), own.behind_keys());
      }
    }
  }

  // By what it may be: the sum of a start, a code times its step, factors and an outlier, each
  // rounded, and the result's rounding. No term is above the greatest number by more than that.
  double error(float got, const CodedReader::Number& expected) const {
    const double codes =
        std::abs(expected.value) + 2 * expected.step * (1 << pages_.layer.coded.bits);
    const double rounding = pages_.layer.dtype == DType::bf16 ? 0x1p-8 : 0x1p-23;
    const double terms = 4.0 + pages_.layer.coded.rank;
    return std::abs(double{got} - expected.value) /
           (rounding * std::abs(expected.value) + terms * 0x1p-23 * (codes + kLargest) + 1e-30);
  }
  static constexpr double kLargest = 64.0;  // of what BothKinds draws

  BothKinds pages_;
  ops::CodedPages coded_;
  DeviceArray<uint8_t> pool_;
  std::vector<int32_t> numbers_;  // of each page
  std::vector<int32_t> order_;
};

}  // namespace

TEST("codes, factors and outliers") {
  std::mt19937 random(1);
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const int32_t bits : {4, 2}) {
      for (const int32_t dim : {16, 64, 80, 128, 256}) {
        for (const auto& [rank, outliers] : {std::pair{0, 0}, {2, 0}, {0, 20}, {3, 9}}) {
          // Of small heads that is more than their pages take.
          if (dim == 16 && rank + outliers > 0) continue;
          const CodedCase pages({dtype, bits, dim == 64 ? 3 : 1, dim, rank, outliers}, random);
          CHECK(pages.is_right(pages.run()));
        }
      }
    }
  }
}

TEST("every barrier matters") {
  std::mt19937 random(2);
  const CodedCase pages({DType::bf16, 4, 1, 64, 0, 200}, random);
  expect_every_barrier_matters([&] { return pages.is_right(pages.run()); });
}

}  // namespace effinfer

CHECK_MAIN()
