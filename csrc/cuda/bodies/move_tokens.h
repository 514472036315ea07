// Tokens from one place of the engine's pages to another: a block a head, a thread the same
// dimensions of all moves, so that moves keep their order without a barrier.
#pragma once

#include "cuda/unit.h"
#include "ops/move_tokens.h"

namespace effinfer::cuda {

struct MoveTokens {
  static constexpr const char* kName = "move_tokens";
  static constexpr int kThreads = 128;
  using Params = ops::MoveTokensProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int64_t bytes = dtype_bytes(p.kv.dtype);
    if (bytes == 4) return move<uint32_t>(unit, p);
    if (bytes == 2) return move<uint16_t>(unit, p);
    move<uint8_t>(unit, p);
    if (unit.thread == 0) move_scales(unit.block, p);
  }

 private:
  EFFINFER_DEVICE static constexpr int64_t dtype_bytes(DType dtype) {
    return dtype == DType::f32 ? 4 : dtype == DType::i8 ? 1 : 2;
  }

  // Of a head's page.
  template <class T>
  EFFINFER_DEVICE static T* page_of(uint8_t* plane, const Params& p, int head, int32_t page) {
    const int64_t elements = ops::kPageSize * p.kv.head_dim;
    return reinterpret_cast<T*>(plane) + (int64_t{page} * p.kv.num_kv_heads + head) * elements;
  }

  template <class T, class Unit>
  EFFINFER_DEVICE static void move(Unit& unit, const Params& p) {
    constexpr int64_t kShare = 4 / static_cast<int64_t>(sizeof(T));
    for (int64_t d = unit.thread; d < p.kv.head_dim; d += kThreads) {
      for (int32_t i = 0; i < p.count; ++i) {
        const ops::TokenPlace& from = p.from[i];
        const ops::TokenPlace& to = p.to[i];
        const int64_t dims = p.kv.head_dim;
        page_of<T>(p.kv.k, p, unit.block, to.page)[ops::k_offset(to.token, d, dims, kShare)] =
            page_of<T>(p.kv.k, p, unit.block,
                       from.page)[ops::k_offset(from.token, d, dims, kShare)];
        page_of<T>(p.kv.v, p, unit.block, to.page)[ops::v_offset(to.token, d, dims, kShare)] =
            page_of<T>(p.kv.v, p, unit.block,
                       from.page)[ops::v_offset(from.token, d, dims, kShare)];
      }
    }
  }

  EFFINFER_DEVICE static void move_scales(int head, const Params& p) {
    for (int32_t i = 0; i < p.count; ++i) {
      const auto at = [&](const ops::TokenPlace& place) {
        return (int64_t{place.page} * p.kv.num_kv_heads + head) * ops::kPageSize + place.token;
      };
      p.kv.k_scale[at(p.to[i])] = p.kv.k_scale[at(p.from[i])];
      p.kv.v_scale[at(p.to[i])] = p.kv.v_scale[at(p.from[i])];
    }
  }
};

}  // namespace effinfer::cuda
