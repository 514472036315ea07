// Selection and sampling over the rows of a batch. A row is the work of one member of the team: it
// takes 35 to 350 us at 128k tokens, in up to eight passes of which each needs the result of the
// one before, so that sharing it would cost as many barriers.
#pragma once

#include <cstdint>
#include <string>

#include "effinfer/dtype.h"

namespace effinfer::ops {

// A parameter of each output, or one of all.
template <class T>
struct PerRow {
  const T* values = nullptr;  // null: `value` for all
  T value{};
  constexpr T operator[](int64_t row) const { return values == nullptr ? value : values[row]; }
};

// Where the uniform numbers of an output come from: philox_uniform(seed, offset, row, draw). Seeds
// of their own make a row's numbers independent of its place: `row` is then 0.
struct RowRandom {
  PerRow<uint64_t> seed;
  PerRow<uint64_t> offset;
  double uniform(int64_t row, uint32_t draw) const;
};

// Why a row has no distribution.
enum class RowStatus : uint8_t { ok, nan, infinite, nothing, negative };

enum class RowSource : uint8_t { logits, weights };
enum class RowResult : uint8_t { sample, weights, logits, top };

// x -> [top-k] -> weights -> [top-p] -> [min-p] -> result, or with `joint` top-k after top-p.
struct RowSamplingProblem {
  RowSource source = RowSource::logits;
  RowResult result = RowResult::sample;
  const void* x = nullptr;   // [*, vocab]
  DType dtype = DType::f32;  // f32, f16 or bf16
  int64_t vocab = 0;
  int64_t rows = 0;                         // outputs
  const int64_t* indices = nullptr;         // [rows] into x; null: their own numbers
  const int32_t* narrow_indices = nullptr;  // the same, in place of `indices`
  PerRow<float> temperature{nullptr, 1.0f};
  PerRow<int64_t> top_k{nullptr, 0};      // 0: off
  const int32_t* narrow_top_k = nullptr;  // [rows], in place of `top_k`
  PerRow<float> top_p{nullptr, 1.0f};     // 1: off
  PerRow<float> min_p{nullptr, 0.0f};     // 0: off
  bool joint = false;
  RowRandom random;
  bool sorted = false;              // top: highest first, else in the order of ids
  int32_t* samples = nullptr;       // sample: [rows]
  int64_t* wide_samples = nullptr;  // the same, in place of `samples`
  // sample, on devices: SamplingScratch::of(vocab).bytes() (sampling_scratch.h) for each output, at
  // a multiple of 64, or null: all of a row is the work of one block.
  void* scratch = nullptr;
  // sample, on devices, which add in another order than the CPU: [rows], or null. 1 where a sum is
  // so near a bound that the CPU may draw another token, else 0: that it draws this one.
  uint8_t* undecided = nullptr;
  void* out = nullptr;  // weights, which sum to 1, and logits: [rows, vocab]; top: [rows, k]
  DType out_dtype = DType::f32;
  int64_t* ids = nullptr;  // top: [rows, k]
  // [rows]; the outputs of a row that is not ok are 0. Devices take null.
  RowStatus* statuses = nullptr;
  uint8_t* valid = nullptr;  // on devices: [rows], or null. 1 where a row is ok, else 0

  // The row of x that an output is of.
  constexpr int64_t source_of(int64_t row) const {
    if (narrow_indices != nullptr) return narrow_indices[row];
    return indices == nullptr ? row : indices[row];
  }
  constexpr int64_t top_k_of(int64_t row) const {
    return narrow_top_k != nullptr ? narrow_top_k[row] : top_k[row];
  }
  constexpr void set_sample(int64_t row, int32_t token) const {
    if (wide_samples != nullptr) {
      wide_samples[row] = token;
    } else {
      samples[row] = token;
    }
  }
};

// Speculative sampling of a chain of drafts (Leviathan et al., arXiv:2211.17192, algorithm 1; Chen
// et al., arXiv:2302.01318, algorithm 2).
struct ChainSpeculationProblem {
  const float* draft_probs = nullptr;   // [rows, drafts, vocab]
  const int32_t* draft_ids = nullptr;   // [rows, drafts], each in [0, vocab)
  const float* target_probs = nullptr;  // [rows, drafts + 1, vocab]
  int64_t rows = 0;
  int64_t drafts = 0;
  int64_t vocab = 0;
  RowRandom random;
  int32_t* tokens = nullptr;    // [rows, drafts + 1], -1 after the last
  int32_t* accepted = nullptr;  // [rows]: added to it, the drafts that would be accepted each alone
  int32_t* emitted = nullptr;   // [rows]: added to it, the drafts before the first rejection
  RowStatus* statuses = nullptr;  // [rows]; devices take null
};

struct TokenBitmaskProblem {
  void* logits = nullptr;  // [*, vocab], changed in place
  DType dtype = DType::f32;
  const int32_t* bitmask = nullptr;  // [*, ceil(vocab / 32)]
  int64_t vocab = 0;
  int64_t rows = 0;
  const int64_t* indices = nullptr;         // [rows] of both; null: their own numbers
  const int32_t* narrow_indices = nullptr;  // the same, in place of `indices`

  constexpr int64_t row_of(int64_t output) const {
    if (narrow_indices != nullptr) return narrow_indices[output];
    return indices == nullptr ? output : indices[output];
  }
};

std::string describe(const RowSamplingProblem& problem);
std::string describe(const ChainSpeculationProblem& problem);
std::string describe(const TokenBitmaskProblem& problem);
const char* rejects(const RowSamplingProblem& problem);
const char* rejects(const TokenBitmaskProblem& problem);

}  // namespace effinfer::ops
