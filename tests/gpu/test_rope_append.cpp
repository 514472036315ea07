// Keys and values into the engine's pages on the GPU, with norm and rotation: against float64, the
// unfused kernels, and the layout and roundings that CPU and GPU share, byte for byte.
#include <algorithm>
#include <numeric>
#include <utility>

#include "cpp/arrays.h"
#include "cpp/check.h"
#include "effinfer/error.h"
#include "gpu/float_rows.h"
#include "gpu/mutations.h"
#include "ops/norm.h"
#include "ops/rope.h"
#include "ops/rope_append.h"

namespace effinfer {
namespace {

using Numbers = std::vector<float>;
constexpr uint8_t kUntouched = 0x77;

struct Case {
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t rope_dims;  // 0: no table
  bool interleaved;
  bool norms;
  int64_t gap;  // floats between rows
  // Tokens in the cache before the step, and the step's.
  std::vector<std::pair<int32_t, int32_t>> sequences;
};

struct Pages {
  std::vector<uint8_t> k, v;
  Numbers k_scale, v_scale;
};

struct Result {
  Pages pages;
  Numbers q_out;
};

class Step {
 public:
  Step(const Case& c, uint32_t seed) : case_(c), random_(seed) {
    std::vector<int32_t> pages(64);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random_);
    qo_indptr_ = kv_indptr_ = {0};
    for (const auto& [past, fresh] : c.sequences) {
      for (int32_t i = 0; i < fresh; ++i) places_.push_back({-1, past + i});
      for (int32_t i = 0; i < fresh; ++i) {
        auto& place = places_[static_cast<size_t>(qo_indptr_.back() + i)];
        place.first = pages[kv_indices_.size() + static_cast<size_t>(place.second / 64)];
      }
      for (int32_t i = 0; i < past + fresh; i += 64) {
        kv_indices_.push_back(pages[kv_indices_.size()]);
      }
      qo_indptr_.push_back(qo_indptr_.back() + fresh);
      kv_indptr_.push_back(static_cast<int32_t>(kv_indices_.size()));
      kv_len_.push_back(past + fresh);
    }
    q_ = normals(tokens() * stride(c.heads), random_);
    k_ = normals(tokens() * stride(c.kv_heads), random_);
    v_ = normals(tokens() * stride(c.kv_heads), random_);
    q_norm_ = normals(c.head_dim, random_);
    k_norm_ = normals(c.head_dim, random_);
    table_ = normals(tokens() * c.rope_dims, random_);
  }

  int64_t tokens() const { return static_cast<int64_t>(places_.size()); }
  int64_t stride(int64_t heads) const { return heads * case_.head_dim + case_.gap; }

  Result run(DType dtype, bool has_q) const {
    const Case& c = case_;
    ops::RopeAppendProblem p;
    const DeviceArray<float> q(q_), k(k_), v(v_), q_norm(q_norm_), k_norm(k_norm_), table(table_);
    const DeviceArray<int32_t> qo_indptr(qo_indptr_), kv_indptr(kv_indptr_),
        kv_indices(kv_indices_), kv_len(kv_len_);
    const DeviceArray<float> q_out(q_.size());
    p.k = k.data();
    p.v = v.data();
    p.k_stride = p.v_stride = stride(c.kv_heads);
    if (has_q) {
      p.q = q.data();
      p.q_out = q_out.data();
      p.q_stride = p.q_out_stride = stride(c.heads);
      p.num_qo_heads = c.heads;
    }
    if (c.norms) p.q_norm = q_norm.data();
    if (c.norms) p.k_norm = k_norm.data();
    p.norm_eps = 1e-5f;
    if (c.rope_dims > 0) p.cos_sin = table.data();
    p.rope_dims = c.rope_dims;
    p.interleaved = c.interleaved;
    p.kv = layer(dtype);
    const DeviceArray<uint8_t> k_pages(std::vector<uint8_t>(page_bytes(dtype), kUntouched));
    const DeviceArray<uint8_t> v_pages(std::vector<uint8_t>(page_bytes(dtype), kUntouched));
    const DeviceArray<float> k_scale(Numbers(num_scales(), -1.0f));
    const DeviceArray<float> v_scale(Numbers(num_scales(), -1.0f));
    p.kv.k = k_pages.data();
    p.kv.v = v_pages.data();
    p.kv.k_scale = dtype == DType::i8 ? k_scale.data() : nullptr;
    p.kv.v_scale = dtype == DType::i8 ? v_scale.data() : nullptr;
    p.batch.num_tokens = tokens();
    p.batch.num_sequences = static_cast<int64_t>(kv_len_.size());
    p.batch.qo_indptr = qo_indptr.data();
    p.batch.kv_indptr = kv_indptr.data();
    p.batch.kv_indices = kv_indices.data();
    p.batch.kv_len = kv_len.data();
    run_on_gpu(p);
    return {{k_pages.values(), v_pages.values(), k_scale.values(), v_scale.values()},
            q_out.values()};
  }

