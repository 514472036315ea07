// What attention multiplies at a time, and the way to it: the tokens that a task visits, in runs.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/vectors/attention_math.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// Tokens of a unit that follow each other in their sequence.
struct TokenRun {
  int32_t slot;  // in the unit
  int32_t count;
  int32_t position;  // of the first one, in the sequence
  int64_t mask_bit;  // of the list's first row and the first token
};

// Up to 64 tokens that are multiplied together.
struct KeyUnit {
  int32_t count;  // the slots behind them are empty
  int32_t num_runs;
  uint64_t visited;  // of the slots
  TokenRun runs[kUnit];

  void clear() {
    count = num_runs = 0;
    visited = 0;
  }
  void add(const TokenRun& run) {
    runs[num_runs++] = run;
    count = run.slot + run.count;
    visited |= token_bits(run.slot, count);
  }
};

// The bits of a mask, at most 64, from bit `first` on.
inline uint64_t mask_bits(const AttentionTask& task, int64_t first, int64_t count) {
  const int64_t begin = first / 8;
  const int64_t last = (first + count + 7) / 8;
  const int64_t end = last < task.mask_bytes ? last : task.mask_bytes;
  const int64_t shift = first % 8;
  uint64_t bits = 0;
  for (int64_t i = begin; i < end && i < begin + 8; ++i) {
    bits |= uint64_t{task.mask[i]} << (i - begin) * 8;
  }
  bits >>= shift;
  if (end - begin > 8) bits |= uint64_t{task.mask[begin + 8]} << (64 - shift);
  return bits & token_bits(0, count);
}

// Bits moved up, or down, by any number.
inline uint64_t shifted(uint64_t bits, int64_t up) {
  if (up <= -kUnit || up >= kUnit) return 0;
  return up >= 0 ? bits << up : bits >> -up;
}

// Which of the 64 tokens from `start` on a row at a position sees: those that are not after it and
// not behind its window, or are sinks.
inline uint64_t seen_on_chain(const AttentionTask& task, int64_t position, int64_t start) {
  const int64_t own = position - start;
  const uint64_t past = task.causal ? token_bits(0, own + 1) : ~uint64_t{0};
  if (task.window_left < 0) return past;
  return past &
         (token_bits(own - task.window_left, kUnit) | token_bits(0, task.sink_tokens - start));
}

// Bits without the lowest `count` that are set.
inline uint64_t without_lowest(uint64_t bits, int64_t count) {
  for (int64_t i = 0; i < count; ++i) bits &= bits - 1;
  return bits;
}

// Which of the 64 tokens from `start` on a row sees, mask aside: as on a chain, but of a tree's
// tokens its ancestors, whose positions are their depths.
inline uint64_t seen_from(const AttentionTask& task, int64_t row, int64_t start) {
  if (task.ancestors == nullptr) return seen_on_chain(task, task.position + row, start);
  const int64_t shift = task.tree_start - start;  // of the tree's first token
  const uint64_t path = task.ancestors[row];
  if (task.window_left < 0) return token_bits(0, shift) | shifted(path, shift);
  const int64_t length = __builtin_popcountll(path);
  const int64_t sinks = task.sink_tokens - task.tree_start;  // of the path, of any length
  uint64_t near = without_lowest(path, length - 1 - task.window_left);
  if (sinks > 0) near |= path & ~without_lowest(path, sinks < length ? sinks : length);
  const int64_t position = task.tree_start + length - 1;
  return (seen_on_chain(task, position, start) & token_bits(0, shift)) | shifted(near, shift);
}

// Which of the unit's tokens a row of the task sees.
inline uint64_t seen_of(const AttentionTask& task, const KeyUnit& unit, int64_t row) {
  uint64_t seen = 0;
  for (int i = 0; i < unit.num_runs; ++i) {
    const TokenRun& run = unit.runs[i];
    uint64_t bits = seen_from(task, row, run.position) & token_bits(0, run.count);
    if (task.mask != nullptr && bits != 0) {
      const int64_t first = run.mask_bit + (task.list_row + row) * task.mask_row_stride;
      bits &= mask_bits(task, first, run.count);
    }
    seen |= bits << run.slot;
  }
  return seen & unit.visited;
}

// The runs of tokens that a task visits, in their order.
class TokenWalk {
 public:
  static constexpr int32_t kEnd = INT32_MAX;

  explicit TokenWalk(const AttentionTask& task) : task_(task), at_(task.first_unit * kUnit) {
    end_ = task.end_unit * kUnit;
    if (end_ > task.num_tokens) end_ = task.num_tokens;
    int32_t low = 0;  // the last span that begins at or before at_
    for (int32_t high = task.num_spans; high - low > 1;) {
      const int32_t middle = low + (high - low) / 2;
      (task.spans[middle].first <= at_ ? low : high) = middle;
    }
    span_ = low;
    skip();
  }

  // Of the next token; kEnd behind the last.
  int32_t chunk() const {
    return at_ < end_ ? static_cast<int32_t>(at_ / (kUnit * ops::kChunkUnits)) : kEnd;
  }

  // At most `most` tokens, within a unit of all tokens, a chunk of words, a span of a list.
  TokenRun next(int32_t slot, int64_t most) {
    TokenRun run = {slot, 0, static_cast<int32_t>(at_), task_.mask_start + at_};
    int64_t count = kUnit - at_ % kUnit;
    if (task_.spans != nullptr) {
      const ops::TokenSpan& span = task_.spans[span_];
      run.position = span.begin + static_cast<int32_t>(at_ - span.first);
      run.mask_bit = span.mask_bit + (run.position - span.begin);
      count = span.end - run.position;
    } else if (task_.words != nullptr) {
      const uint64_t zeros = ~(task_.words[at_ / kUnit] >> at_ % kUnit);
      const int64_t ones = zeros == 0 ? kUnit : __builtin_ctzll(zeros);
      if (count > ones) count = ones;
    }
    if (count > most) count = most;
    if (count > end_ - at_) count = end_ - at_;
    run.count = static_cast<int32_t>(count);
    at_ += count;
    if (task_.spans != nullptr && run.position + count == task_.spans[span_].end) ++span_;
    skip();
    return run;
  }

 private:
  // To the next token that is visited.
  void skip() {
    if (task_.spans != nullptr) return;
    if (at_ / kUnit >= task_.sink_units && at_ < task_.first_seen * kUnit) {
      at_ = task_.first_seen * kUnit;
    }
    if (task_.words == nullptr) return;
    while (at_ < end_) {
      const uint64_t word = task_.words[at_ / kUnit] >> at_ % kUnit;
      if (word != 0) {
        at_ += __builtin_ctzll(word);
        return;
      }
      at_ = (at_ / kUnit + 1) * kUnit;
    }
  }

  const AttentionTask& task_;
  int64_t at_;  // token of the sequence, or of the list
  int64_t end_;
  int32_t span_;
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
