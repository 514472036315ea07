// AttentionPlan against float64 at every ISA level, and random sequences and lists thrown at it:
// either a typed error or the reference's result.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "arrays.h"
#include "check.h"
#include "core/float16.h"
#include "core/float8.h"
#include "effinfer/error.h"
#include "effinfer/ops/attention.h"

namespace {

using namespace effinfer;
using namespace effinfer::ops;

// Numbers of a dtype, and what they are.
struct Numbers {
  DType dtype = DType::f32;
  std::vector<uint8_t> bytes;
  std::vector<double> values;
};

Numbers random_numbers(DType dtype, int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  Numbers numbers;
  numbers.dtype = dtype;
  const auto size = static_cast<size_t>(dtype_info(dtype).block_bytes);
  numbers.bytes.resize(static_cast<size_t>(count) * size);
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    const float x = normal(random);
    const auto put = [&](auto bits, float value) {
      std::memcpy(numbers.bytes.data() + i * size, &bits, sizeof(bits));
      numbers.values.push_back(value);
    };
    if (dtype == DType::f32) {
      put(x, x);
    } else if (dtype == DType::f16) {
      put(f32_to_f16(x), f16_to_f32(f32_to_f16(x)));
    } else if (dtype == DType::bf16) {
      put(f32_to_bf16(x), bf16_to_f32(f32_to_bf16(x)));
    } else if (dtype == DType::f8_e4m3) {
      put(f32_to_f8_e4m3(x), f8_e4m3_to_f32(f32_to_f8_e4m3(x)));
    } else if (dtype == DType::f8_e5m2) {
      put(f32_to_f8_e5m2(x), f8_e5m2_to_f32(f32_to_f8_e5m2(x)));
    } else {
      const auto rounded = static_cast<int8_t>(std::lround(x * 30));
      put(rounded, static_cast<float>(rounded));
    }
  }
  return numbers;
}

StridedView view_of(Numbers& numbers, const Dims& dims) {
  return StridedView::dense(numbers.bytes.data(), numbers.dtype, dims);
}

template <class T>
TensorView vector_view(const std::vector<T>& values, DType dtype) {
  return {values.data(), dtype, {static_cast<int64_t>(values.size())}};
}

struct Sequences {
  std::vector<int32_t> qo_indptr = {0}, kv_indptr = {0}, kv_indices, kv_len;
  std::vector<uint8_t> mask;
  std::vector<int64_t> mask_indptr = {0};

  AttentionSequences views(bool paged, bool masked) const {
    AttentionSequences views;
    views.qo_indptr = vector_view(qo_indptr, DType::i32);
    views.kv_indptr = vector_view(kv_indptr, DType::i32);
    if (paged) views.kv_indices = vector_view(kv_indices, DType::i32);
    views.kv_len = vector_view(kv_len, DType::i32);
    if (masked) {
      views.mask = vector_view(mask, DType::u8);
      views.mask_indptr = vector_view(mask_indptr, DType::i64);
    }
    return views;
  }
};

// A problem of random size, paged in HND or NHD order or ragged.
struct Problem {
  AttentionGeometry g;
  Sequences sequences;
  bool paged, masked;
  AttentionInputs inputs;
  Numbers q, k, v;
  Numbers k_scales, v_scales;  // of each token and head, with int8