  // What norm and rotation as operators of their own make of heads: the same layout as `rows`.
  Numbers unfused(const Numbers& rows, int32_t heads, const Numbers& norm) const {
    const Case& c = case_;
    const DeviceArray<float> there(rows);
    const DeviceArray<float> weight(norm);
    const DeviceArray<float> table(table_);
    if (c.norms) {
      ops::RmsNormProblem p;
      p.x = {there.data(), stride(heads), c.head_dim};
      p.rows = tokens();
      p.groups = heads;
      p.cols = c.head_dim;
      p.weight = weight.data();
      p.eps = 1e-5f;
      p.out = {there.data(), stride(heads), c.head_dim};
      run_on_gpu(p);
    }
    if (c.rope_dims > 0) {
      ops::RopeProblem p;
      p.x = {there.data(), stride(heads), c.head_dim};
      p.rows = tokens();
      p.heads = heads;
      p.head_dim = c.head_dim;
      p.dims = c.rope_dims;
      p.interleaved = c.interleaved;
      p.cos_sin = table.data();
      p.out = {there.data(), stride(heads), c.head_dim};
      run_on_gpu(p);
    }
    return there.values();
  }

  // Head `head` of row `row` in float64, and how far off float32 may be.
  void reference(const Numbers& rows, int32_t heads, const Numbers& norm, int64_t row, int64_t head,
                 std::vector<double>& y, std::vector<double>& error) const {
    const Case& c = case_;
    const float* x = rows.data() + row * stride(heads) + head * c.head_dim;
    std::vector<double> normed(x, x + c.head_dim);
    double squares = 0;
    for (const double value : normed) squares += value * value;
    const double scale = 1 / std::sqrt(squares / c.head_dim + 1e-5f);
    for (size_t d = 0; d < normed.size() && c.norms; ++d) normed[d] *= scale * norm[d];
    y = normed;
    error.clear();
    const int32_t half = c.rope_dims / 2;
    for (int32_t d = 0; d < c.head_dim; ++d) {
      const auto i = static_cast<size_t>(d);
      double size = std::abs(normed[i]);
      if (d < c.rope_dims) {
        const bool is_first = c.interleaved ? d % 2 == 0 : d < half;
        const int32_t pair = c.interleaved ? d / 2 : d % half;
        const int32_t other = c.interleaved ? d ^ 1 : (d + half) % c.rope_dims;
        const double cos = table_[static_cast<size_t>(row * c.rope_dims + pair)];
        const double sin = table_[static_cast<size_t>(row * c.rope_dims + half + pair)];
        const double product = normed[static_cast<size_t>(other)] * sin;
        y[i] = normed[i] * cos + (is_first ? -product : product);
        size = std::abs(normed[i] * cos) + std::abs(product);
      }
      error.push_back(size * (c.norms ? 24 : 2) * 0x1p-24);  // 8 squares and 5 sums in turn
    }
  }

  // Pages as they must be when `k` are the keys after norm and rotation.
  Pages expected(DType dtype, const Numbers& k) const {
    Pages pages{std::vector<uint8_t>(page_bytes(dtype), kUntouched),
                std::vector<uint8_t>(page_bytes(dtype), kUntouched), Numbers(num_scales(), -1.0f),
                Numbers(num_scales(), -1.0f)};
    const int64_t element = dtype_info(dtype).block_bytes;
    const int64_t dim = case_.head_dim;
    for (int64_t i = 0; i < tokens() * case_.kv_heads; ++i) {
      const int64_t row = i / case_.kv_heads, head = i % case_.kv_heads;
      const auto [page, position] = places_[static_cast<size_t>(row)];
      const int64_t place = page * case_.kv_heads + head;
      const int64_t token = position % 64;
      const auto first = static_cast<size_t>(row * stride(case_.kv_heads) + head * dim);
      const auto put = [&](const Numbers& from, std::vector<uint8_t>& to, Numbers& scales,
                           auto offset) {
        const std::vector<uint8_t> bytes = stored(dtype, from.data() + first, dim,
                                                  scales[static_cast<size_t>(place * 64 + token)]);
        for (int64_t d = 0; d < dim; ++d) {
          const int64_t at = place * 64 * dim + offset(token, d, dim, 4 / element);
          std::memcpy(to.data() + at * element, bytes.data() + d * element,
                      static_cast<size_t>(element));
        }
      };
      put(k, pages.k, pages.k_scale, ops::k_offset);
      put(v_, pages.v, pages.v_scale, ops::v_offset);
    }
    return pages;
  }

