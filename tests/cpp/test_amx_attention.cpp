// Attention on AMX tiles against float64 and against itself, over a tile unit in plain C++; where
// the CPU has AMX the kernel of the library must agree with it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "core/float16.h"
#include "cpu/attention.h"
#include "cpu/level.h"
#include "effinfer/device.h"
#include "ops/attention.h"
#include "ops/registry.h"

#if EFFINFER_X86
#include "emulated_amx.h"

void emulated::refuse(const char* expected) {
  throw std::logic_error(std::string("[amx] the tile unit expected ") + expected);
}

namespace {

using namespace effinfer;
using namespace effinfer::ops;
using cpu::AttentionKernels;
using cpu::AttentionTask;

void require_avx512_bf16() {
  if (cpu_features().avx512_bf16) return;
  check::skip("the kernel's softmax runs on AVX512-BF16, which this CPU lacks");
}

void require_amx() {
#if EFFINFER_AMX
  if (cpu_features().best < Isa::amx) check::skip("this CPU has no AMX");
#else
  check::skip("the compiler has no AMX, so the kernel was not built");
#endif
}

struct Shape {
  int32_t group = 1;
  int32_t dim = 64;
  int32_t window = -1;
  int32_t sinks = 0;
  float soft_cap = 0.0f;
};

constexpr int64_t kGuard = 64;

size_t index(int64_t i) {
  return static_cast<size_t>(i);
}

double rounded(double x) {
  return bf16_to_f32(f32_to_bf16(static_cast<float>(x)));
}

// A sequence of one KV head in scattered pages; what its tokens do not fill is NaN.
struct Sequence {
  Shape shape;
  int32_t length;
  std::vector<uint16_t> k, v;
  std::vector<int32_t> pages;
  std::vector<float> q;  // [length][group][dim]
  std::vector<uint64_t> ancestors;
  float scale;

