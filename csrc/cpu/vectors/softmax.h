// Softmax of a tile's rows over a unit of keys, while the units go by.
//
// A row weighs a key by exp(score - reference). The reference is a maximum of the scores so far,
// but an old one serves until a score exceeds it by more than kMostGrowth. So in most units nothing
// waits for a maximum over lanes, what the row has summed keeps its scale, and the chains of exp of
// several rows overlap. Sums of weights stay in 16 lanes until the chunk ends.
//
// Everything depends on the row's own scores of this and earlier units of the chunk alone.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/kept_weights.h"
#include "cpu/vectors/select.h"
#include "cpu/vectors/tree_path.h"
#include "cpu/vectors/unroll.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// Where a tile's rows keep what they have of a chunk.
struct SoftmaxRows {
  float* scores;   // [rows][64], then weights, in the way of Math::store_factor
  float* max;      // [rows], the reference
  float* sums;     // [rows][16], of weights
  float* factors;  // [rows], of the unit: on what was summed before it
};

template <class Kv>
struct Softmax {
  using Math = AttentionMath<Kv>;
  using V = typename Kv::V;
  static constexpr int kGroups = kUnit / 16;
  // In float32 a weight of up to e^8 and sums of many are as precise as those below 1. Of weights
  // that are rounded to bfloat16 the greatest is to be 1, which is exact: the key that outweighs
  // the others then gives its values as they are.
  static constexpr float kMostGrowth = Kv::kPairs ? 0.0f : 8.0f;

  // The unit's part of it; null where there is none.
  struct Unit {
    const float* k_scales;
    const float* v_scales;
    const float* log_weights;
    bool has_first;  // its first token is that of its sequence, and counts differently
    const float* positions;
    int64_t start;  // of the unit's first token, where they follow each other in their sequence
  };

  // Tokens [first, end) of the tile; `seen` tells what each token sees of the unit. Scores of other
  // keys may be anything, their weights are 0.
  static void weigh(const AttentionTask& task, const Unit& unit, const uint64_t* seen,
                    int64_t first, int64_t end, const SoftmaxRows& rows) {
    const bool plain = unit.k_scales == nullptr && unit.v_scales == nullptr &&
                       unit.log_weights == nullptr && !unit.has_first && task.soft_cap <= 0.0f &&
                       task.alibi_slopes == nullptr;
    // Before the tree only biases know that a row of it is not where its place is.
    const bool in_tree = task.ancestors != nullptr &&
                         (unit.start + kUnit > task.tree_start || task.alibi_slopes != nullptr);
    for (int64_t token = first; token < end; ++token) {
      const int64_t position = task.position + token;
      if (in_tree && is_displaced(task.ancestors[token])) {
        weigh_displaced(task, unit, seen[token], token, rows);
      } else if (!plain) {
        weigh_token<false, false>(task, unit, seen[token], token, position, rows);
      } else if (~seen[token] != 0) {
        weigh_token<true, false>(task, unit, seen[token], token, position, rows);
      } else {
        weigh_token<true, true>(task, unit, seen[token], token, position, rows);
      }
    }
  }

 private:
  // kPlain: scores are scaled and that is all. kAll: the token sees all keys of the unit.
  template <bool kPlain, bool kAll>
  [[gnu::always_inline]] static void weigh_token(const AttentionTask& task, const Unit& unit,
                                                 uint64_t seen, int64_t token, int64_t position,
                                                 const SoftmaxRows& rows) {
    const V scale = V::set(task.score_scale);
    for (int64_t head = 0; head < task.num_heads; ++head) {
      const int64_t row = token * task.num_heads + head;
      float* scores = rows.scores + row * kUnit;
      V x[kGroups];
      unroll<kGroups>([&](auto g) __attribute__((always_inline)) {
        x[g] = V::load(scores + g * 16) * scale;
        if (!kPlain) x[g] = logit(task, unit, x[g], g * 16, position, head);
        if (!kAll) x[g] = Math::only(seen, g * 16, x[g], -__builtin_inff());
      });
      V sums = V::load(rows.sums + row * 16);
      float factor = 1.0f;
      const V highest = max(max(x[0], x[1]), max(x[2], x[3]));
      if (bits_above(highest, V::set(rows.max[row] + kMostGrowth)) != 0) [[unlikely]] {
        factor = grow(maximum(highest), rows.max[row]);
        sums = sums * V::set(factor);
      }
      rows.factors[row] = factor;
      const V reference = V::set(rows.max[row]);
      unroll<kGroups>([&](auto g) __attribute__((always_inline)) {
        x[g] = exp_of_difference(x[g] - reference);
        sums = sums + x[g];
      });
      if (task.kept != nullptr) [[unlikely]]
        keep(task, unit, row, rows.max[row], x);
      unroll<kGroups>([&](auto g) __attribute__((always_inline)) {
        if (!kPlain && unit.v_scales != nullptr) {
          x[g] = x[g] * Math::only(seen, g * 16, V::load(unit.v_scales + g * 16), 0.0f);
        }
        Math::store_factor(x[g], scores, g * 16);
      });
      sums.store(rows.sums + row * 16);
    }
  }

