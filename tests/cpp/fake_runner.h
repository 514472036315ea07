// A model for tests of the engine: it keeps its tokens in the pages, reads the whole sequence back
// from them, and derives the logits from what it read. A wrong page, position or length changes the
// text or is counted as a fault.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

#include "effinfer/error.h"
#include "kv/kv_access.h"
#include "ops/top_list.h"
#include "runtime/step_runner.h"

namespace fake {

using namespace effinfer;

inline constexpr int32_t kVocab = 97;
inline constexpr int32_t kPoison = 96;     // a prompt token that makes its logits NaN
inline constexpr int32_t kExplosive = 95;  // a prompt token that makes the step throw

// What the cache holds for a token: on the fast path the phase that computed it matters, as the
// rounding of a real model does.
inline int32_t content(int32_t token, Phase phase, bool one_arithmetic) {
  return token * 2 + (!one_arithmetic && phase == Phase::decode ? 1 : 0);
}

// The logits after a sequence of contents: pseudo-random, well apart.
inline void fill_logits(const std::vector<int32_t>& contents, float* row) {
  uint64_t hash = 0x9E3779B97F4A7C15;
  for (const int32_t value : contents) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0xBF58476D1CE4E5B9;
    hash ^= hash >> 29;
  }
  for (int32_t i = 0; i < kVocab; ++i) {
    const uint64_t mixed = (hash + static_cast<uint64_t>(i)) * 0x94D049BB133111EB;
    row[i] = static_cast<float>(mixed >> 44) * 0x1p-18f;
  }
  row[kPoison] = row[kExplosive] = -std::numeric_limits<float>::infinity();
}

struct Log {
  int steps = 0;
  int decode_rows = 0;
  int prefill_rows = 0;
  int mixed_steps = 0;  // rows of more than one length in a step
  int largest_step = 0;
  int top_steps = 0;    // that asked for the highest logits only
  bool draws = false;   // set beforehand: the runner draws tokens
  int drawn_steps = 0;  // in which it did
  int read_rows = 0;    // whose logits were read after that
  int tree_rows = 0;    // that lie elsewhere than plain decoding's would
  int dense_rows = 0;   // of sequences that visit all keys where others do not
  int faults = 0;
  int probe_ids = 0;  // set beforehand: ids behind the vocabulary that rows may have
};

class Runner : public runtime::StepRunner {
 public:
  Runner(bool one_arithmetic, runtime::StepLimits limits, Log* log)
      : one_arithmetic_(one_arithmetic), limits_(limits), log_(log) {
    seen_.reserve(1024);
    contents_.reserve(1024);
    logits_.reserve(static_cast<size_t>(limits.max_rows * kVocab));
  }

  int64_t vocab_size() const override { return kVocab; }
  int64_t num_ids() const override { return kVocab + log_->probe_ids; }
  int32_t max_top() const override { return 8; }
  runtime::StepLimits limits() const override { return limits_; }

  void run(const Batch& batch, KvCache& cache, std::span<float> logits) override {
    check(batch, logits);
    const ops::KvLayer first = KvCacheAccess::layers(cache).front();
    const ops::KvLayer last = KvCacheAccess::layers(cache).back();
    size_t row = 0;
    for (size_t s = 0; s + 1 < batch.qo_indptr.size(); ++s) {
      const int32_t begin = batch.qo_indptr[s];
      const int32_t end = batch.qo_indptr[s + 1];
      const std::span<const int32_t> pages =
          batch.kv_indices.subspan(static_cast<size_t>(batch.kv_indptr[s]));
      const int32_t start = batch.kv_len[s] - (end - begin);
      for (int32_t i = begin; i < end; ++i) {
        const int32_t token = batch.token_ids[static_cast<size_t>(i)];
        if (token == kExplosive) throw Error("[fake] exploded");
        const int32_t place = start + i - begin;
        see(batch.ancestors.empty() ? 0 : batch.ancestors[static_cast<size_t>(i)], start, place);
        const auto depth = static_cast<int32_t>(seen_.size()) - 1;
        log_->faults += batch.positions[static_cast<size_t>(i)] != depth;
        log_->tree_rows += depth != place;
        // Attention sums by places in a page (Batch::ancestors).
        for (int32_t d = start; d <= depth; ++d) {
          log_->faults +=
              seen_[static_cast<size_t>(d)] / KvCache::kPageSize != d / KvCache::kPageSize;
        }
        const float value = static_cast<float>(content(token, batch.phase, one_arithmetic_));
        *slot(first, pages, place, 0) = value;
        *slot(last, pages, place, last.num_kv_heads - 1) = value;
        if (row >= batch.logit_rows.size() || batch.logit_rows[row] != i) continue;
        read_back(first, last, pages);
        fill_logits(contents_, logits.data() + row * kVocab);
        for (const int32_t c : contents_) {
          if (c / 2 == kPoison) logits[row * kVocab] = __builtin_nanf("");
        }
        ++row;
      }
    }
    log_->faults += row != batch.logit_rows.size();
  }

  void run_top(const Batch& batch, KvCache& cache, const TopLogits& top) override {
    const size_t rows = batch.logit_rows.size();
    const auto k = static_cast<size_t>(top.k);
    log_->faults += top.k < 1 || top.k > max_top() || top.values.size() != rows * k ||
                    top.tokens.size() != rows * k;
    logits_.resize(rows * kVocab);
    const std::span<float> logits = logits_;
    run(batch, cache, logits);
    ++log_->top_steps;
    for (size_t row = 0; row < rows; ++row) {
      ops::TopList list;
      bool nan = false;
      for (int32_t i = 0; i < kVocab; ++i) {
        const float value = logits[row * kVocab + static_cast<size_t>(i)];
        nan |= value != value;
        list.add({value, i}, top.k);
      }
      for (size_t i = 0; i < k; ++i) {
        top.values[row * k + i] = nan ? __builtin_nanf("") : list.entries[i].value;
        top.tokens[row * k + i] = list.entries[i].index;
      }
    }
  }

