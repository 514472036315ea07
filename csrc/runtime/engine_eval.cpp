// Whole sequences for evaluation: all logits, or the log-likelihood of each token.
#include <algorithm>
#include <cmath>
#include <string>

#include "effinfer/error.h"
#include "ops/visits.h"
#include "runtime/engine_core.h"
#include "runtime/row_scratch.h"

namespace effinfer::runtime {
void EngineCore::feed(std::span<const int32_t> tokens, Phase phase, size_t rows,
                      const std::function<std::span<float>(size_t, size_t)>& place,
                      const std::function<void(size_t, size_t)>& done) {
  check_tokens(tokens, "tokens");
  if (static_cast<int64_t>(tokens.size()) > options_.max_seq_len) {
    throw InvalidArgument("[engine] tokens: expected at most " +
                          std::to_string(options_.max_seq_len) + ", got " +
                          std::to_string(tokens.size()));
  }
  const std::lock_guard lock(step_mutex_);
  const auto most =
      static_cast<size_t>(std::min(options_.max_batch_tokens, runner_->limits().max_rows));
  const size_t chunk = phase == Phase::decode ? 1 : std::clamp<size_t>(rows, 1, most);
  const SequenceId sequence = cache_->create({});
  try {
    for (size_t first = 0; first < tokens.size(); first += chunk) {
      const auto part = tokens.subspan(first, std::min(chunk, tokens.size() - first));
      if (encodes() && phase == Phase::decode) encode_pages(sequence);
      make_room(sequence, static_cast<int64_t>(part.size()));
      cache_->append(sequence, part);
      batch_.clear(phase);
      // A prompt's last few rows are no generated ones.
      const bool dense = phase == Phase::prefill && part.size() < ops::kSparseRows;
      batch_.add(*cache_, sequence, part, StepBatch::Logits::all, nullptr, dense);
      runner_->run(batch_.view(), *cache_, place(first, part.size()));
      cache_->commit(sequence, static_cast<int64_t>(part.size()));
      if (done) done(first, part.size());
    }
  } catch (...) {
    cache_->release(sequence, false);
    throw;
  }
  cache_->release(sequence, false);
  publish();
}

void EngineCore::logits(std::span<const int32_t> tokens, std::span<float> out, Phase phase) {
  const auto vocab = static_cast<size_t>(vocab_size());
  if (out.size() / vocab != tokens.size() || out.size() % vocab != 0) {
    throw InvalidArgument("[engine] out: expected " + std::to_string(tokens.size()) + " x " +
                          std::to_string(vocab) + " values, got " + std::to_string(out.size()));
  }
  const auto place = [&](size_t first, size_t count) {
    return out.subspan(first * vocab, count * vocab);
  };
  feed(tokens, phase, tokens.size(), place, nullptr);
}

void EngineCore::log_likelihoods(std::span<const int32_t> tokens, std::span<double> out,
                                 Phase phase) {
  const auto vocab = static_cast<size_t>(vocab_size());
  if (out.size() + 1 != tokens.size()) {
    throw InvalidArgument("[engine] out: expected " + std::to_string(tokens.size()) +
                          " - 1 values, got " + std::to_string(out.size()));
  }
  const size_t rows = std::min(static_cast<size_t>(slice_rows(vocab_size())), tokens.size());
  std::vector<float> slice(std::min(rows, static_cast<size_t>(options_.max_batch_tokens)) * vocab);
  const auto place = [&](size_t, size_t count) { return std::span(slice).first(count * vocab); };
  RowScratch scratch(runner_->isa());
  const auto score = [&](size_t first, size_t count) {
    for (size_t i = 0; i < count && first + i < out.size(); ++i) {
      const auto row = std::span<const float>(slice).subspan(i * vocab, vocab);
      const auto logit = static_cast<double>(row[static_cast<size_t>(tokens[first + i + 1])]);
      cpu::RowDistribution distribution = scratch.row(vocab);
      out[first + i] = logit - log_sum_exp(distribution, row);
    }
  };
  // The last token predicts nothing that is known, but feeding it costs no step of its own.
  feed(tokens, phase, rows, place, score);
}

}  // namespace effinfer::runtime