  Sequence(const Shape& s, int32_t tokens, uint32_t seed) : shape(s), length(tokens) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const int64_t count = (length + kPageSize - 1) / kPageSize;
    for (int64_t i = 0; i < count; ++i) pages.push_back(static_cast<int32_t>(2 * i + 1));
    std::shuffle(pages.begin(), pages.end(), random);
    const uint16_t nan = 0x7fc0;
    k.assign(index((2 * count + 1) * kPageSize * shape.dim), nan);
    v = k;
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t d = 0; d < shape.dim; ++d) {
        k[k_index(t, d)] = f32_to_bf16(normal(random));
        v[v_index(t, d)] = f32_to_bf16(normal(random));
      }
    }
    q.resize(index(int64_t{length} * shape.group * shape.dim));
    for (float& x : q) x = normal(random);
    scale = 1.0f / std::sqrt(static_cast<float>(shape.dim));
  }

  size_t page_at(int64_t token) const {
    return index(pages[index(token / kPageSize)] * kPageSize * shape.dim);
  }
  size_t k_index(int64_t token, int64_t d) const {
    return page_at(token) + index(k_offset(token % kPageSize, d, shape.dim, 2));
  }
  size_t v_index(int64_t token, int64_t d) const {
    return page_at(token) + index(v_offset(token % kPageSize, d, shape.dim, 2));
  }

  // Whether token `row` of a step that began at `step_start` sees `key`.
  bool sees(int64_t row, int64_t key, int64_t step_start) const {
    if (ancestors.empty() || key < step_start) {
      if (key > row) return false;
    } else if ((ancestors[index(row - step_start)] >> (key - step_start) & 1) == 0) {
      return false;
    }
    return shape.window < 0 || key >= row - shape.window || key < shape.sinks;
  }

  // Tokens [first, first + count) against all of their keys.
  AttentionTask task(int64_t first, int64_t count, std::vector<float>& out,
                     std::vector<float>& scratch) const {
    const int64_t width = int64_t{shape.group} * shape.dim;
    out.assign(index(count * width), -7.0f);
    // What was there before must not matter, nor may anything behind it change.
    const int64_t bytes = cpu::attention_scratch_bytes(count * shape.group, shape.dim, shape.dim);
    scratch.assign(index((bytes + 3) / 4), std::numeric_limits<float>::quiet_NaN());
    scratch.insert(scratch.end(), kGuard, 7.0f);
    KvLayer layer;
    layer.dtype = DType::bf16;
    layer.num_kv_heads = 1;
    layer.head_dim = shape.dim;
    layer.k = reinterpret_cast<uint8_t*>(const_cast<uint16_t*>(k.data()));
    layer.v = reinterpret_cast<uint8_t*>(const_cast<uint16_t*>(v.data()));
    AttentionTask task = {};
    task.q = {reinterpret_cast<const uint8_t*>(q.data() + first * width), DType::f32, shape.dim,
              width, shape.dim};
    task.k = keys_of(layer);
    task.v = values_of(layer);
    task.pages = pages.data();
    task.page_size = static_cast<int32_t>(kPageSize);
    task.num_rows = static_cast<int32_t>(count);
    task.num_heads = shape.group;
    task.num_tokens = static_cast<int32_t>(first + count);
    task.end_unit = static_cast<int32_t>((first + count - 1) / kPageSize + 1);
    task.position = static_cast<int32_t>(first);
    task.causal = true;
    task.window_left = shape.window;
    task.sink_tokens = shape.sinks;
    task.tree_start = static_cast<int32_t>(first);
    task.ancestors = ancestors.empty() ? nullptr : ancestors.data();
    task.q_scale = scale;
    task.score_scale = 1.0f;
    task.soft_cap = shape.soft_cap;
    task.v_scale = 1.0f;
    task.out_dtype = DType::f32;
    task.out = reinterpret_cast<uint8_t*>(out.data());
    task.out_row_stride = width;
    task.scratch = reinterpret_cast<uint8_t*>(scratch.data());
    return task;
  }

  std::vector<float> run(int64_t first, int64_t count,
                         const AttentionKernels& kernels = emulated::kAttention) const {
    std::vector<float> out, scratch;
    kernels.pages(task(first, count, out, scratch));
    CHECK_EQ(std::count(scratch.end() - kGuard, scratch.end(), 7.0f), kGuard);
    return out;
  }

  // The same keys and values as rows of a caller, which the kernel gathers; element(bits) is what
  // the caller has of a bfloat16 number.
  template <class Element>
  std::vector<float> run_rows(int64_t first, int64_t count, DType dtype, Element&& element) const {
    using T = decltype(element(uint16_t{}));
    std::vector<T> keys(index(int64_t{length} * shape.dim)), values(keys.size());
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t d = 0; d < shape.dim; ++d) {
        keys[index(t * shape.dim + d)] = element(k[k_index(t, d)]);
        values[index(t * shape.dim + d)] = element(v[v_index(t, d)]);
      }
    }
    std::vector<float> out, scratch;
    AttentionTask rows = task(first, count, out, scratch);
    rows.pages = nullptr;
    for (auto [to, from] : {std::pair(&rows.k, &keys), std::pair(&rows.v, &values)}) {
      to->data = reinterpret_cast<const uint8_t*>(from->data());
      to->dtype = dtype;
      to->token_stride = shape.dim * static_cast<int64_t>(sizeof(T));
    }
    emulated::kAttention.rows(rows);
    CHECK_EQ(std::count(scratch.end() - kGuard, scratch.end(), 7.0f), kGuard);
    return out;
  }
  std::vector<float> run_rows(int64_t first, int64_t count) const {
    return run_rows(first, count, DType::bf16, [](uint16_t bits) { return bits; });
  }

  // Makes whole numbers of keys and values, which int8 holds too.
  void round_to_integers() {
    for (std::vector<uint16_t>* numbers : {&k, &v}) {
      for (uint16_t& bits : *numbers) {
        const float x = bf16_to_f32(bits);
        if (!std::isnan(x)) bits = f32_to_bf16(std::round(x * 8.0f));
      }
    }
  }

  // Queries are rounded after scaling, then each probability once, by 2^-8 of it at most. Float32
  // adds far less.
  void check(int64_t first, int64_t count, const std::vector<float>& got,
             const std::string& what) const {
    for (int64_t row = 0; row < count * shape.group; ++row) {
      const int64_t token = first + row / shape.group;
      const float* query = q.data() + (first * shape.group + row) * shape.dim;
      std::vector<double> scores(index(length), -std::numeric_limits<double>::infinity());
      double highest = scores[0];
      for (int64_t key = 0; key < length; ++key) {
        if (!sees(token, key, first)) continue;
        double score = 0;
        for (int64_t d = 0; d < shape.dim; ++d) {
          score += rounded(query[d] * scale) * bf16_to_f32(k[k_index(key, d)]);
        }
        if (shape.soft_cap > 0) score = std::tanh(score / shape.soft_cap) * shape.soft_cap;
        scores[index(key)] = score;
        highest = std::max(highest, score);
      }
      double sum = 0;
      for (const double score : scores) sum += std::exp(score - highest);
      for (int64_t d = 0; d < shape.dim; ++d) {
        double value = 0;
        double magnitude = 0;
        for (int64_t key = 0; key < length; ++key) {
          if (!sees(token, key, first)) continue;
          const double term =
              std::exp(scores[index(key)] - highest) / sum * bf16_to_f32(v[v_index(key, d)]);
          value += term;
          magnitude += std::abs(term);
        }
        const float result = got[index(row * shape.dim + d)];
        if (std::abs(result - value) <= (0x1p-8 + 0x1p-15) * magnitude) continue;
        check::fail(__FILE__, __LINE__,
                    what + ": row " + std::to_string(row) + ", dimension " + std::to_string(d) +
                        ": got " + std::to_string(result) + ", expected " + std::to_string(value));
        return;
      }
    }
  }
};

