// Rows picked by index, of a table of numbers or of packed weights.
#pragma once

#include "cuda/bodies/packed_value.h"
#include "cuda/bodies/row_chunks.h"

namespace effinfer::cuda {

struct PickRowsParams {
  const void* table = nullptr;
  PackedTable packed;
  const int32_t* ids = nullptr;
  float* out = nullptr;
  int cols = 0;
  int parts = 1;  // blocks of a row
  float scale = 1.0f;
  bool vectored = false;
};

// The part of the grid that a thread of a kernel of `kThreads` has: numbers `first`.. of a row.
struct PickedPart {
  int row;
  int first;
};
template <int kThreads, int kNumbers, class Unit>
EFFINFER_DEVICE PickedPart picked_part(Unit& unit, const PickRowsParams& p) {
  return {unit.block / p.parts, (unit.block % p.parts * kThreads + unit.thread) * kNumbers};
}

template <int kNumbers, class Unit>
EFFINFER_DEVICE void store_picked(Unit& unit, const PickRowsParams& p, PickedPart part,
                                  float (&numbers)[kNumbers]) {
  if (p.scale != 1.0f) {
    EFFINFER_UNROLL
    for (int e = 0; e < kNumbers; ++e) numbers[e] *= p.scale;
  }
  float* out = p.out + int64_t{part.row} * p.cols;
  EFFINFER_UNROLL
  for (int i = 0; i < kNumbers; i += 4) {
    const float four[4] = {numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]};
    store_chunk(out, part.first + i, p.cols, p.vectored, encode<float>(unit, four));
  }
}

// Of f32, f16 or bf16: a thread 16 bytes of the table.
template <class T>
struct PickRowsKernel {
  static constexpr const char* kName = "pick_rows";
  static constexpr int kThreads = 128;
  static constexpr int kNumbers = kChunk<T>;
  using Params = PickRowsParams;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const PickedPart part = picked_part<kThreads, kNumbers>(unit, p);
    if (part.first >= p.cols) return;
    const T* row = static_cast<const T*>(p.table) + int64_t{unit.load(p.ids + part.row)} * p.cols;
    float numbers[kNumbers];
    decode<T>(unit, load_chunk(row, part.first, p.cols, p.vectored), numbers);
    store_picked(unit, p, part, numbers);
  }
};

// Of packed weights: a thread a dword of quants. A row has four bytes in each line, so eight rows'
// worth of memory are read; a step has too few rows for that to matter.
struct PickPackedKernel {
  static constexpr const char* kName = "pick_packed";
  static constexpr int kThreads = 128;
  static constexpr int kNumbers = kDwordNumbers;
  using Params = PickRowsParams;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const PickedPart part = picked_part<kThreads, kNumbers>(unit, p);
    if (part.first >= p.cols) return;
    float numbers[kNumbers];
    packed_values(unit, p.packed, unit.load(p.ids + part.row), part.first, numbers);
    store_picked(unit, p, part, numbers);
  }
};

}  // namespace effinfer::cuda
