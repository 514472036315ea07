// RMS norm and layer norm. A row of up to kWarpCols numbers is a warp's, longer ones a block's:
// the order of sums is a matter of the row's length and type alone.
//
// Blocks stay for several rows where there are many, and so do the weights in their registers. Of
// 16-bit rows the next one is on its way while one is summed up and stored. Where there are few
// what takes time is a chain: a row's loads, its sum, its stores. So all loads of a row are under
// way at once, and weights that no kernel writes are asked for before the kernel before has ended.
#pragma once

#include <cmath>

#include "cuda/bodies/kept_chunks.h"
#include "cuda/bodies/norm_weights.h"
#include "cuda/bodies/row_sum.h"

namespace effinfer::cuda {

inline constexpr int kWarpCols = 512;    // 16 numbers a lane
inline constexpr int kNormNumbers = 16;  // of a row that a thread keeps in registers

// Of a row that has a block: the fewest that keep it, or the most. Those have 64 registers each, or
// 80 where they ask ahead.
template <class T>
inline constexpr int kNormThreads = sizeof(T) == 4 ? 1024 : 768;
template <class T>
constexpr int norm_threads(int cols) {
  constexpr int kFew = kFewRowWarps * kWarp;
  return cols <= kFew * kNormNumbers ? kFew : kNormThreads<T>;
}

// What both norms have in common: a row is a warp's (kMostWarps is 1) or a block's.
template <class T, int kMostWarps, bool kMayAdd>
struct NormRows {
  static constexpr bool kIsWarps = kMostWarps == 1;
  static constexpr int kThreads = kIsWarps ? 256 : kMostWarps * kWarp;
  static constexpr int kRowsABlock = kIsWarps ? kThreads / kWarp : 1;
  static constexpr bool kWaitsItself = true;
  static constexpr int kNumbers = kChunk<T>;
  // Blocks of 256 threads that a multiprocessor holds: 64 or 80 registers.
  static constexpr int kResident = sizeof(T) == 4 ? 4 : 3;
  using Params = NormParams;
  struct Shared {
    RowPartials<kMostWarps> partials[2];  // by turns
  };
  using KeptChunks = RowChunks<T, kMostWarps, kNormNumbers / kNumbers>;
  using OtherChunks = RowChunks<T, kMostWarps, 0>;

  // How many bytes behind the first row's the results of a row lie. Of pointers the compiler would
  // not know to which memory they are.
  struct Place {
    int64_t sum;
    int64_t out;  // or the record of an operand
  };
  EFFINFER_DEVICE static T* row_at(const ops::Rows& rows, int64_t bytes) {
    return reinterpret_cast<T*>(static_cast<uint8_t*>(rows.data) + bytes);
  }

  // prepare(chunks) before what other kernels wrote may be read, body(chunks, place, turn) for each
  // row of the thread, whose turns count from 0.
  template <class Chunks, class Unit, class Prepare, class Body>
  EFFINFER_DEVICE static void for_rows(Unit& unit, const Params& p, Prepare&& prepare,
                                       Body&& body) {
    // The next row's loads are under way while one is at work; those of float32 would need as many
    // registers again, and are twice as many bytes.
    constexpr bool kAsksAhead = sizeof(T) == 2 && Chunks::kKeeps;
    const ops::ConstRows none = {};
    Chunks chunks = {p.x,
                     kMayAdd ? p.add_to : none,
                     p.cols,
                     kIsWarps ? unit.lane : unit.thread,
                     kIsWarps ? kWarp : p.row_threads,
                     Chunks::kKeeps || p.vectored};
    if (!p.weight_is_fixed) unit.wait_for_inputs();
    prepare(chunks);
    unit.wait_for_inputs();
    int next = unit.block * kRowsABlock + (kIsWarps ? unit.warp : 0);
    Place place = {};
    EFFINFER_NO_UNROLL
    for (int turn = -1;; ++turn) {
      // Else all addresses would be found before all rows, and take registers.
      chunks.thread = unit.kept(chunks.thread);
      const bool has_next = next < p.num_vectors;
      const int row = p.groups == 1 ? next : next / p.groups;
      const int group = next - row * p.groups;
      typename Chunks::Asked asked;
      if (kAsksAhead && has_next) asked = chunks.ask(row, group);
      if (turn >= 0) body(chunks, place, turn);
      if (!has_next) return;  // whole warps, which meet no other
      if (!kAsksAhead) asked = chunks.ask(row, group);
      place = place_of(p, row, group);
      chunks.take(unit, asked);
      chunks.row = row;
      chunks.group = group;
      next += unit.num_blocks * kRowsABlock;
    }
  }

 private:
  EFFINFER_DEVICE static Place place_of(const Params& p, int row, int group) {
    const int64_t sum = kMayAdd ? bytes_of(p.sum_out, row, group) : 0;
    if (kMayAdd && p.operand.data != nullptr) return {sum, row * p.operand.row_bytes};
    return {sum, bytes_of(p.out, row, group)};
  }
  EFFINFER_DEVICE static int64_t bytes_of(const ops::Rows& rows, int row, int group) {
    return (row * rows.stride + group * rows.group_stride) * static_cast<int64_t>(sizeof(T));
  }
};

template <class T, int kMostWarps>
struct RmsNormKernel : NormRows<T, kMostWarps, true> {
  static constexpr const char* kName = "rms_norm";
  using Base = NormRows<T, kMostWarps, true>;
  using typename Base::Params;
  using typename Base::Place;
  using typename Base::Shared;
  static constexpr int kNumbers = Base::kNumbers;

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    if (p.is_kept) return run_rows<typename Base::KeptChunks>(unit, p, shared);
    run_rows<typename Base::OtherChunks>(unit, p, shared);
  }

