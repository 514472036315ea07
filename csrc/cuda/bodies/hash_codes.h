// Hashes of keys (ops/hash_tables.h): on which sides of hyperplanes the keys of a page lie, less a
// mean. The keys lie in shared memory, a lane has two of them, and a warp takes four hyperplanes at
// a time, whose numbers all lanes read alike. Sums are those of the CPU, number after number.
#pragma once

#include <cstdint>

#include "cuda/bodies/key_products.h"
#include "cuda/bodies/tiled_queries.h"
#include "cuda/unit.h"
#include "ops/kv_layout.h"

namespace effinfer::cuda {

inline constexpr int kMostHashDims = TiledQueries::kMostDims;

template <int kWarps>
struct HashedPage {
  static constexpr int kPlanes = 4;  // of a warp at a time
  static constexpr int kKeys = static_cast<int>(ops::kPageSize);

  float keys[kMostHashDims][kKeys];

  // The keys of a page, less their mean. A barrier comes before and another one follows.
  template <class Unit>
  EFFINFER_DEVICE void set(Unit& unit, const ops::KvLayer& kv, int64_t head_bytes, int64_t page,
                           int64_t kv_head, const float* mean) {
    const int64_t place = page * kv.num_kv_heads + kv_head;
    const AnyKeyLine line_of(kv);
    EFFINFER_NO_UNROLL
    for (int i = unit.thread; i < line_of.lines() * kKeys; i += kWarps * kWarp) {
      const int token = i % kKeys;
      const float scale = line_of.scale(unit, kv, place, token);
      const uint32_t* from = line_of.first(kv.k + place * head_bytes, token);
      line_of.visit(unit, from, i / kKeys, [&](int dim, float key) {
        keys[dim][token] = unit.mul(key, scale) - unit.load(mean + dim);
      });
    }
  }

  // use(plane, word) in a lane of each warp that has hyperplanes, a multiple of four of all.
  template <class Unit, class Use>
  EFFINFER_DEVICE void hash(Unit& unit, const float* planes, int num_planes, int dims,
                            Use&& use) const {
    for (int first = unit.warp * kPlanes; first < num_planes; first += kWarps * kPlanes) {
      float sums[kPlanes][2] = {};
      for (int d = 0; d < dims; d += 4) {
        Quad numbers[kPlanes];
        EFFINFER_UNROLL
        for (int r = 0; r < kPlanes; ++r) {
          const float* plane = planes + int64_t{first + r} * dims + d;
          numbers[r] = unit.load(reinterpret_cast<const Quad*>(plane));
        }
        EFFINFER_UNROLL
        for (int e = 0; e < 4; ++e) {
          EFFINFER_UNROLL
          for (int half = 0; half < 2; ++half) {
            const float key = keys[d + e][half * kWarp + unit.lane];
            EFFINFER_UNROLL
            for (int r = 0; r < kPlanes; ++r) {
              sums[r][half] = fmaf(float_of(numbers[r].words[e]), key, sums[r][half]);
            }
          }
        }
      }
      EFFINFER_UNROLL
      for (int r = 0; r < kPlanes; ++r) {
        const uint32_t low = unit.ballot(sums[r][0] > 0.0f);
        const uint32_t high = unit.ballot(sums[r][1] > 0.0f);
        if (unit.lane == 0) use(first + r, uint64_t{high} << 32 | low);
      }
    }
  }
};

// On which side of a hyperplane a query lies, by a warp: the same in all lanes.
template <class Unit>
EFFINFER_DEVICE bool is_above(Unit& unit, const float* query, const float* plane, int dims) {
  float sum = 0.0f;
  EFFINFER_NO_UNROLL
  for (int d = unit.lane; d < dims; d += kWarp) {
    sum = fmaf(unit.load(query + d), unit.load(plane + d), sum);
  }
  EFFINFER_UNROLL
  for (int mask = 1; mask < kWarp; mask *= 2) sum += unit.shfl_xor(sum, mask);
  return sum > 0.0f;
}

}  // namespace effinfer::cuda