  explicit Problem(std::mt19937& random) {
    const auto pick = [&](auto... values) {
      const std::vector<int> list = {values...};
      return list[random() % list.size()];
    };
    g.num_kv_heads = pick(1, 2, 3);
    g.num_qo_heads = g.num_kv_heads * pick(1, 2, 5, 40);
    g.head_dim_qk = pick(16, 40, 64, 128);
    g.head_dim_vo = pick(g.head_dim_qk, g.head_dim_qk, 24, 64);
    g.page_size = pick(1, 3, 16);
    g.causal = pick(0, 1) != 0;
    g.window_left = pick(-1, -1, 0, 70);
    paged = pick(0, 1) != 0;
    masked = pick(0, 0, 1) != 0;
    inputs.order = pick(0, 1) != 0 ? KvOrder::nhd : KvOrder::hnd;
    inputs.sm_scale = 0.2f;
    inputs.logits_soft_cap = pick(0, 0, 3);
    inputs.k_scale = 0.5f;
    inputs.v_scale = 2.0f;
    const DType q_dtype = static_cast<DType>(pick(0, 1, 2));
    const DType kv_dtypes[] = {DType::f32, DType::f16,     DType::bf16,
                               DType::i8,  DType::f8_e4m3, DType::f8_e5m2};
    const DType kv_dtype = kv_dtypes[random() % 6];
    const int count = pick(1, 2, 4);
    for (int s = 0; s < count; ++s) {
      add_sequence(pick(0, 1, 3, 20), pick(0, 1, 64, 130, 700), random);
    }
    for (size_t i = 0; i < sequences.kv_indices.size(); ++i) {
      sequences.kv_indices[i] = static_cast<int32_t>(sequences.kv_indices.size() - 1 - i);
    }
    const int64_t rows = sequences.qo_indptr.back();
    q = random_numbers(q_dtype, rows * g.num_qo_heads * g.head_dim_qk, random);
    inputs.q = view_of(q, {rows, g.num_qo_heads, g.head_dim_qk});
    const int64_t slots = sequences.kv_indptr.back();
    const int64_t tokens = paged ? slots * g.page_size : slots;
    k = random_numbers(kv_dtype, tokens * g.num_kv_heads * g.head_dim_qk, random);
    v = random_numbers(kv_dtype, tokens * g.num_kv_heads * g.head_dim_vo, random);
    inputs.k = view_of(k, kv_dims(slots, g.head_dim_qk));
    inputs.v = view_of(v, kv_dims(slots, g.head_dim_vo));
    if (kv_dtype != DType::i8) return;
    k_scales = random_numbers(DType::f32, tokens * g.num_kv_heads, random);
    v_scales = random_numbers(DType::f32, tokens * g.num_kv_heads, random);
    inputs.k_scales = view_of(k_scales, kv_dims(slots, 0));
    inputs.v_scales = view_of(v_scales, kv_dims(slots, 0));
  }

  void add_sequence(int32_t rows, int32_t length, std::mt19937& random) {
    const int32_t slots = paged ? (length + g.page_size - 1) / g.page_size : length;
    sequences.qo_indptr.push_back(sequences.qo_indptr.back() + rows);
    sequences.kv_indptr.push_back(sequences.kv_indptr.back() + slots);
    sequences.kv_indices.resize(static_cast<size_t>(sequences.kv_indptr.back()));
    sequences.kv_len.push_back(length);
    for (int64_t i = 0; i < (int64_t{rows} * length + 7) / 8; ++i) {
      sequences.mask.push_back(static_cast<uint8_t>(random()));
    }
    sequences.mask_indptr.push_back(static_cast<int64_t>(sequences.mask.size()));
  }

  // Without a last dimension where `dims` is 0.
  Dims kv_dims(int64_t slots, int64_t dims) const {
    Dims shape = {slots};
    if (paged && inputs.order == KvOrder::nhd) shape.push_back(g.page_size);
    shape.push_back(g.num_kv_heads);
    if (paged && inputs.order == KvOrder::hnd) shape.push_back(g.page_size);
    if (dims > 0) shape.push_back(dims);
    return shape;
  }

  // Element d of the key or value of token t.
  double element(const Numbers& numbers, int64_t dims, size_t s, int64_t t, int64_t head,
                 int64_t d) const {
    int64_t row = (sequences.kv_indptr[s] + t) * g.num_kv_heads + head;
    if (paged) {
      const int64_t page =
          sequences.kv_indices[static_cast<size_t>(sequences.kv_indptr[s] + t / g.page_size)];
      const int64_t offset = t % g.page_size;
      row = inputs.order == KvOrder::nhd ? (page * g.page_size + offset) * g.num_kv_heads + head
                                         : (page * g.num_kv_heads + head) * g.page_size + offset;
    }
    return numbers.values[static_cast<size_t>(row * dims + d)];
  }

  bool sees(size_t s, int64_t row, int64_t t) const {
    const int64_t length = sequences.kv_len[s];
    const int64_t position = length - (sequences.qo_indptr[s + 1] - sequences.qo_indptr[s]) + row;
    if (g.causal && t > position) return false;
    if (g.window_left >= 0 && t < position - g.window_left) return false;
    if (!masked) return true;
    const int64_t bit = sequences.mask_indptr[s] * 8 + row * length + t;
    return (sequences.mask[static_cast<size_t>(bit / 8)] >> bit % 8 & 1) != 0;
  }