  bool draws_tokens() const override { return log_->draws; }
  // Of every third row it does not know the token.
  void run_drawn(const Batch& batch, KvCache& cache, const DrawnTokens& drawn) override {
    const size_t rows = batch.logit_rows.size();
    log_->faults += drawn.draws.size() != rows || drawn.tokens.size() != rows ||
                    drawn.decided.size() != rows || !log_->draws;
    logits_.resize(rows * kVocab);
    run(batch, cache, logits_);
    ++log_->drawn_steps;
    for (size_t row = 0; row < rows; ++row) {
      const RowDraw& draw = drawn.draws[row];
      SamplingParams params;
      params.temperature = draw.temperature;
      params.top_k = draw.top_k;
      params.top_p = draw.top_p;
      params.min_p = draw.min_p;
      params.seed = draw.seed;
      const std::span<const float> logits(logits_.data() + row * kVocab, size_t{kVocab});
      const bool is_number = logits[0] == logits[0];
      drawn.decided[row] = is_number && ++undecided_ % 3 != 0 ? 1 : 0;
      drawn.tokens[row] =
          drawn.decided[row] != 0 ? sampler_.sample(logits, params, {}, {}, draw.index).token : -1;
    }
  }
  void read_row(int64_t row, std::span<float> logits) override {
    const auto first = logits_.begin() + row * kVocab;
    log_->faults += logits.size() != kVocab;
    std::copy(first, first + kVocab, logits.begin());
    ++log_->read_rows;
  }

 private:
  static float* slot(const ops::KvLayer& kv, std::span<const int32_t> pages, int32_t position,
                     int32_t head) {
    const int32_t page = pages[static_cast<size_t>(position / KvCache::kPageSize)];
    const int64_t offset =
        ops::k_offset(position % KvCache::kPageSize, kv.head_dim - 1, kv.head_dim, 1);
    return reinterpret_cast<float*>(kv.k_head(page, head)) + offset;
  }

  // The places that a row sees, its own the last.
  void see(uint64_t word, int32_t start, int32_t place) {
    seen_.clear();
    const int32_t before = word == 0 ? place + 1 : start;
    for (int32_t i = 0; i < before; ++i) seen_.push_back(i);
    for (; word != 0; word &= word - 1) seen_.push_back(start + std::countr_zero(word));
  }

  void read_back(const ops::KvLayer& first, const ops::KvLayer& last,
                 std::span<const int32_t> pages) {
    contents_.clear();
    for (const int32_t i : seen_) {
      const float value = *slot(first, pages, i, 0);
      log_->faults += value != *slot(last, pages, i, last.num_kv_heads - 1);
      contents_.push_back(static_cast<int32_t>(value));
    }
  }

  void check(const Batch& batch, std::span<float> logits) {
    const int tokens = static_cast<int>(batch.token_ids.size());
    const size_t sequences = batch.kv_len.size();
    ++log_->steps;
    log_->largest_step = std::max(log_->largest_step, tokens);
    (batch.phase == Phase::decode ? log_->decode_rows : log_->prefill_rows) += tokens;
    bool one = false;
    bool many = false;
    for (size_t s = 0; s < sequences; ++s) {
      const int rows = batch.qo_indptr[s + 1] - batch.qo_indptr[s];
      const int pages = batch.kv_indptr[s + 1] - batch.kv_indptr[s];
      one |= rows == 1;
      many |= rows > 1;
      log_->faults += rows < 1 || batch.kv_len[s] < rows;
      log_->dense_rows += !batch.dense.empty() && batch.dense[s] == 1 ? rows : 0;
      log_->faults += pages != (batch.kv_len[s] + KvCache::kPageSize - 1) / KvCache::kPageSize;
    }
    log_->mixed_steps += one && many;
    const bool fits = tokens > 0 && tokens <= limits_.max_tokens &&
                      static_cast<int64_t>(sequences) <= limits_.max_sequences &&
                      static_cast<int64_t>(batch.logit_rows.size()) <= limits_.max_rows &&
                      logits.size() == batch.logit_rows.size() * kVocab;
    log_->faults += !fits;
  }

  const bool one_arithmetic_;
  const runtime::StepLimits limits_;
  Log* const log_;
  std::vector<int32_t> seen_;
  std::vector<int32_t> contents_;
  std::vector<float> logits_;
  Sampler sampler_;
  int undecided_ = 0;
};

// What the engine must generate, from the token history alone.
inline std::vector<int32_t> reference(std::vector<int32_t> prompt, SamplingParams params,
                                      bool one_arithmetic) {
  Sampler sampler;
  std::vector<int32_t> contents;
  for (const int32_t token : prompt) {
    contents.push_back(content(token, Phase::prefill, one_arithmetic));
  }
  std::vector<int32_t> output;
  Mirostat mirostat;
  std::vector<float> row(kVocab);
  while (static_cast<int32_t>(output.size()) < params.max_tokens) {
    fill_logits(contents, row.data());
    output.push_back(
        sampler.sample(row, params, prompt, output, output.size(), {}, &mirostat).token);
    contents.push_back(content(output.back(), Phase::decode, one_arithmetic));
  }
  return output;
}

}  // namespace fake
