// What single rows keep of their attention, and what their keys get of it (ops/attention_mass.h).
//
// The softmax (vectors/softmax.h) weighs the keys of a unit below a reference, which only grows. A
// key's probability is its weight, times a factor of its page and row: so sums of probabilities
// need neither products nor exponentials of keys once more.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/unroll.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// Where a row's numbers lie: as ops::kept_floats() has them.
struct KeptRow {
  float* weights;     // [pages][64]
  float* references;  // [pages]
  float* chunk_max;   // of the chunks, the last reference
  float* chunk_sum;   // of weights below that

  KeptRow(float* kept, int64_t pages, int64_t row)
      : weights(kept + row * ops::kept_floats(pages)),
        references(weights + pages * ops::kPageSize),
        chunk_max(references + pages),
        chunk_sum(chunk_max + pages) {}
};

template <class Kv>
struct KeptMassBody {
  using Math = AttentionMath<Kv>;
  using V = typename Kv::V;
  static constexpr int kGroups = ops::kPageSize / 16;

  static V load(const float* numbers, int64_t first, int64_t count, float behind) {
    return Math::only(token_bits(0, count - first), 0, V::load(numbers + first), behind);
  }

  // In place of references.
  static void find_factors(const KeptRow& row, int64_t pages) {
    const int64_t chunks = (pages + ops::kChunkUnits - 1) / ops::kChunkUnits;
    V highest = V::set(kNoScore);
    for (int64_t i = 0; i < chunks; i += 16) {
      highest = max(highest, load(row.chunk_max, i, chunks, kNoScore));
    }
    highest = V::set(maximum(highest));
    V sums = V::set(0.0f);
    for (int64_t i = 0; i < chunks; i += 16) {
      const V below = simd::exp(load(row.chunk_max, i, chunks, kNoScore) - highest);
      sums = fma(load(row.chunk_sum, i, chunks, 0.0f), below, sums);
    }
    const V share = V::set(1.0f / sum(sums));
    for (int64_t i = 0; i < pages; i += 16) {
      const V below = simd::exp(load(row.references, i, pages, kNoScore) - highest);
      (below * share).store(row.references + i);
    }
  }

  static void run(const KeptMass& mass) {
    const auto row = [&](int64_t head) { return KeptRow(mass.kept, mass.kept_pages, head); };
    for (int64_t head = 0; head < mass.num_heads; ++head) find_factors(row(head), mass.num_pages);
    const V decay = V::set(mass.rule.decay);
    for (int64_t page = 0; page < mass.num_pages; ++page) {
      float* to = mass.columns + page * ops::kPageSize;
      V sums[kGroups];
      unroll<kGroups>([&](auto g) { sums[g] = V::load(to + g * 16) * decay; });
      for (int64_t head = 0; head < mass.num_heads; ++head) {
        const float* weights = row(head).weights + page * ops::kPageSize;
        const V factor = V::set(row(head).references[page]);
        unroll<kGroups>([&](auto g) {
          const V weight = V::load(weights + g * 16);
          sums[g] =
              mass.rule.maximum ? max(sums[g], weight * factor) : fma(weight, factor, sums[g]);
        });
      }
      unroll<kGroups>([&](auto g) { sums[g].store(to + g * 16); });
    }
  }
};

template <class Kv>
void add_mass(const KeptMass& mass) {
  KeptMassBody<Kv>::run(mass);
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
