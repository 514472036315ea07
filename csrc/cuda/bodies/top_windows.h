// Windows of rows for top-k, and where what it chose lies (ops/top_windows.h): a thread a number.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/any_float.h"
#include "cuda/unit.h"
#include "ops/top_windows.h"

namespace effinfer::cuda {

struct WindowRowsKernel {
  static constexpr const char* kName = "window_rows";
  static constexpr int kThreads = 256;
  using Params = ops::WindowRowsProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int64_t width = p.windows.width;
    const int64_t step = int64_t{unit.num_blocks} * kThreads;
    for (int64_t i = int64_t{unit.block} * kThreads + unit.thread; i < p.rows * width; i += step) {
      const int64_t row = i / width;
      const int64_t place = i % width;
      const int64_t length = p.windows.length(row);
      const int64_t from = p.windows.mirrored ? length - 1 - place : place;
      p.out[i] = place < length
                     ? read_float(unit, p.dtype, p.x, row * p.stride + p.windows.start(row) + from)
                     : -INFINITY;
    }
  }
};

struct PlaceChosenKernel {
  static constexpr const char* kName = "place_chosen";
  static constexpr int kThreads = 128;
  using Params = ops::PlaceChosenProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int64_t i = int64_t{unit.block} * kThreads + unit.thread;
    if (i >= p.rows * p.k) return;
    const int64_t row = i / p.k;
    const int64_t place = i % p.k;
    // What was chosen of the window stands before what was chosen behind it.
    const int64_t length = p.windows.length(row);
    const int64_t count = length < p.chosen ? length : p.chosen;
    int64_t id = -1;
    if (place < count) {
      const int64_t* ids = p.ids + row * p.chosen;
      id = p.windows.mirrored ? length - 1 - unit.load(ids + count - 1 - place)
                              : unit.load(ids + place);
    }
    if (p.raw != nullptr) p.raw[i] = static_cast<int32_t>(id);
    p.out[i] = id < 0 ? -1 : told(unit, p, row, static_cast<int32_t>(id));
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE static int32_t told(Unit& unit, const Params& p, int64_t row, int32_t id) {
    if (p.table == nullptr) return p.offsets == nullptr ? id : id + unit.load(p.offsets + row);
    const int64_t batch = p.row_to_batch == nullptr ? row : unit.load(p.row_to_batch + row);
    const int64_t first = p.first == nullptr ? 0 : unit.load(p.first + row);
    const int32_t page = unit.load(p.table + batch * p.table_cols + first + id / p.page_size);
    return page * p.page_size + id % p.page_size;
  }
};

struct UnmirrorKernel {
  static constexpr const char* kName = "unmirror_chosen";
  static constexpr int kThreads = 128;
  using Params = ops::UnmirrorProblem;
  struct Shared {};

  // A thread has a place and, where the order is turned round, the one as far from the end.
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int64_t places = p.sorted ? p.k : (p.k + 1) / 2;
    const int64_t i = int64_t{unit.block} * kThreads + unit.thread;
    if (i >= p.rows * places) return;
    const int64_t row = i / places;
    const int64_t place = i % places;
    const int64_t other = p.sorted ? place : p.k - 1 - place;
    int64_t* ids = p.ids + row * p.k;
    const int64_t first = p.width - 1 - ids[other];
    const int64_t second = p.width - 1 - ids[place];
    put(p, row, place, first);
    put(p, row, other, second);
  }

 private:
  EFFINFER_DEVICE static void put(const Params& p, int64_t row, int64_t place, int64_t id) {
    const int64_t to = row * p.k + place;
    const int64_t from = row * p.width + id;
    p.ids[to] = id;
    if (p.element_bytes == 4) {
      static_cast<uint32_t*>(p.values)[to] = static_cast<const uint32_t*>(p.x)[from];
    } else {
      static_cast<uint16_t*>(p.values)[to] = static_cast<const uint16_t*>(p.x)[from];
    }
  }
};

}  // namespace effinfer::cuda
