// Steps of heads: draft models that go on from what the target has computed. The float input
// %hidden of a row is the target's hidden state before the row's token, or the state of the guess
// above it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/speculative/draft_steps.h"

namespace effinfer::runtime {

class HeadSteps final : public DraftSteps {
 public:
  // `by_depth`: what drafts the tokens of each depth, the last one those of all that are deeper;
  // `hidden`: the value of the target's graph that they read, of `cols` columns. Throws
  // InvalidArgument for graphs that do not fit.
  HeadSteps(std::vector<std::shared_ptr<Executable>> by_depth, std::string hidden, int64_t cols,
            int32_t num_pages, int32_t top_k);

  void observe(const StepFacts& facts, DraftText& text) override;
  bool knows(const DraftText& text, std::span<const int32_t> tokens) const override;
  bool follow(DraftText& text, std::span<const int32_t> tokens) override;
  void release(DraftText& text) override;
  void feed(std::span<DraftText* const> texts) override;
  void grow(std::span<DraftText* const> texts) override;

 private:
  void add_rows(const DraftText& text, int64_t first, int64_t last, bool as_tree) override;
  void run(Phase phase) override;
  int64_t end_of_hidden(const DraftText& text) const;
  void keep_state(size_t row, std::span<const float> otherwise, DraftText& text);

  std::vector<std::shared_ptr<Executable>> by_depth_;
  std::string hidden_;
  size_t cols_;
  bool has_cache_;  // graphs attend to the text; else only its last token counts
  int32_t depth_ = 0;
  std::vector<float> rows_;  // [T, cols] of the step at hand
};

}  // namespace effinfer::runtime