  // The keys out of pages of f32, in the layout of k_.
  Numbers keys(const Pages& pages) const {
    Numbers out = k_;
    const int64_t dim = case_.head_dim;
    for (int64_t i = 0; i < tokens() * case_.kv_heads; ++i) {
      const int64_t row = i / case_.kv_heads, head = i % case_.kv_heads;
      const auto [page, position] = places_[static_cast<size_t>(row)];
      for (int64_t d = 0; d < dim; ++d) {
        const int64_t at =
            (page * case_.kv_heads + head) * 64 * dim + ops::k_offset(position % 64, d, dim, 1);
        std::memcpy(&out[static_cast<size_t>(row * stride(case_.kv_heads) + head * dim + d)],
                    pages.k.data() + at * 4, 4);
      }
    }
    return out;
  }

  const Case& shape() const { return case_; }
  Numbers q_, k_, v_, q_norm_, k_norm_, table_;

 private:
  ops::KvLayer layer(DType dtype) const {
    return {dtype, case_.kv_heads, case_.head_dim, 64, nullptr, nullptr, nullptr, nullptr, {}};
  }
  size_t page_bytes(DType dtype) const {
    return static_cast<size_t>(64 * case_.kv_heads) * layer(dtype).head_bytes();
  }
  size_t num_scales() const { return static_cast<size_t>(64 * case_.kv_heads * 64); }

  static std::vector<uint8_t> stored(DType dtype, const float* x, int64_t dim, float& scale) {
    std::vector<uint8_t> bytes;
    if (dtype != DType::i8) {
      cpu::with_row_elements(dtype, [&]<class E>() {
        for (int64_t d = 0; d < dim; ++d) {
          const typename E::Stored element = E::store(x[d]);
          bytes.resize(bytes.size() + sizeof(element));
          std::memcpy(bytes.data() + bytes.size() - sizeof(element), &element, sizeof(element));
        }
      });
      return bytes;
    }
    float highest = 0;
    bool finite = true;
    for (int64_t d = 0; d < dim; ++d) {
      finite = finite && std::isfinite(x[d]);
      highest = std::max(highest, std::abs(x[d]));
    }
    bytes.resize(static_cast<size_t>(dim), 0);
    scale = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    if (!finite || highest < 1e-36f) return bytes;
    scale = highest / 127.0f;
    const float inverse = 127.0f / highest;
    for (int64_t d = 0; d < dim; ++d) {
      bytes[static_cast<size_t>(d)] = static_cast<uint8_t>(std::lrint(x[d] * inverse));
    }
    return bytes;
  }

  Case case_;
  std::mt19937 random_;
  std::vector<int32_t> qo_indptr_, kv_indptr_, kv_indices_, kv_len_;
  std::vector<std::pair<int32_t, int32_t>> places_;  // page and position of each row
};

bool equal(const Pages& a, const Pages& b) {
  return a.k == b.k && a.v == b.v && same_bits(a.k_scale, b.k_scale) &&
         same_bits(a.v_scale, b.v_scale);
}

void check_heads(const Step& step, const Numbers& got, const Numbers& rows, int32_t heads,
                 const Numbers& norm) {
  std::vector<double> y, error;
  for (int64_t i = 0; i < step.tokens() * heads; ++i) {
    step.reference(rows, heads, norm, i / heads, i % heads, y, error);
    const int64_t first = i / heads * step.stride(heads) + i % heads * step.shape().head_dim;
    for (size_t d = 0; d < y.size(); ++d) {
      CHECK(std::abs(got[static_cast<size_t>(first) + d] - y[d]) <= error[d]);
    }
  }
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {4, 2, 64, 64, false, true, 0, {{0, 5}, {63, 3}, {130, 1}}},
      {6, 2, 128, 128, true, true, 0, {{62, 4}}},
      {2, 2, 256, 64, false, false, 8, {{15, 2}, {0, 1}}},
      {3, 1, 80, 80, false, false, 0, {{7, 1}}},
      {4, 4, 96, 20, false, true, 3, {{1, 1}, {2, 2}, {3, 3}}},
      {4, 4, 48, 22, true, true, 1, {{64, 2}}},
      {2, 1, 16, 16, true, false, 0, {{0, 70}}},
      {2, 1, 112, 0, false, false, 0, {{5, 9}}},
  };
  return all;
}