 private:
  template <class Chunks, class Unit>
  EFFINFER_DEVICE static void run_rows(Unit& unit, const Params& p, Shared& shared) {
    NormWeights<T, Chunks> weights(p, p.weight);
    const auto prepare = [&](const Chunks& chunks) {
      if (Chunks::kKeeps && p.weight != nullptr) weights.ask(unit, chunks);
    };
    Base::template for_rows<Chunks>(
        unit, p, prepare, [&](Chunks& chunks, const Place& place, int turn) {
          const auto store_sum = [&](int first, const float (&x)[kNumbers]) {
            if (p.sum_out.data == nullptr) return;
            store_chunk(Base::row_at(p.sum_out, place.sum), first, p.cols, chunks.vectored,
                        encode<T>(unit, x));
          };
          // Where they are not kept they may lie where x does, which is then read once more.
          if (Chunks::kKeeps) {
            chunks.for_each(unit, p.cols, [&](int first, const float (&x)[kNumbers], int) {
              store_sum(first, x);
            });
          }
          const float scale = rms_scale(unit, chunks, p.per_col, p.eps, shared.partials[turn % 2]);
          const bool to_operand = p.operand.data != nullptr;
          const int end = to_operand ? p.operand.padded : p.cols;
          chunks.for_each(unit, end, [&](int first, const float (&x)[kNumbers], int chunk) {
            if (!Chunks::kKeeps) store_sum(first, x);
            float y[kNumbers];
            EFFINFER_UNROLL
            for (int e = 0; e < kNumbers; ++e) y[e] = x[e] * scale;
            if (p.weight != nullptr) {
              if (!Chunks::kKeeps) weights.ask(unit, chunks, first);
              float w[kNumbers];
              weights.take(unit, chunk, w);
              EFFINFER_UNROLL
              for (int e = 0; e < kNumbers; ++e) y[e] *= w[e] + p.weight_offset;
            }
            if (to_operand) {
              auto* record = p.operand.data + place.out;
              p.operand.template store<Chunks::kKeeps>(unit, record, first, y);
            } else {
              store_chunk(Base::row_at(p.out, place.out), first, p.cols, chunks.vectored,
                          encode<T>(unit, y));
            }
          });
        });
  }
};

template <class T, int kMostWarps>
struct LayerNormKernel : NormRows<T, kMostWarps, false> {
  static constexpr const char* kName = "layer_norm";
  using Base = NormRows<T, kMostWarps, false>;
  using typename Base::Params;
  using typename Base::Place;
  using typename Base::Shared;
  static constexpr int kNumbers = Base::kNumbers;

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    if (p.is_kept) return run_rows<typename Base::KeptChunks>(unit, p, shared);
    run_rows<typename Base::OtherChunks>(unit, p, shared);
  }

 private:
  template <class Chunks, class Unit>
  EFFINFER_DEVICE static void run_rows(Unit& unit, const Params& p, Shared& shared) {
    NormWeights<T, Chunks> weights(p, p.weight);
    NormWeights<T, Chunks> bias(p, p.bias);
    const auto load = [&](const Chunks& chunks, int first) {
      weights.ask(unit, chunks, first);
      bias.ask(unit, chunks, first);
    };
    const auto prepare = [&](const Chunks& chunks) {
      if (Chunks::kKeeps) load(chunks, 0);
    };
    Base::template for_rows<Chunks>(unit, p, prepare, [&](Chunks& chunks, const Place& place, int) {
      if (Chunks::kKeeps) {
        weights.keep(unit);
        bias.keep(unit);
      }
      const int warps = chunks.threads / kWarp;
      float total = 0.0f;
      chunks.for_each(unit, p.cols, [&](int, const float (&x)[kNumbers], int) {
        EFFINFER_UNROLL
        for (int e = 0; e < kNumbers; ++e) total += x[e];
      });
      const float mean = unit.mul(row_sum(unit, total, warps, shared.partials[0]), p.per_col);
      float squares = 0.0f;
      chunks.for_each(unit, p.cols, [&](int first, const float (&x)[kNumbers], int) {
        EFFINFER_UNROLL
        for (int e = 0; e < kNumbers; ++e) {
          // Chunks that are kept are whole.
          const float v = Chunks::kKeeps || first + e < p.cols ? x[e] - mean : 0.0f;
          squares = fmaf(v, v, squares);
        }
      });
      squares = row_sum(unit, squares, warps, shared.partials[1]);
      const float scale = unit.reciprocal(sqrtf(fmaf(squares, p.per_col, p.eps)));
      chunks.for_each(unit, p.cols, [&](int first, const float (&x)[kNumbers], int chunk) {
        if (!Chunks::kKeeps) load(chunks, first);
        float y[kNumbers];
        float more[kNumbers];
        weights.take(unit, chunk, y);
        EFFINFER_UNROLL
        for (int e = 0; e < kNumbers; ++e) y[e] = unit.mul(y[e], (x[e] - mean) * scale);
        bias.take(unit, chunk, more);
        EFFINFER_UNROLL
        for (int e = 0; e < kNumbers; ++e) y[e] += more[e];
        store_chunk(Base::row_at(p.out, place.out), first, p.cols, chunks.vectored,
                    encode<T>(unit, y));
      });
    });
  }
};

}  // namespace effinfer::cuda