bool same_bits(const float* a, const float* b, int64_t count) {
  return std::memcmp(a, b, index(count) * sizeof(float)) == 0;
}

TEST("odd numbers of rows, head sizes and lengths against float64") {
  require_avx512_bf16();
  const std::vector<int32_t> lengths = {1, 2, 31, 33, 64, 65, 127, 300};
  uint32_t seed = 0;
  for (const int32_t dim : {32, 64, 96, 160, 256}) {
    for (const auto& [group, counts] :
         std::vector<std::pair<int32_t, std::vector<int64_t>>>{{1, {1, 15, 16, 17, 31, 48}},
                                                               {3, {1, 5, 16}},
                                                               {5, {1, 9}},
                                                               {9, {1, 2, 5}},
                                                               {71, {1}}}) {
      const int32_t length = lengths[++seed % lengths.size()];
      const Sequence sequence({group, dim}, length, seed);
      for (const int64_t wanted : counts) {
        const int64_t count = std::min<int64_t>(wanted, length);
        const std::vector<float> out = sequence.run(length - count, count);
        sequence.check(length - count, count, out,
                       "dim " + std::to_string(dim) + ", group " + std::to_string(group) +
                           ", length " + std::to_string(length) + ", " + std::to_string(count) +
                           " tokens");
      }
    }
  }
}

TEST("windows, sinks and soft caps against float64") {
  require_avx512_bf16();
  uint32_t seed = 50;
  for (const int32_t window : {0, 1, 63, 100}) {
    for (const int32_t sinks : {0, 4, 70}) {
      const Sequence sequence({3, 64, window, sinks, sinks == 4 ? 2.5f : 0.0f}, 333, ++seed);
      for (const int64_t first : {0, 21, 190, 320}) {
        const std::vector<float> out = sequence.run(first, 13);
        sequence.check(first, 13, out, "window " + std::to_string(window));
      }
    }
  }
}

TEST("a tree of drafts against float64") {
  require_avx512_bf16();
  Sequence sequence({2, 64}, 99, 7);
  std::mt19937 random(8);
  for (uint32_t i = 0; i < 20; ++i) {
    const uint64_t parent = i == 0 ? 0 : sequence.ancestors[random() % i];
    sequence.ancestors.push_back(parent | uint64_t{1} << i);
  }
  sequence.check(79, 20, sequence.run(79, 20), "tree");
}

TEST("a row's bits do not depend on the tile") {
  require_avx512_bf16();
  for (const Shape& shape : {Shape{1, 64}, Shape{3, 128}, Shape{5, 96, 90, 3, 20.0f}}) {
    const int64_t width = int64_t{shape.group} * shape.dim;
    const int64_t most = 48 / shape.group;
    const Sequence sequence(shape, 530, 11);
    for (const int64_t first : {0, 47, 250, 530 - 48}) {
      const std::vector<float> whole = sequence.run(first, most);
      for (const int64_t count : {1, 2, 7}) {
        for (int64_t i = 0; i + count <= most; i += count) {
          const std::vector<float> part = sequence.run(first + i, count);
          CHECK(same_bits(part.data(), whole.data() + i * width, count * width));
        }
      }
    }
  }
}

