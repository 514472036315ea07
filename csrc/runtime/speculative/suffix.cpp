// Proposers that look the text's last tokens up.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>
#include <string>

#include "effinfer/error.h"
#include "runtime/speculative/grow.h"
#include "runtime/speculative/ngram_index.h"

namespace effinfer {
namespace {

using runtime::NgramIndex;

// The texts of running requests, indexed as they grow.
class OwnTexts {
 public:
  struct Text {
    NgramIndex index;
    size_t prompt_size;
  };

  // The request's text with all of `tokens`; room for `expected` of them is taken at once. A text
  // that is shorter than what is known of it is another one.
  Text& update(RequestId request, std::span<const int32_t> tokens, size_t prompt_size,
               size_t expected) {
    auto found = texts_.find(request);
    const auto size = static_cast<int64_t>(tokens.size());
    const auto fits = [size](const NgramIndex& i) {
      return size <= i.capacity() && i.size() <= size;
    };
    if (found != texts_.end() && !fits(found->second.index)) {
      texts_.erase(found);
      found = texts_.end();
    }
    if (found == texts_.end()) {
      const auto capacity = static_cast<int64_t>(std::max(tokens.size(), expected));
      found = texts_.emplace(request, Text{NgramIndex(capacity), prompt_size}).first;
    }
    NgramIndex& index = found->second.index;
    index.append(tokens.subspan(static_cast<size_t>(index.size())));
    return found->second;
  }
  const Text* find(RequestId request) const {
    const auto found = texts_.find(request);
    return found == texts_.end() ? nullptr : &found->second;
  }
  template <class Use>
  void for_others(RequestId request, const Use& use) const {
    for (const auto& [id, text] : texts_) {
      if (id != request) use(text.index);
    }
  }
  void forget(RequestId request) { texts_.erase(request); }
  void clear() { texts_.clear(); }

 private:
  std::map<RequestId, Text> texts_;  // in order: drafts do not depend on hashes
};

// What the text may grow to: max_tokens alone may be far more than the context holds.
size_t expected_size(const DraftView& view) {
  return view.tokens.size() + static_cast<size_t>(view.max_depth) + 1;
}

class SuffixProposer final : public Proposer {
 public:
  explicit SuffixProposer(const SuffixOptions& options)
      : shared_(options.shared_tokens), corpus_(static_cast<int64_t>(options.corpus.size())) {
    for (const int32_t token : options.corpus) {
      highest_ = std::max(highest_, token);
      if (token >= NgramIndex::kSeparator) continue;
      throw InvalidArgument(
          "[speculation] corpus: expected token ids, or -1 between documents, got " +
          std::to_string(token));
    }
    if (options.shared_tokens < 0) {
      throw InvalidArgument("[speculation] shared_tokens: expected at least 0, got " +
                            std::to_string(options.shared_tokens));
    }
    shares_ = options.shared_tokens > 0;
    beside_ = options.beside;
    has_corpus_ = !options.corpus.empty();
    corpus_.append(options.corpus);
  }

  std::string_view name() const override { return "suffix"; }
  void attach(int64_t vocab_size) override {
    own_.clear();
    if (highest_ < vocab_size) return;
    throw InvalidArgument("[speculation] corpus: expected token ids in 0.." +
                          std::to_string(vocab_size - 1) + ", got " + std::to_string(highest_));
  }

  void propose(std::span<const DraftView> views, std::span<Draft> drafts) override {
    for (size_t i = 0; i < views.size(); ++i) {
      const DraftView& view = views[i];
      const OwnTexts::Text& own =
          own_.update(view.request, view.tokens, view.prompt_size, expected_size(view));
      count_ = 0;
      find(own.index, view.tokens);
      if (beside_) find_beside(view);
      if (shares_) find(shared_, view.tokens);
      if (has_corpus_) find(corpus_, view.tokens);
      if (count_ == 0) continue;
      const uint64_t all = count_ == 64 ? ~uint64_t{0} : (uint64_t{1} << count_) - 1;
      grower_.grow(
          all, view.max_nodes, view.max_depth, drafts[i],
          [&](uint64_t places, int32_t depth, const auto& offer) { expand(places, depth, offer); });
    }
  }

  void observe(std::span<const StepFacts> facts) override {
    if (!shares_) return;
    for (const StepFacts& fact : facts) {
      own_.update(fact.request, fact.tokens, fact.prompt_size, 2 * fact.tokens.size());
    }
  }

  // What it wrote is of use to requests after it.
  void forget(RequestId request) override {
    const OwnTexts::Text* own = shares_ ? own_.find(request) : nullptr;
    if (own != nullptr) {
      for (auto i = static_cast<int64_t>(own->prompt_size); i < own->index.size(); ++i) {
        const int32_t token = own->index[i];
        shared_.append({&token, 1});
      }
      const int32_t end = NgramIndex::kSeparator;
      shared_.append({&end, 1});
    }
    own_.forget(request);
  }