TEST("norm and rotation are those of float64 and, bit for bit, of the unfused kernels") {
  uint32_t seed = 1;
  for (const Case& c : cases()) {
    const Step step(c, seed++);
    const Result result = step.run(DType::f32, true);
    const Numbers q = step.unfused(step.q_, c.heads, step.q_norm_);
    const Numbers k = step.unfused(step.k_, c.kv_heads, step.k_norm_);
    check_heads(step, result.q_out, step.q_, c.heads, step.q_norm_);
    check_heads(step, step.keys(result.pages), step.k_, c.kv_heads, step.k_norm_);
    CHECK(equal(result.pages, step.expected(DType::f32, k)));
    for (int64_t i = 0; i < static_cast<int64_t>(q.size()); ++i) {
      const auto at = static_cast<size_t>(i);
      const bool is_gap = i % step.stride(c.heads) >= c.heads * c.head_dim;
      CHECK(is_gap ? std::isnan(result.q_out[at]) : same_bits(result.q_out[at], q[at]));
    }
  }
}

TEST("pages of every type, byte for byte") {
  uint32_t seed = 11;
  for (const Case& c : cases()) {
    const Step step(c, seed++);
    const Numbers k = step.unfused(step.k_, c.kv_heads, step.k_norm_);
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::i8}) {
      for (const bool has_q : {false, true}) {
        if (equal(step.run(dtype, has_q).pages, step.expected(dtype, k))) continue;
        check::fail(__FILE__, __LINE__,
                    std::string(name(dtype)) + " pages of head_dim " + std::to_string(c.head_dim));
      }
    }
  }
}

TEST("heads need their barriers") {
  const Step step({1, 1, 128, 128, false, true, 0, {{3, 2}}}, 41);
  const Numbers right = step.run(DType::bf16, true).q_out;
  expect_every_barrier_matters([&] { return same_bits(step.run(DType::bf16, true).q_out, right); },
                               5);
}

TEST("many sequences, some without tokens") {
  Case c{2, 1, 32, 32, false, false, 0, {}};
  for (int32_t i = 0; i < 50; ++i) c.sequences.push_back({i, i % 3});
  const Step step(c, 21);
  const Numbers k = step.unfused(step.k_, c.kv_heads, step.k_norm_);
  CHECK(equal(step.run(DType::bf16, true).pages, step.expected(DType::bf16, k)));
}

TEST("int8 heads of zeros, of tiny numbers, of ties, and with a NaN or an infinity") {
  const Case c{2, 2, 64, 0, false, false, 0, {{6, 3}}};
  Step step(c, 31);
  for (size_t d = 0; d < 64; ++d) {
    step.k_[d] = 0.0f;
    step.v_[64 + d] = 1e-37f;
    step.k_[4 * 64 + d] = d == 0 ? 127.0f : static_cast<float>(d) - 31.5f;
  }
  step.k_[2 * 64 + 17] = std::numeric_limits<float>::quiet_NaN();
  step.v_[3 * 64 + 63] = -std::numeric_limits<float>::infinity();
  const Pages pages = step.run(DType::i8, false).pages;
  CHECK(equal(pages, step.expected(DType::i8, step.k_)));
  CHECK_EQ(std::count_if(pages.k_scale.begin(), pages.k_scale.end(),
                         [](float x) { return std::isnan(x); }),
           1);
}

TEST("what has no kernel is refused, and no tokens are no work") {
  ops::RopeAppendProblem p;
  p.kv.num_kv_heads = 2;
  p.kv.head_dim = 64;
  run_on_gpu(p);
  p.kv.head_dim = 24;
  CHECK_THROWS(Unsupported, "multiple of 16", run_on_gpu(p));
  p.kv.head_dim = 64;
  p.kv.dtype = DType::u8;
  CHECK_THROWS(Unsupported, "kv_dtype", run_on_gpu(p));
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
