// The parameters of norms, and their weights as a thread has them beside its chunks of a row.
#pragma once

#include "cuda/bodies/operand_rows.h"
#include "cuda/bodies/row_chunks.h"

namespace effinfer::cuda {

struct NormParams {
  ops::ConstRows x;
  ops::ConstRows add_to;
  ops::Rows sum_out;
  ops::Rows out;
  OperandRows operand;
  const void* weight = nullptr;
  const void* bias = nullptr;
  int num_vectors = 0;  // rows x groups
  int groups = 1;
  int cols = 0;
  int row_threads = 0;
  float per_col = 0.0f;  // 1 / cols
  float weight_offset = 0.0f;
  float eps = 0.0f;
  bool weight_is_f32 = true;
  bool weight_is_fixed = false;  // no kernel writes it
  bool vectored = false;         // all of the above
  bool is_kept = false;          // a row, by its threads
};

// Weights of a thread's chunks, of either type: of all that are kept, or of one that is not. They
// stay as they lie in memory, so that nobody waits for them before the first one is used.
template <class T, class Chunks>
struct NormWeights {
  static constexpr int kNumbers = Chunks::kNumbers;

  const void* weights;
  bool is_f32;
  Quad raw[Chunks::kPlaces * kNumbers / 4];

  EFFINFER_DEVICE NormWeights(const NormParams& p, const void* from)
      : weights(from), is_f32(sizeof(T) == sizeof(float) || p.weight_is_f32) {}

  // Those that are kept, by loads that stay where the program has them, or those from number
  // `first` on.
  template <class Unit>
  EFFINFER_DEVICE void ask(Unit& unit, const Chunks& chunks, int first = 0) {
    if (is_f32) return ask_for<float>(unit, chunks, first);
    ask_for<T>(unit, chunks, first);
  }
  // For another row: else they would be floats for all of them, in twice the registers.
  template <class Unit>
  EFFINFER_DEVICE void keep(Unit& unit) {
    EFFINFER_UNROLL
    for (Quad& quad : raw) {
      EFFINFER_UNROLL
      for (uint32_t& word : quad.words) word = unit.kept(word);
    }
  }
  // Of a chunk.
  template <class Unit>
  EFFINFER_DEVICE void take(Unit& unit, int chunk, float (&out)[kNumbers]) const {
    if (!is_f32) return decode<T>(unit, raw[chunk], out);
    EFFINFER_UNROLL
    for (int e = 0; e < kNumbers; ++e) {
      out[e] = float_of(raw[(chunk * kNumbers + e) / 4].words[e % 4]);
    }
  }

 private:
  template <class W, class Unit>
  EFFINFER_DEVICE void ask_for(Unit& unit, const Chunks& chunks, int first) {
    const auto* from = static_cast<const W*>(weights);
    constexpr int kParts = kNumbers / kChunk<W>;
    EFFINFER_UNROLL
    for (int i = 0; i < Chunks::kPlaces * kParts; ++i) {
      const int begin =
          (Chunks::kKeeps ? chunks.first(i / kParts) : first) + i % kParts * kChunk<W>;
      raw[i] = Quad{};
      if (!Chunks::kKeeps) {
        raw[i] = load_chunk(from, begin, chunks.cols, chunks.vectored);
      } else if (begin < chunks.cols) {
        raw[i] = unit.load_written(reinterpret_cast<const Quad*>(from + begin));
      }
    }
  }
};

}  // namespace effinfer::cuda