  // The logit of a row with a token.
  double logit(size_t s, int64_t row, int64_t head, int64_t t) const {
    const int64_t kv_head = head / (g.num_qo_heads / g.num_kv_heads);
    const int64_t at = ((sequences.qo_indptr[s] + row) * g.num_qo_heads + head) * g.head_dim_qk;
    double x = 0;
    for (int64_t d = 0; d < g.head_dim_qk; ++d) {
      x += q.values[static_cast<size_t>(at + d)] * element(k, g.head_dim_qk, s, t, kv_head, d);
    }
    x *= inputs.sm_scale * inputs.k_scale;
    if (!k_scales.values.empty()) x *= element(k_scales, 1, s, t, kv_head, 0);
    const double cap = inputs.logits_soft_cap;
    return cap > 0 ? cap * std::tanh(x / cap) : x;
  }
};

double to_double(const Numbers& numbers, size_t i) {
  if (numbers.dtype == DType::f32) {
    float value;
    std::memcpy(&value, numbers.bytes.data() + 4 * i, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, numbers.bytes.data() + 2 * i, 2);
  return numbers.dtype == DType::f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

// Compares a row and head with float64. `listed(t)`: the row's list visits token t.
template <class Listed>
void compare(const Problem& p, size_t s, int64_t row, int64_t head, const Numbers& out,
             const std::vector<float>& lse, Listed&& listed) {
  std::vector<double> weights(static_cast<size_t>(p.sequences.kv_len[s]));
  double highest = -1e300, sum = 0, magnitude = 0;
  for (size_t t = 0; t < weights.size(); ++t) {
    const auto token = static_cast<int64_t>(t);
    weights[t] = p.sees(s, row, token) && listed(token) ? p.logit(s, row, head, token) : -1e301;
    highest = std::max(highest, weights[t]);
  }
  for (double& weight : weights) sum += weight = weight < -1e300 ? 0 : std::exp(weight - highest);
  const int64_t kv_head = head / (p.g.num_qo_heads / p.g.num_kv_heads);
  const int64_t flat = (p.sequences.qo_indptr[s] + row) * p.g.num_qo_heads + head;
  // An error of a logit is one of its exponential; the result is rounded, and probabilities too
  // where products are bfloat16's.
  const double rounding = p.q.dtype == DType::f32 ? 0 : p.q.dtype == DType::f16 ? 0x1p-10 : 0x1p-7;
  const double epsilon = rounding + 0x1p-21 * (1 + std::abs(highest));
  for (int64_t d = 0; d < p.g.head_dim_vo; ++d) {
    double expected = 0;
    magnitude = 0;
    for (size_t t = 0; t < weights.size(); ++t) {
      const auto token = static_cast<int64_t>(t);
      double value = p.element(p.v, p.g.head_dim_vo, s, token, kv_head, d) * p.inputs.v_scale;
      if (!p.v_scales.values.empty()) value *= p.element(p.v_scales, 1, s, token, kv_head, 0);
      expected += weights[t] * value;
      magnitude = std::max(magnitude, weights[t] > 0 ? std::abs(value) : 0);
    }
    if (sum > 0) expected /= sum;
    const double got = to_double(out, static_cast<size_t>(flat * p.g.head_dim_vo + d));
    CHECK(std::abs(got - expected) <= epsilon * magnitude);
  }
  const float got = lse[static_cast<size_t>(flat)];
  if (sum == 0) {
    CHECK(std::isinf(got) && got < 0);
  } else {
    CHECK(std::abs(got - (highest + std::log(sum))) < 1e-4 * (1 + std::abs(highest)));
  }
}

struct Results {
  Numbers out;
  std::vector<float> lse;
};

Results run(const AttentionPlan& plan, const Problem& p, ThreadPool& pool) {
  Results results;
  const int64_t rows = plan.num_rows();
  const auto states = static_cast<size_t>(rows * p.g.num_qo_heads);
  results.out.dtype = p.q.dtype;
  results.out.bytes.resize(states * static_cast<size_t>(p.g.head_dim_vo) *
                           static_cast<size_t>(dtype_info(p.q.dtype).block_bytes));
  results.lse.resize(states);
  StridedView lse;
  lse.data = results.lse.data();
  lse.dims = {rows, p.g.num_qo_heads};
  lse.strides = {p.g.num_qo_heads, 1};
  plan.run(p.inputs, view_of(results.out, {rows, p.g.num_qo_heads, p.g.head_dim_vo}), lse, pool);
  return results;
}

// A few rows and heads of each sequence.
template <class Compare>
void for_some_rows(const Problem& p, std::mt19937& random, Compare&& compare) {
  for (size_t s = 0; s < p.sequences.kv_len.size(); ++s) {
    const int64_t rows = p.sequences.qo_indptr[s + 1] - p.sequences.qo_indptr[s];
    for (int64_t i = 0; i < std::min<int64_t>(rows, 2); ++i) {
      compare(s, static_cast<int64_t>(random() % static_cast<uint64_t>(rows)),
              static_cast<int64_t>(random() % static_cast<uint64_t>(p.g.num_qo_heads)));
    }
  }
}

TEST("dense, with masks, at every level and for any team") {
  ThreadPool one(1), three(3, true);
  std::mt19937 random(1);
  for (int i = 0; i < 60; ++i) {
    const Problem p(random);
    const AttentionPlan plan(p.g, p.sequences.views(p.paged, p.masked));
    at_every_isa([&] {
      const Results results = run(plan, p, one);
      const Results again = run(plan, p, three);
      CHECK(results.out.bytes == again.out.bytes && results.lse == again.lse);
      for_some_rows(p, random, [&](size_t s, int64_t row, int64_t head) {
        compare(p, s, row, head, results.out, results.lse, [](int64_t) { return true; });
      });
    });
  }
}

// The last row of each sequence that has rows, as a problem of its own.
Problem last_rows(const Problem& p) {
  Problem last = p;
  last.q.bytes.clear();
  const auto bytes =
      static_cast<int64_t>(p.g.num_qo_heads) * p.g.head_dim_qk * dtype_info(p.q.dtype).block_bytes;
  for (size_t s = 0; s + 1 < p.sequences.qo_indptr.size(); ++s) {
    const int32_t end = p.sequences.qo_indptr[s + 1];
    const bool any = end > p.sequences.qo_indptr[s];
    last.sequences.qo_indptr[s + 1] = last.sequences.qo_indptr[s] + (any ? 1 : 0);
    if (!any) continue;
    const auto from = p.q.bytes.begin() + (end - 1) * bytes;
    last.q.bytes.insert(last.q.bytes.end(), from, from + bytes);
  }
  last.inputs.q =
      view_of(last.q, {last.sequences.qo_indptr.back(), last.g.num_qo_heads, last.g.head_dim_qk});
  return last;
}

TEST("a row has the same bits alone and among others") {
  ThreadPool pool(1);
  std::mt19937 random(6);
  for (int i = 0; i < 40; ++i) {
    Problem p(random);
    p.masked = false;
    const Problem last = last_rows(p);
    const AttentionPlan plan(p.g, p.sequences.views(p.paged, false));
    const AttentionPlan plan_last(last.g, last.sequences.views(p.paged, false));
    at_every_isa([&] {
      const Results among = run(plan, p, pool);
      const Results alone = run(plan_last, last, pool);
      const size_t bytes = alone.out.bytes.size() /
                           static_cast<size_t>(std::max(1, last.sequences.qo_indptr.back()));
      for (size_t s = 0; s + 1 < p.sequences.qo_indptr.size(); ++s) {
        const auto row = static_cast<size_t>(last.sequences.qo_indptr[s]);
        if (last.sequences.qo_indptr[s + 1] == last.sequences.qo_indptr[s]) continue;
        const auto end = static_cast<size_t>(p.sequences.qo_indptr[s + 1]);
        CHECK(std::memcmp(alone.out.bytes.data() + row * bytes,
                          among.out.bytes.data() + (end - 1) * bytes, bytes) == 0);
      }
    });
  }
}

// Random lists of a problem: blocks of rows and spans of tokens.
struct Lists {
  std::vector<int32_t> lists, indptr = {0}, spans;

  Lists(const Problem& p, std::mt19937& random) {
    for (size_t s = 0; s < p.sequences.kv_len.size(); ++s) {
      const int32_t end = p.sequences.qo_indptr[s + 1];
      for (int32_t head = 0; head < p.g.num_kv_heads; ++head) {
        for (int32_t row = p.sequences.qo_indptr[s]; row < end;) {
          const int32_t rows = std::min<int32_t>(end - row, 1 + static_cast<int32_t>(random() % 8));
          lists.insert(lists.end(), {static_cast<int32_t>(s), head, row, rows});
          row += rows;
          for (int32_t t = static_cast<int32_t>(random() % 90); t < p.sequences.kv_len[s];) {
            const int32_t last = std::min<int32_t>(p.sequences.kv_len[s],
                                                   t + 1 + static_cast<int32_t>(random() % 90));
            spans.insert(spans.end(), {t, last});
            t = last + static_cast<int32_t>(random() % 90);
          }
          indptr.push_back(static_cast<int32_t>(spans.size() / 2));
        }
      }
    }
  }

  AttentionLists views() const {
    AttentionLists views;
    views.lists = {lists.data(), DType::i32, {static_cast<int64_t>(lists.size() / 4), 4}};
    views.indptr = vector_view(indptr, DType::i32);
    views.spans = {spans.data(), DType::i32, {static_cast<int64_t>(spans.size() / 2), 2}};
    return views;
  }

  bool visits(int64_t row, int64_t kv_head, int64_t token) const {
    for (size_t l = 0; l + 1 < indptr.size(); ++l) {
      const int32_t* list = lists.data() + 4 * l;
      if (list[1] != kv_head || row < list[2] || row >= list[2] + list[3]) continue;
      for (int32_t i = indptr[l]; i < indptr[l + 1]; ++i) {
        const int32_t* span = spans.data() + 2 * i;
        if (token >= span[0] && token < span[1]) return true;
      }
    }
    return false;
  }
};

TEST("lists at every level") {
  ThreadPool pool(2, true);
  std::mt19937 random(2);
  for (int i = 0; i < 40; ++i) {
    Problem p(random);
    p.masked = false;
    const Lists lists(p, random);
    const AttentionPlan plan(p.g, p.sequences.views(p.paged, false), lists.views());
    at_every_isa([&] {
      const Results results = run(plan, p, pool);
      for_some_rows(p, random, [&](size_t s, int64_t row, int64_t head) {
        const int64_t kv_head = head / (p.g.num_qo_heads / p.g.num_kv_heads);
        compare(p, s, row, head, results.out, results.lse, [&](int64_t token) {
          return lists.visits(p.sequences.qo_indptr[s] + row, kv_head, token);
        });
      });
    });
  }
}

TEST("hostile lists and sequences") {
  ThreadPool pool(1);
  std::mt19937 random(3);
  int refused = 0;
  for (int i = 0; i < 300; ++i) {
    Problem p(random);
    Lists lists(p, random);
    std::vector<int32_t>* arrays[] = {&p.sequences.qo_indptr,
                                      &p.sequences.kv_indptr,
                                      &p.sequences.kv_indices,
                                      &p.sequences.kv_len,
                                      &lists.lists,
                                      &lists.indptr,
                                      &lists.spans};
    for (int change = 0; change < 2; ++change) {
      std::vector<int32_t>& array = *arrays[random() % 7];
      if (array.empty()) continue;
      const int32_t wild[] = {-1, 1 << 30, -(1 << 30), 0, static_cast<int32_t>(random() % 100)};
      array[random() % array.size()] = wild[random() % 5];
    }
    try {
      const AttentionSequences views = p.sequences.views(p.paged, false);
      const AttentionPlan plan =
          i % 2 == 0 ? AttentionPlan(p.g, views) : AttentionPlan(p.g, views, lists.views());
      run(plan, p, pool);
    } catch (const InvalidArgument&) {
      ++refused;
    }
  }
  CHECK(refused > 100 && refused < 300);
}

TEST("wrong tensors are refused by name") {
  ThreadPool pool(1);
  std::mt19937 random(4);
  Problem p(random);
  const AttentionPlan plan(p.g, p.sequences.views(p.paged, p.masked));
  Problem wrong = p;
  wrong.inputs.q.dtype = DType::i32;
  CHECK_THROWS(InvalidArgument, "[attention] q: expected dtype", run(plan, wrong, pool));
  wrong = p;
  wrong.inputs.k.dims = {1, 1};
  CHECK_THROWS(InvalidArgument, "[attention] k: expected shape", run(plan, wrong, pool));
  wrong = p;
  wrong.inputs.v.dtype = p.inputs.k.dtype == DType::f32 ? DType::f16 : DType::f32;
  CHECK_THROWS(InvalidArgument, "[attention] v: expected k's dtype", run(plan, wrong, pool));
  wrong = p;
  wrong.inputs.sm_scale = NAN;
  CHECK_THROWS(InvalidArgument, "[attention] sm_scale", run(plan, wrong, pool));
  AttentionGeometry geometry = p.g;
  geometry.num_qo_heads = 7;
  geometry.num_kv_heads = 2;
  CHECK_THROWS(InvalidArgument, "num_qo_heads: expected a multiple",
               AttentionPlan(geometry, p.sequences.views(p.paged, false)));
}

}  // namespace

CHECK_MAIN()
