// Rows of keys and values to the pages of a caller's cache (ops/page.h): a warp a row's head, which
// copies 16 bytes a lane where both sides allow it, and converts number by number where the dtypes
// differ.
#pragma once

#include <cstdint>

#include "cuda/bodies/any_float.h"
#include "cuda/unit.h"
#include "ops/page.h"

namespace effinfer::cuda {

struct AppendPagesParams {
  ops::AppendPagesProblem p;
  int num_warps = 0;
  int heads = 0;  // of keys, then of values
  bool vectored[2] = {};
  int element_bytes[2] = {};
};

struct AppendPagesKernel {
  static constexpr const char* kName = "append_pages";
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / kWarp;
  using Params = AppendPagesParams;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared&) {
    const ops::AppendPagesProblem& p = params.p;
    const int index = unit.block * kWarps + unit.warp;
    if (index >= params.num_warps) return;
    const int row = index / params.heads;
    const int head = index % params.heads;
    const int32_t sequence = unit.load(p.lists.batch_indices + row);
    if (sequence < 0) return;
    const int32_t position = unit.load(p.lists.positions + row);
    const auto page_size = static_cast<int32_t>(p.lists.page_size);
    const int32_t entry = unit.load(p.lists.kv_indptr + sequence) + position / page_size;
    const ops::PagePlace place = {unit.load(p.lists.kv_indices + entry), position % page_size};
    if (head < p.keys.heads) {
      store(unit, p.keys, row, head, place, params.vectored[0], params.element_bytes[0]);
    } else {
      const int own = head - static_cast<int>(p.keys.heads);
      store(unit, p.values, row, own, place, params.vectored[1], params.element_bytes[1]);
    }
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE static void store(Unit& unit, const ops::PagedRows& x, int64_t row, int64_t head,
                                    const ops::PagePlace& place, bool vectored, int bytes) {
    const uint8_t* from = x.rows + row * x.row_stride + head * x.row_head_stride;
    uint8_t* to =
        x.cache + place.page * x.page_stride + place.slot * x.slot_stride + head * x.head_stride;
    const auto dims = static_cast<int>(x.dims);
    if (x.rows_dtype != x.cache_dtype) {
      for (int d = unit.lane; d < dims; d += kWarp) {
        write_float(unit, x.cache_dtype, to, d, read_float(unit, x.rows_dtype, from, d));
      }
    } else if (vectored) {
      copy<Quad>(unit, from, to, dims * bytes / 16);
    } else if (bytes == 4) {
      copy<uint32_t>(unit, from, to, dims);
    } else if (bytes == 2) {
      copy<uint16_t>(unit, from, to, dims);
    } else {
      copy<uint8_t>(unit, from, to, dims);
    }
  }

  template <class T, class Unit>
  EFFINFER_DEVICE static void copy(Unit& unit, const uint8_t* from, uint8_t* to, int count) {
    const auto* in = reinterpret_cast<const T*>(from);
    auto* out = reinterpret_cast<T*>(to);
    for (int i = unit.lane; i < count; i += kWarp) out[i] = unit.load(in + i);
  }
};

}  // namespace effinfer::cuda