TEST("chunks of an item each merge to the same bits") {
  require_avx512_bf16();
  const Sequence sequence({4, 64}, 900, 12);
  const std::vector<float> whole = sequence.run(890, 10);
  const int64_t rows = 40;
  std::vector<float> out, scratch;
  AttentionTask task = sequence.task(890, 10, out, scratch);
  const int32_t end = task.end_unit;
  const int32_t chunks = (end + kChunkUnits - 1) / kChunkUnits;
  std::vector<float> partial_out(index(chunks * rows * 64)), partial_ms(index(chunks * rows * 2));
  for (int32_t i = 0; i < chunks; ++i) {
    task.first_unit = i * kChunkUnits;
    task.end_unit = std::min(end, (i + 1) * kChunkUnits);
    task.partial_out = partial_out.data() + i * rows * 64;
    task.partial_ms = partial_ms.data() + i * rows * 2;
    emulated::kAttention.pages(task);
  }
  emulated::kAttention.fold(task, {partial_out.data(), partial_ms.data(), chunks});
  CHECK(same_bits(out.data(), whole.data(), rows * 64));
}

TEST("gathered rows give the bits of pages") {
  require_avx512_bf16();
  for (const Shape& shape : {Shape{1, 64}, Shape{3, 128}, Shape{5, 96, 90, 3, 20.0f}}) {
    const Sequence sequence(shape, 421, 31);
    for (const int64_t count : {1, 5, 9, 60}) {
      const std::vector<float> pages = sequence.run(421 - count, count);
      const std::vector<float> rows = sequence.run_rows(421 - count, count);
      CHECK(same_bits(pages.data(), rows.data(), static_cast<int64_t>(pages.size())));
    }
  }
}

TEST("gathered int8 rows give the bits of their numbers in bfloat16") {
  require_avx512_bf16();
  for (const Shape& shape : {Shape{1, 64}, Shape{4, 128, 100, 5}}) {
    Sequence sequence(shape, 333, 32);
    sequence.round_to_integers();
    for (const int64_t count : {1, 60}) {
      const std::vector<float> wide = sequence.run_rows(333 - count, count);
      const std::vector<float> narrow =
          sequence.run_rows(333 - count, count, DType::i8,
                            [](uint16_t bits) { return static_cast<int8_t>(bf16_to_f32(bits)); });
      sequence.check(333 - count, count, narrow, "int8 rows");
      CHECK(same_bits(wide.data(), narrow.data(), static_cast<int64_t>(wide.size())));
    }
  }
}

TEST("attention.amx.bf16 is what the AMX level selects for bf16 products") {
  require_avx512_bf16();
  AttentionProblem problem;
  problem.num_qo_heads = 6;
  problem.num_kv_heads = 2;
  problem.arithmetic = Arithmetic::bf16;
  for (const int32_t dim : {64, 80}) {
    problem.k.dims = problem.v.dims = dim;
    problem.k.dtype = problem.v.dtype = DType::bf16;
    CHECK_EQ(table<AttentionProblem>().select(problem, {.isa = Isa::avx512}).name,
             std::string("attention.avx512.bf16"));
#if EFFINFER_AMX
    const std::string expected = dim == 64 ? "attention.amx.bf16" : "attention.avx512.bf16";
#else
    const std::string expected = "attention.avx512.bf16";
#endif
    CHECK_EQ(table<AttentionProblem>().select(problem, {.isa = Isa::amx}).name, expected);
  }
  problem.arithmetic = Arithmetic::f32;
  CHECK_EQ(table<AttentionProblem>().select(problem, {.isa = Isa::amx}).name,
           std::string("attention.avx512"));
}

// The manual gives TDPBF16PS operation by operation (chains of fused multiply-adds, their sum, the
// destination; nearest even, denormals flushed, MXCSR ignored) and the emulation does these. All
// else is one template, compiled without contraction: so both give the same bits.
TEST("the native kernel agrees with the emulated one") {
  require_amx();
#if EFFINFER_AMX
  for (const Shape& shape : {Shape{1, 64}, Shape{3, 128}, Shape{5, 96, 90, 3, 20.0f}}) {
    const Sequence sequence(shape, 421, 21);
    for (const int64_t count : {1, 5, 9}) {
      const std::vector<float> got =
          sequence.run(421 - count, count, cpu::kernels<cpu::Level::amx, AttentionKernels>());
      const std::vector<float> expected = sequence.run(421 - count, count);
      sequence.check(421 - count, count, got, "native");
      int64_t different = 0;
      for (size_t i = 0; i < got.size(); ++i) different += !same_bits(&got[i], &expected[i], 1);
      CHECK_EQ(different, 0);
    }
  }
#endif
}

}  // namespace

#else

TEST("other processors have no AMX") {
  CHECK(effinfer::cpu_features().best < effinfer::Isa::amx);
}

#endif

CHECK_MAIN()