 private:
  static constexpr size_t kMatches = 16;  // of each text

  // Texts that run beside this one: what several of them say gains weight.
  void find_beside(const DraftView& view) {
    own_.for_others(view.request, [&](const NgramIndex& other) { find(other, view.tokens); });
  }

  // A place where the text may go on.
  struct Place {
    const NgramIndex* text;
    int64_t next;
    float weight;
  };

  void find(const NgramIndex& text, std::span<const int32_t> tokens) {
    std::array<NgramIndex::Match, kMatches> matches;
    const size_t room = std::min(kMatches, places_.size() - count_);
    const size_t found = text.find(tokens, 2, std::span(matches).first(room));
    for (size_t i = 0; i < found; ++i) {
      // Each token more that agrees makes the place twice as likely to be the one.
      const int32_t length = std::min(matches[i].length, 16);
      places_[count_++] = {&text, matches[i].next, std::ldexp(1.0f, length)};
    }
  }

  template <class Offer>
  void expand(uint64_t places, int32_t depth, const Offer& offer) const {
    float total = 1.0f;  // of something new
    for (uint64_t left = places; left != 0; left &= left - 1) total += place(left).weight;
    for (uint64_t left = places; left != 0;) {
      const int32_t token = token_at(place(left), depth);
      uint64_t same = 0;
      float weight = 0.0f;
      for (uint64_t rest = left; rest != 0; rest &= rest - 1) {
        if (token_at(place(rest), depth) != token) continue;
        same |= rest & -rest;
        weight += place(rest).weight;
      }
      left &= ~same;
      if (token != NgramIndex::kSeparator) offer(token, weight / total, same);
    }
  }

  const Place& place(uint64_t bits) const {
    return places_[static_cast<size_t>(std::countr_zero(bits))];
  }
  static int32_t token_at(const Place& place, int32_t depth) {
    const int64_t at = place.next + depth;
    return at < place.text->size() ? (*place.text)[at] : NgramIndex::kSeparator;
  }

  OwnTexts own_;
  NgramIndex shared_;
  NgramIndex corpus_;
  int32_t highest_ = -1;  // of the corpus
  bool shares_ = false;
  bool beside_ = false;
  bool has_corpus_ = false;
  std::array<Place, 64> places_;  // bits of a word
  size_t count_ = 0;
  runtime::TreeGrower<uint64_t> grower_;  // of the places that agree so far
};

class PromptLookupProposer final : public Proposer {
 public:
  PromptLookupProposer(int32_t longest, int32_t shortest, int32_t length)
      : longest_(longest), shortest_(shortest), length_(length) {
    const auto check = [](const char* name, int32_t value, int32_t low, int32_t high) {
      if (value >= low && value <= high) return;
      throw InvalidArgument(std::string("[speculation] ") + name + ": expected " +
                            std::to_string(low) + ".." + std::to_string(high) + ", got " +
                            std::to_string(value));
    };
    check("longest", longest, NgramIndex::kOrders.back(), NgramIndex::kLongestMatch);
    check("shortest", shortest, NgramIndex::kOrders.back(), longest);
    check("length", length, 1, Draft::kMostNodes);
  }

  std::string_view name() const override { return "prompt_lookup"; }
  void attach(int64_t) override { own_.clear(); }

  void propose(std::span<const DraftView> views, std::span<Draft> drafts) override {
    for (size_t i = 0; i < views.size(); ++i) {
      const DraftView& view = views[i];
      const OwnTexts::Text& own =
          own_.update(view.request, view.tokens, view.prompt_size, expected_size(view));
      std::array<NgramIndex::Match, 48> matches;
      const size_t found = own.index.find(view.tokens, shortest_, matches);
      const NgramIndex::Match* best = nullptr;
      for (size_t m = 0; m < found; ++m) {
        matches[m].length = std::min(matches[m].length, longest_);
        if (best == nullptr ||
            std::pair(matches[m].length, matches[m].next) > std::pair(best->length, best->next)) {
          best = &matches[m];
        }
      }
      if (best == nullptr) continue;
      const int32_t most = std::min({length_, view.max_nodes, view.max_depth});
      const float score = 1.0f - std::ldexp(1.0f, -best->length);
      for (int32_t n = 0; n < most && best->next + n < own.index.size(); ++n) {
        drafts[i].add(own.index[best->next + n], n - 1, score);
      }
    }
  }

  void forget(RequestId request) override { own_.forget(request); }

 private:
  int32_t longest_;
  int32_t shortest_;
  int32_t length_;
  OwnTexts own_;
};

}  // namespace

std::shared_ptr<Proposer> suffix_proposer(const SuffixOptions& options) {
  return std::make_shared<SuffixProposer>(options);
}

std::shared_ptr<Proposer> prompt_lookup_proposer(int32_t longest, int32_t shortest,
                                                 int32_t length) {
  return std::make_shared<PromptLookupProposer>(longest, shortest, length);
}

}  // namespace effinfer
