// Rows of float32, float16 or bfloat16 numbers in chunks of 16 bytes, in which threads share them.
//
// Which chunk a number is in does not depend on where the row lies, so that neither does the order
// in which a reduction adds: rows that are `vectored` (every chunk starts at a multiple of 16 bytes
// and the last one is whole) go as 16-byte loads and stores, others number by number.
#pragma once

#include <cstdint>

#include "core/float16.h"
#include "cuda/unit.h"
#include "effinfer/dtype.h"
#include "ops/rows.h"

namespace effinfer::cuda {

// Numbers of a chunk.
template <class T>
inline constexpr int kChunk = 16 / static_cast<int>(sizeof(T));

struct [[gnu::may_alias]] alignas(8) Pair {
  uint32_t words[2];
};

// visit.operator()<T>() with what rows of `dtype` are made of.
template <class Visit>
void with_elements(DType dtype, Visit&& visit) {
  if (dtype == DType::f16) return visit.template operator()<F16>();
  if (dtype == DType::bf16) return visit.template operator()<Bf16>();
  return visit.template operator()<float>();
}

// Of the host: whether vectors of `length` numbers can be vectored.
inline bool vectored(const void* data, int64_t length, int64_t element) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && length * element % 16 == 0;
}
template <class Void>
bool vectored(const ops::RowsOf<Void>& rows, int64_t length, int64_t element) {
  return vectored(rows.data, length, element) && rows.stride * element % 16 == 0 &&
         rows.group_stride * element % 16 == 0;
}

template <class Unit>
EFFINFER_DEVICE float widen(Unit&, float x) {
  return x;
}
template <class Unit>
EFFINFER_DEVICE float widen(Unit& unit, F16 x) {
  return unit.from_f16(x.bits);
}
template <class Unit>
EFFINFER_DEVICE float widen(Unit&, Bf16 x) {
  return float_of(uint32_t{x.bits} << 16);
}

// The words of a chunk and its numbers.
template <class T, class Unit>
EFFINFER_DEVICE void decode(Unit& unit, const Quad& quad, float (&out)[kChunk<T>]) {
  EFFINFER_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      out[i] = float_of(quad.words[i]);
    } else {
      out[2 * i] = widen(unit, T{static_cast<uint16_t>(quad.words[i])});
      out[2 * i + 1] = widen(unit, T{static_cast<uint16_t>(quad.words[i] >> 16)});
    }
  }
}
template <class T>
struct Encoder;
template <>
struct Encoder<F16> {
  template <class Unit>
  EFFINFER_DEVICE static uint32_t pair(Unit& unit, float low, float high) {
    return unit.f16x2(low, high);
  }
};
template <>
struct Encoder<Bf16> {
  template <class Unit>
  EFFINFER_DEVICE static uint32_t pair(Unit& unit, float low, float high) {
    return unit.bf16x2(low, high);
  }
};
template <class T, class Unit>
EFFINFER_DEVICE Quad encode(Unit& unit, const float (&values)[kChunk<T>]) {
  Quad quad;
  EFFINFER_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      quad.words[i] = bits_of(values[i]);
    } else {
      quad.words[i] = Encoder<T>::pair(unit, values[2 * i], values[2 * i + 1]);
    }
  }
  return quad;
}

// The chunk from number `first` on of a row of `cols`, zeros behind its end. The memory may be
// written by the same thread of the same kernel, later.
template <class T>
EFFINFER_DEVICE Quad load_whole(const T* row, int first, int cols) {
  return first < cols ? *reinterpret_cast<const Quad*>(row + first) : Quad{};
}
template <class T>
EFFINFER_DEVICE Quad load_parts(const T* row, int first, int cols) {
  Quad quad{};
  EFFINFER_UNROLL
  for (int e = 0; e < kChunk<T>; ++e) {
    if (first + e >= cols) continue;
    if constexpr (sizeof(T) == 4) {
      quad.words[e] = bits_of(row[first + e]);
    } else {
      quad.words[e / 2] |= uint32_t{row[first + e].bits} << 16 * (e % 2);
    }
  }
  return quad;
}
template <class T>
EFFINFER_DEVICE Quad load_chunk(const T* row, int first, int cols, bool vectored) {
  return vectored ? load_whole(row, first, cols) : load_parts(row, first, cols);
}

// What load_chunk() reads back; nothing behind the row's end.
template <class T>
EFFINFER_DEVICE void store_chunk(T* row, int first, int cols, bool vectored, const Quad& quad) {
  if (vectored) {
    if (first < cols) *reinterpret_cast<Quad*>(row + first) = quad;
    return;
  }
  EFFINFER_UNROLL
  for (int e = 0; e < kChunk<T>; ++e) {
    if (first + e >= cols) continue;
    if constexpr (sizeof(T) == 4) {
      row[first + e] = float_of(quad.words[e]);
    } else {
      row[first + e] = T{static_cast<uint16_t>(quad.words[e / 2] >> 16 * (e % 2))};
    }
  }
}

// `kCount` floats from number `first` on of an array that no thread writes, zeros from `length` on.
// Vectored ones need first * 4 and kCount * 4 to be multiples of 16.
template <int kCount, class Unit>
EFFINFER_DEVICE void load_floats(Unit& unit, const float* data, int first, int length,
                                 bool vectored, float (&out)[kCount]) {
  if (kCount % 4 == 0 && vectored) {
    EFFINFER_UNROLL
    for (int i = 0; i < kCount; i += 4) {
      const Quad quad =
          first + i < length ? unit.load(reinterpret_cast<const Quad*>(data + first + i)) : Quad{};
      EFFINFER_UNROLL
      for (int e = 0; e < 4 && i + e < kCount; ++e) out[i + e] = float_of(quad.words[e]);
    }
    return;
  }
  EFFINFER_UNROLL
  for (int e = 0; e < kCount; ++e) out[e] = first + e < length ? unit.load(data + first + e) : 0.0f;
}

}  // namespace effinfer::cuda
