// Rows of floats of one type as those of another, times a factor (ops/convert_rows.h): a thread
// eight numbers of a row, with one load and one store of up to 16 bytes, of float32 two, where rows
// allow it.
#pragma once

#include <cstdint>

#include "cuda/bodies/any_float.h"
#include "cuda/bodies/row_chunks.h"
#include "cuda/unit.h"
#include "ops/convert_rows.h"

namespace effinfer::cuda {

struct ConvertParams {
  ops::ConvertRowsProblem p;
  int64_t chunks = 0;  // of a vector, each of kNumbers
  bool read_vectored = false;
  bool write_vectored = false;
};

struct ConvertKernel {
  static constexpr const char* kName = "convert_rows";
  static constexpr int kThreads = 256;
  static constexpr int kNumbers = 8;
  using Params = ConvertParams;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared&) {
    const ops::ConvertRowsProblem& p = params.p;
    const int64_t size = p.rows * p.groups * params.chunks;
    const int64_t step = int64_t{unit.num_blocks} * kThreads;
    const float factor = p.divisor == nullptr ? p.factor : p.factor / unit.load(p.divisor);
    for (int64_t i = int64_t{unit.block} * kThreads + unit.thread; i < size; i += step) {
      const int64_t vector = i / params.chunks;
      const int64_t first = i % params.chunks * kNumbers;
      const int64_t row = vector / p.groups;
      const int64_t group = vector % p.groups;
      const auto count = static_cast<int>(p.cols - first < kNumbers ? p.cols - first : kNumbers);
      float values[kNumbers];
      const int64_t from = row * p.x.stride + group * p.x.group_stride + first;
      load(unit, p, params.read_vectored, from, count, values);
      EFFINFER_UNROLL
      for (int e = 0; e < kNumbers; ++e) {
        values[e] = saturated(p.to, unit.mul(values[e], factor));
      }
      const int64_t to = row * p.out.stride + group * p.out.group_stride + first;
      store(unit, p, params.write_vectored, to, count, values);
    }
  }

 private:
  // The memory may be that of the result.
  template <class Unit>
  EFFINFER_DEVICE static void load(Unit& unit, const ops::ConvertRowsProblem& p, bool vectored,
                                   int64_t at, int count, float (&out)[kNumbers]) {
    const auto* bytes = static_cast<const uint8_t*>(p.x.data);
    if (p.from == DType::f32) {
      const float* from = reinterpret_cast<const float*>(bytes) + at;
      EFFINFER_UNROLL
      for (int half = 0; half < 2; ++half) {
        Quad quad = {};
        if (vectored) quad = reinterpret_cast<const Quad*>(from)[half];
        EFFINFER_UNROLL
        for (int e = 0; e < 4; ++e) {
          const int i = half * 4 + e;
          out[i] = vectored ? float_of(quad.words[e]) : i < count ? from[i] : 0.0f;
        }
      }
      return;
    }
    const bool narrow = p.from == DType::f8_e4m3 || p.from == DType::f8_e5m2;
    uint32_t bits[kNumbers] = {};
    if (vectored && narrow) {
      const Pair pair = *reinterpret_cast<const Pair*>(bytes + at);
      EFFINFER_UNROLL
      for (int i = 0; i < kNumbers; ++i) bits[i] = pair.words[i / 4] >> 8 * (i % 4) & 0xff;
    } else if (vectored) {
      const Quad quad = *reinterpret_cast<const Quad*>(bytes + at * 2);
      EFFINFER_UNROLL
      for (int i = 0; i < kNumbers; ++i) bits[i] = quad.words[i / 2] >> 16 * (i % 2) & 0xffff;
    } else {
      EFFINFER_UNROLL
      for (int i = 0; i < kNumbers; ++i) {
        if (i >= count) continue;
        bits[i] = narrow ? bytes[at + i] : reinterpret_cast<const uint16_t*>(bytes)[at + i];
      }
    }
    EFFINFER_UNROLL
    for (int i = 0; i < kNumbers; ++i) out[i] = float_of_bits(unit, p.from, bits[i]);
  }

  template <class Unit>
  EFFINFER_DEVICE static void store(Unit& unit, const ops::ConvertRowsProblem& p, bool vectored,
                                    int64_t at, int count, const float (&values)[kNumbers]) {
    auto* bytes = static_cast<uint8_t*>(p.out.data);
    if (!vectored) {
      EFFINFER_UNROLL
      for (int i = 0; i < kNumbers; ++i) {
        if (i < count) write_float(unit, p.to, bytes, at + i, values[i]);
      }
      return;
    }
    Quad quad = {};
    if (p.to == DType::f32) {
      Quad* to = reinterpret_cast<Quad*>(bytes + at * 4);
      EFFINFER_UNROLL
      for (int half = 0; half < 2; ++half) {
        EFFINFER_UNROLL
        for (int e = 0; e < 4; ++e) quad.words[e] = bits_of(values[half * 4 + e]);
        to[half] = quad;
      }
      return;
    }
    const bool narrow = p.to == DType::f8_e4m3 || p.to == DType::f8_e5m2;
    EFFINFER_UNROLL
    for (int i = 0; i < kNumbers; ++i) {
      const uint32_t bits = bits_of_float(unit, p.to, values[i]);
      if (narrow) {
        quad.words[i / 4] |= bits << 8 * (i % 4);
      } else {
        quad.words[i / 2] |= bits << 16 * (i % 2);
      }
    }
    if (narrow) {
      *reinterpret_cast<Pair*>(bytes + at) = {{quad.words[0], quad.words[1]}};
    } else {
      *reinterpret_cast<Quad*>(bytes + at * 2) = quad;
    }
  }
};

}  // namespace effinfer::cuda
