// Codes of keys and queries, collisions 64 keys at a time, and products with single lines of keys.
//
// A page's codes are words of one bit of each of its 64 keys, so that whether they agree with a
// query's bit is an exclusive or for all of them, and counting to two is two words.
#include "cpu/hash_index.h"

#include <cstring>

#include "cpu/level.h"
#include "cpu/vectors/kv.h"
#include "cpu/vectors/kv_lines.h"
#include "cpu/vectors/select.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

using V = KvF32::V;

constexpr int64_t kLine = 64;
constexpr int64_t kTogether = ops::kTablesTogether;

// use(d, keys): 16 keys from `first` on, of each dimension in order.
template <class Kv, class Use>
[[gnu::always_inline]] inline void for_keys(const PageKeys& page, int64_t dim, int64_t first,
                                            Use&& use) {
  constexpr int P = Kv::P;
  for (int64_t d = 0; d < dim; d += P) {
    V keys[P];
    Kv::expand(page.k + (first / 16 * dim + d) / P * kLine, keys);
    for (int j = 0; j < P; ++j) {
      if constexpr (Kv::kScaled) keys[j] = keys[j] * V::load(page.k_scale + first);
      use(d + j, keys[j]);
    }
  }
}

// The same, less their mean.
template <class Kv, class Use>
[[gnu::always_inline]] inline void for_centred(const PageKeys& page, int64_t dim, int64_t first,
                                               const float* mean, Use&& use) {
  for_keys<Kv>(page, dim, first, [&](int64_t d, V keys) { use(d, keys - V::set(mean[d])); });
}

void add_keys(const KeyShape& shape, const PageKeys& page, float* sums) {
  with_lines(shape.dtype, [&]<class Kv>() {
    for (int64_t first = 0; first < ops::kPageSize; first += 16) {
      for_keys<Kv>(page, shape.head_dim, first, [&](int64_t d, V keys) { sums[d] += sum(keys); });
    }
  });
}

// On which sides of R planes 16 keys [dim][16] lie, in the bits from `first` on.
template <int R>
void add_sides(const float* keys, int64_t dim, const float* planes, int64_t first,
               uint64_t* words) {
  V sums[R];
  for (int r = 0; r < R; ++r) sums[r] = V::set(0.0f);
  for (int64_t d = 0; d < dim; ++d) {
    const V key = V::load(keys + d * 16);
    for (int r = 0; r < R; ++r) sums[r] = fma(V::set(planes[r * dim + d]), key, sums[r]);
  }
  for (int r = 0; r < R; ++r) {
    words[r] |= uint64_t{bits_above(sums[r], V::set(0.0f))} << first;
  }
}

void hash(const HashedPage& page, float* scratch, uint64_t* words) {
  const int64_t dim = page.shape.head_dim;
  with_lines(page.shape.dtype, [&]<class Kv>() {
    for (int64_t first = 0; first < ops::kPageSize; first += 16) {
      for_centred<Kv>(page.keys, dim, first, page.mean,
                      [&](int64_t d, V keys) { keys.store(scratch + first * dim + d * 16); });
    }
  });
  std::memset(words, 0, static_cast<size_t>(page.num_planes) * sizeof(uint64_t));
  constexpr int R = 4;
  for (int64_t plane = 0; plane < page.num_planes; plane += R) {
    for (int64_t first = 0; first < ops::kPageSize; first += 16) {
      add_sides<R>(scratch + first * dim, dim, page.planes + plane * dim, first, words + plane);
    }
  }
}

void hash_queries(const float* q, int64_t dim, const float* planes, const ops::HashShape& shape,
                  uint64_t* words) {
  for (int32_t head = 0; head < shape.group; ++head, q += dim) {
    for (int64_t i = 0; i < shape.of_head(); ++i, planes += dim) {
      V sums = V::set(0.0f);
      for (int64_t d = 0; d < dim; d += 16) sums = fma(V::load(q + d), V::load(planes + d), sums);
      *words++ = sum(sums) > 0.0f ? 0 : ~uint64_t{0};
    }
  }
}

uint64_t collide(const uint64_t* page, const uint64_t* queries, const ops::HashShape& shape) {
  typedef uint64_t Words __attribute__((vector_size(kTogether * sizeof(uint64_t))));
  uint64_t drawn = 0;
  for (int32_t head = 0; head < shape.group; ++head) {
    Words once = {}, twice = {};
    for (int64_t table = 0; table < shape.tables; table += kTogether) {
      Words same = ~Words{};
      for (int32_t bit = 0; bit < shape.bits; ++bit, page += kTogether, queries += kTogether) {
        Words sides, others;  // agree where the inverted ones differ
        std::memcpy(&sides, page, sizeof(Words));
        std::memcpy(&others, queries, sizeof(Words));
        same &= sides ^ others;
      }
      twice |= once & same;
      once |= same;
    }
    uint64_t any = 0;
    for (int64_t i = 0; i < kTogether; ++i) {
      drawn |= twice[i] | (any & once[i]);
      any |= once[i];
    }
  }
  return drawn;
}

// Of R heads.
template <class Kv, int R>
void measure_heads(const KeyAngles& a, int32_t head) {
  const int64_t dim = a.shape.head_dim;
  const float* q = a.q + head * dim;
  V sums[R];
  for (int r = 0; r < R; ++r) sums[r] = V::set(0.0f);
  V squares = V::set(0.0f);
  for_centred<Kv>(a.keys, dim, a.first, a.mean, [&](int64_t d, V keys) {
    squares = fma(keys, keys, squares);
    for (int r = 0; r < R; ++r) sums[r] = fma(V::set(q[r * dim + d]), keys, sums[r]);
  });
  for (int r = 0; r < R; ++r) sums[r].store(a.products + (head + r) * 16);
  squares.store(a.squares);
}

void measure(const KeyAngles& a) {
  with_lines(a.shape.dtype, [&]<class Kv>() {
    int32_t head = 0;
    for (; a.group - head >= 4; head += 4) measure_heads<Kv, 4>(a, head);
    if (a.group - head == 3) measure_heads<Kv, 3>(a, head);
    if (a.group - head == 2) measure_heads<Kv, 2>(a, head);
    if (a.group - head == 1) measure_heads<Kv, 1>(a, head);
  });
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
const HashIndexKernels& kernels<Level::EFFINFER_LEVEL>() {
  namespace level = EFFINFER_LEVEL;
  static constexpr HashIndexKernels kTable = {level::hash, level::add_keys, level::hash_queries,
                                              level::collide, level::measure};
  return kTable;
}

}  // namespace effinfer::cpu
