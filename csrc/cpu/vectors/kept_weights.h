// What single rows keep of their attention, and what their keys get of it (ops/attention_mass.h).
//
// The softmax (vectors/softmax.h) weighs the keys of a unit below a reference, which only grows. A
// key's probability is its weight, times a factor of its page and row: so sums of probabilities
// need neither products nor exponentials of keys once more. They are made by whoever has the
// weights in its own cache.
//
//   a member's weights   of each page   [group][64]  the weights
//                                       [padded]     their references
//   numbers of a row     [2][padded]    its greatest reference, one over its sum below that
//     and KV head        of each chunk  [2][padded]  its last reference, its sum below that
//                                       [16]         the member that had its task; where among
//                                                    its weights the chunk's begin
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/unroll.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class Kv>
struct KeptBody {
  using Math = AttentionMath<Kv>;
  using Kept = ops::KeptWeights;
  using V = typename Kv::V;
  static constexpr int kGroups = ops::kPageSize / 16;

  static float* chunk_of(float* numbers, int64_t group, int64_t chunk) {
    return numbers + 2 * Kept::padded(group) + chunk * Kept::chunk_numbers(group);
  }

  static void keep_page(const AttentionTask& task, int64_t page, int64_t head, float reference,
                        const V (&weights)[kGroups]) {
    const int64_t group = task.num_heads;
    float* to = task.kept_weights + (page - task.first_unit) * Kept::page_weights(group);
    for (int g = 0; g < kGroups; ++g) weights[g].store(to + head * ops::kPageSize + g * 16);
    to[group * ops::kPageSize + head] = reference;
  }

  static void keep_chunk(const AttentionTask& task, int64_t chunk, const float* max,
                         const float* sums) {
    const int64_t group = task.num_heads;
    const int64_t padded = Kept::padded(group);
    float* to = chunk_of(task.kept, group, chunk);
    for (int64_t head = 0; head < padded; ++head) {
      to[head] = head < group ? max[head] : kNoScore;
      to[padded + head] = head < group ? sums[head] : 0.0f;
    }
    const int64_t pages = chunk * ops::kChunkUnits - task.first_unit;
    to[2 * padded] = static_cast<float>(task.member);
    to[2 * padded + 1] = static_cast<float>(task.kept_place + pages * Kept::page_weights(group));
  }

  // Of 16 heads from one on, over all chunks.
  static void end_heads(const KeptRow& row, int64_t head) {
    const int64_t padded = Kept::padded(row.num_heads);
    const int64_t chunks = (row.num_pages + ops::kChunkUnits - 1) / ops::kChunkUnits;
    const auto at = [&](int64_t chunk) {
      return chunk_of(row.numbers, row.num_heads, chunk) + head;
    };
    V highest = V::set(kNoScore);
    for (int64_t i = 0; i < chunks; ++i) highest = max(highest, V::load(at(i)));
    V sums = V::set(0.0f);
    for (int64_t i = 0; i < chunks; ++i) {
      sums = fma(V::load(at(i) + padded), simd::exp(V::load(at(i)) - highest), sums);
    }
    highest.store(row.numbers + head);
    (V::set(1.0f) / sums).store(row.numbers + padded + head);
  }

  // The factors of a page's weights, of 16 heads from one on.
  static void find_factors(const KeptRow& row, int64_t head, const float* references,
                           float* factors) {
    const V highest = V::load(row.numbers + head);
    const V share = V::load(row.numbers + Kept::padded(row.num_heads) + head);
    // Behind the last head there is anything.
    const V known =
        Math::only(token_bits(0, row.num_heads - head), 0, V::load(references + head), kNoScore);
    (simd::exp(known - highest) * share).store(factors);
  }

  static void add_page(const KeptRow& row, const ops::MassRule& rule, const float* weights,
                       float* to) {
    const float* references = weights + row.num_heads * ops::kPageSize;
    const V decay = V::set(rule.decay);
    V sums[kGroups];
    unroll<kGroups>([&](auto g) { sums[g] = V::load(to + g * 16) * decay; });
    alignas(64) float factors[16];
    for (int64_t head = 0; head < row.num_heads; ++head) {
      if (head % 16 == 0) find_factors(row, head, references, factors);
      const V factor = V::set(factors[head % 16]);
      unroll<kGroups>([&](auto g) {
        const V weight = V::load(weights + head * ops::kPageSize + g * 16);
        sums[g] = rule.maximum ? max(sums[g], weight * factor) : fma(weight, factor, sums[g]);
      });
    }
    unroll<kGroups>([&](auto g) { sums[g].store(to + g * 16); });
  }

  static void add(const KeptRow& row, const ops::MassRule& rule, int32_t member,
                  const float* weights, float* columns) {
    const int64_t padded = Kept::padded(row.num_heads);
    for (int64_t page = 0; page < row.num_pages; ++page) {
      const float* chunk = chunk_of(row.numbers, row.num_heads, page / ops::kChunkUnits);
      if (chunk[2 * padded] != static_cast<float>(member)) continue;
      const int64_t place = static_cast<int64_t>(chunk[2 * padded + 1]) +
                            page % ops::kChunkUnits * Kept::page_weights(row.num_heads);
      add_page(row, rule, weights + place, columns + page * ops::kPageSize);
    }
  }
};

template <class Kv>
void end_kept(const KeptRow& row) {
  for (int64_t head = 0; head < row.num_heads; head += 16) KeptBody<Kv>::end_heads(row, head);
}

template <class Kv>
void add_kept(const KeptRow& row, const ops::MassRule& rule, int32_t member, const float* weights,
              float* columns) {
  KeptBody<Kv>::add(row, rule, member, weights, columns);
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
