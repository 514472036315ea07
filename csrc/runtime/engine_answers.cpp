// Several answers to one prompt: one computes it while the others wait, and they fork its sequence.
#include <algorithm>

#include "runtime/engine_core.h"

namespace effinfer::runtime {

// Another answer to the request's prompt that runs, one that has its prompt before others; null:
// none does.
const Request* EngineCore::sibling_of(const Request& request) const {
  if (request.group == 0) return nullptr;
  const Request* sibling = nullptr;
  for (const auto& other : running_) {
    if (other->group != request.group || other.get() == &request) continue;
    if (sibling == nullptr || other->has_prompt()) sibling = other.get();
    if (sibling->has_prompt()) break;
  }
  return sibling;
}

// Whether another answer is computing the prompt, which nobody has kept.
bool EngineCore::waits_for_prompt(const Request& request) const {
  const Request* sibling = sibling_of(request);
  return sibling != nullptr && !sibling->has_prompt() && !prompts_.contains(request.group);
}

// A fork of another answer, but for the prompt's last token, whose logits are wanted; otherwise
// what is cached. After a preemption the cache may know more: the output.
SequenceId EngineCore::start_sequence(const Request& request, int32_t& cached) {
  const Request* sibling = sibling_of(request);
  const auto kept = prompts_.find(request.group);
  SequenceId prompt = Request::kNoSequence;
  if (kept != prompts_.end()) prompt = kept->second;
  if (prompt == Request::kNoSequence && sibling != nullptr && sibling->has_prompt()) {
    prompt = sibling->sequence;
  }
  const bool is_new = request.output().empty() || !options_.prefix_cache;
  // The prompt's last token reads all pages as they were written.
  const bool has_written = prompt != Request::kNoSequence && cache_->encoded_pages(prompt) == 0;
  if (has_written && is_new && !request.scores_prompt()) {
    const auto known_tokens = static_cast<int32_t>(request.prompt_size) - 1;
    if (cache_->can_rollback(prompt, cache_->length(prompt) - known_tokens)) {
      const SequenceId sequence = cache_->fork(prompt);
      cache_->rollback(sequence, cache_->length(sequence) - known_tokens);
      cached = known_tokens;
      return sequence;
    }
  }
  const std::span<const int32_t> known = request.tokens;
  const bool reuses = options_.prefix_cache && !request.scores_prompt();
  return cache_->create(reuses ? known : known.first(0), &cached, request.techniques.prefix);
}

// Keeps the sequence of an answer that ends before those that wait have forked it; false: nobody
// waits, or another one has the prompt.
bool EngineCore::keep_prompt(const Request& request) {
  if (request.group == 0 || !request.has_prompt() || prompts_.contains(request.group)) return false;
  const Request* sibling = sibling_of(request);
  if (sibling != nullptr && sibling->has_prompt()) return false;
  if (!waits_answer(request.group) || cache_->encoded_pages(request.sequence) > 0) return false;
  const auto past_prompt =
      cache_->length(request.sequence) - static_cast<int64_t>(request.prompt_size);
  if (!cache_->can_rollback(request.sequence, past_prompt)) return false;
  if (options_.prefix_cache) cache_->publish(request.sequence);
  cache_->rollback(request.sequence, past_prompt);
  prompts_.emplace(request.group, request.sequence);
  return true;
}

// Where windows free their keys, or pages are encoded, an answer cannot be rolled back to its
// prompt for long: those that wait get a sequence of the prompt.
void EngineCore::fork_prompt(const Request& request) {
  const bool has_windows = cache_->num_groups() > cache_->num_whole_groups();
  const bool for_long = !has_windows && !encodes(request);
  if (request.group == 0 || for_long || !waits_answer(request.group)) return;
  if (prompts_.contains(request.group)) return;
  prompts_.emplace(request.group, cache_->fork(request.sequence));
}

bool EngineCore::waits_answer(RequestId group) const {
  return std::any_of(waiting_.begin(), waiting_.end(), [group](const auto& other) {
    return other->group == group && other->finished == FinishReason::none;
  });
}

// Lets go of prompts for which nobody waits.
void EngineCore::drop_unwanted_prompts() {
  std::erase_if(prompts_, [this](const auto& kept) {
    if (waits_answer(kept.first)) return false;
    cache_->release(kept.second, options_.prefix_cache);
    return true;
  });
}

// Lets go of all kept prompts, which hold pages; whether there were any.
bool EngineCore::drop_prompts() {
  for (const auto& [group, sequence] : prompts_) cache_->release(sequence, options_.prefix_cache);
  const bool any = !prompts_.empty();
  prompts_.clear();
  return any;
}

}  // namespace effinfer::runtime