  // A row whose path does not lie in its places. Where it can, it gets what it would have in them;
  // weights in pairs, which are summed as such, it can not.
  [[gnu::noinline]] static void weigh_displaced(const AttentionTask& task, Unit unit, uint64_t seen,
                                                int64_t token, const SoftmaxRows& rows) {
    const TreePath path(task, token, unit.start);
    float* scores = rows.scores + token * task.num_heads * kUnit;
    if (Kv::kPairs || !path.stays()) {
      float positions[kUnit];
      if (task.alibi_slopes != nullptr) {
        copy(unit.positions, positions);
        path.set_positions(unit.start, positions);
        unit.positions = positions;
      }
      weigh_token<false, false>(task, unit, seen, token, path.position(), rows);
      return;
    }
    float k_scales[kUnit];
    float v_scales[kUnit];
    const auto close_up = [&](const float*& from, float* to) {
      if (from == nullptr) return;
      copy(from, to);
      path.close_up(to);
      from = to;
    };
    close_up(unit.k_scales, k_scales);
    close_up(unit.v_scales, v_scales);
    for (int64_t head = 0; head < task.num_heads; ++head) path.close_up(scores + head * kUnit);
    weigh_token<false, false>(task, unit, path.seen(), token, path.position(), rows);
    for (int64_t head = 0; head < task.num_heads; ++head) path.spread(scores + head * kUnit);
  }

  // Of a page, whose tokens follow each other, and of the tile's only row.
  [[gnu::noinline]] static void keep(const AttentionTask& task, const Unit& unit, int64_t head,
                                     float reference, const V (&weights)[kGroups]) {
    KeptBody<Kv>::keep_page(task, unit.start / kUnit, head, reference, weights);
  }

  static void copy(const float* from, float* to) {
    for (int64_t t = 0; t < kUnit; t += 16) V::load(from + t).store(to + t);
  }

  // e^x with fewer operations than simd::exp. Its relative error of |x| 2^-24 grows as weights
  // shrink, so that in their sum it is less than a rounding.
  [[gnu::always_inline]] static V exp_of_difference(V x) {
    return simd::exp2(x * V::set(simd::kLog2e));
  }

  // Makes `highest` the reference; the factor from the old one to it. What was summed under the
  // maximum of no scores counts for nothing.
  static float grow(float highest, float& reference) {
    const float old = reference;
    reference = highest;
    return old == kNoScore ? 0.0f : Math::first_lane(simd::exp(V::set(old - highest)));
  }

  static V logit(const AttentionTask& task, const Unit& unit, V x, int64_t t, int64_t at,
                 int64_t head) {
    if (unit.k_scales != nullptr) x = x * V::load(unit.k_scales + t);
    if (task.soft_cap > 0.0f) {
      const V cap = V::set(task.soft_cap);
      x = simd::tanh(x / cap) * cap;
    }
    if (task.alibi_slopes != nullptr) {
      const V position = V::set(static_cast<float>(at));
      x = fma(V::set(task.alibi_slopes[head]), V::load(unit.positions + t) - position, x);
    }
    if (unit.log_weights != nullptr) x = x + V::load(unit.log_weights + t);
    if (unit.has_first && t == 0) x = x + Math::only(1, 0, V::set(task.first_logits[head]), 0.0f);
    return x;
  }
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
