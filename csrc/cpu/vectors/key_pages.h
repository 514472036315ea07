// The engine's pages as a source of units: a page as it lies, or, where a list visits few tokens of
// pages that all rows have behind them, tokens of several pages taken together as one. A coded page
// (ops/coded_pages.h) is multiplied as it is, whole: what rows do not see of it has no weight. The
// keys of one of features, and all of one of vectors' numbers, are expanded to where gathered ones
// would be.
#pragma once

#include <cstdint>
#include <optional>

#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/codebook_page.h"
#include "cpu/vectors/coded_page.h"
#include "cpu/vectors/feature_page.h"
#include "cpu/vectors/key_unit.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class Kv, class Products>
class KeyPages {
 public:
  using Math = AttentionMath<Kv>;
  static constexpr int P = Kv::P;
  static constexpr int64_t kLine = Math::kLine;
  // Visited tokens of a page up to which gathering them costs less than multiplying the others.
  static constexpr int kGatherTokens = 40;

  // A gathered unit and its scales are taken from `memory`.
  KeyPages(const AttentionTask& task, Products& products, float* memory)
      : task_(task), products_(products), walk_(task) {
    k_scales_ = memory;
    v_scales_ = k_scales_ + kUnit;
    k_ = reinterpret_cast<uint32_t*>(v_scales_ + kUnit);
    v_ = k_ + kUnit * task.k.dims / P;
    page_ = task.first_unit - 1;
    next_page();
    advance();
  }

  // Of the unit at hand; TokenWalk::kEnd: there is none.
  int32_t chunk() const { return chunk_; }
  const KeyUnit& unit() const { return unit_; }
  // Whether every row sees all of its tokens.
  bool all_seen() const { return all_seen_; }

  void advance() {
    if (task_.spans != nullptr) return take_listed();
    if (all_seen_) count_ = 0;
    all_seen_ = false;
    while (page_ < task_.end_unit && (count_ == 0 || page_chunk() == chunk_)) {
      chunk_ = page_chunk();
      if (task_.words == nullptr || !gathers()) {
        unit_.clear();
        const int64_t left = task_.num_tokens - page_ * kUnit;
        unit_.add({0, static_cast<int32_t>(left < kUnit ? left : kUnit),
                   static_cast<int32_t>(page_ * kUnit), task_.mask_start + page_ * kUnit});
        unit_.visited &= word();
        const int64_t page = page_;
        next_page();
        return lie(page, page_ < task_.end_unit ? page_ : page);
      }
      for (; left_ != 0 && count_ < kUnit; left_ &= left_ - 1) {
        take(page_, __builtin_ctzll(left_));
      }
      if (left_ != 0) break;
      next_page();
    }
    if (count_ == 0) {
      chunk_ = TokenWalk::kEnd;
      return;
    }
    unit_.clear();
    unit_.add({0, static_cast<int32_t>(count_), 0, 0});
    all_seen_ = true;
    gather();
  }

  void score(const typename Math::A* q, int64_t dim, TokenRange groups, int64_t rows,
             float* scores) const {
    if (coded_) return coded_->score(q, dim, rows, scores);
    const int64_t lines = dim / P;  // of 16 tokens
    const uint8_t* k = lines_k_ + groups.begin / 16 * lines * kLine;
    products_.multiply(q, dim, {k, kLine, lines * kLine, k + ahead_}, dim, nullptr,
                       scores + groups.begin, kUnit, (groups.end - groups.begin) / 16, rows);
  }

  void add_values(const float* scores, int64_t dim, TokenRange keys, int64_t rows,
                  const float* factors, float* out) const {
    if (coded_) {
      coded_->add_values(Math::factors_at(scores, 0), kUnit, rows, factors, out, dim);
      return;
    }
    if (features_) {
      features_->add_values(Math::factors_at(scores, 0), kUnit, rows, factors, out, dim);
      return;
    }
    const int64_t lines = dim / 16;  // of P tokens
    const int64_t first = keys.begin / Products::kValueStep * Products::kValueStep;
    const uint8_t* v = lines_v_ + first / P * lines * kLine;
    products_.multiply(Math::factors_at(scores, first), kUnit,
                       {v, lines * kLine, kLine, v + ahead_}, keys.end - first, factors, out, dim,
                       lines, rows);
  }

  const float* k_scales() const { return at_k_scales_; }
  const float* v_scales() const { return at_v_scales_; }
  const float* log_weights() const { return at_weights_; }
  bool has_first() const { return has_first_; }

 private:
  static constexpr int kBits = 32 / P;  // of an element
  static constexpr uint32_t kElement = P == 1 ? ~uint32_t{0} : (uint32_t{1} << kBits % 32) - 1;

  struct Token {
    int32_t page_id;
    int32_t token;
  };

  // Whether the visited tokens of the page at hand, which all rows see, are taken out of it: lines
  // of 16 tokens are copied as they are.
  bool gathers() const {
    const bool past = (page_ + 1) * kUnit <= task_.position;
    const int64_t last = task_.position + task_.num_rows - 1;  // of a chain: a tree's are before it
    const bool shown = task_.window_left < 0 || page_ * kUnit >= last - task_.window_left;
    const bool pays = __builtin_popcountll(word()) <= kGatherTokens ||
                      (word() != ~uint64_t{0} && whole_lines(word()));
    return past && shown && pays && !task_.coded.holds(task_.pages[page_]);
  }
  // Whether the word has all of 16 tokens or none, four times.
  static bool whole_lines(uint64_t word) { return (word & 0x0001000100010001) * 0xffff == word; }
  int32_t page_chunk() const { return static_cast<int32_t>(page_ / ops::kChunkUnits); }
  uint64_t word() const { return task_.words == nullptr ? ~uint64_t{0} : task_.words[page_]; }

  // To the next page with visited tokens.
  void next_page() {
    do {
      ++page_;
      if (page_ >= task_.sink_units && page_ < task_.first_seen) page_ = task_.first_seen;
    } while (page_ < task_.end_unit && word() == 0);
    left_ = page_ < task_.end_unit ? word() : 0;
  }

  // The next 64 tokens of a list of spans: a page as it lies where they are one, else gathered.
  void take_listed() {
    chunk_ = walk_.chunk();
    if (chunk_ == TokenWalk::kEnd) return;
    unit_.clear();
    while (unit_.count < kUnit && walk_.chunk() != TokenWalk::kEnd) {
      unit_.add(walk_.next(unit_.count, kUnit - unit_.count));
    }
    const TokenRun& first = unit_.runs[0];
    if (unit_.num_runs == 1 && first.position % kUnit == 0) {
      return lie(first.position / kUnit, first.position / kUnit);
    }
    count_ = 0;
    for (int i = 0; i < unit_.num_runs; ++i) {
      const TokenRun& run = unit_.runs[i];
      for (int64_t t = run.position; t < run.position + run.count; ++t) {
        take(t / kUnit, t % kUnit);
      }
    }
    gather();
  }

  // A token to be gathered, of a page of the sequence.
  void take(int64_t page, int64_t token) {
    if (count_ == 0) gathers_first_ = page == 0 && token == 0;
    if (task_.log_weights != nullptr) weights_[count_] = task_.log_weights[page * kUnit + token];
    tokens_[count_++] = {task_.pages[page], static_cast<int32_t>(token)};
  }

  // `next` is the page that is likely to be the next one.
  void lie(int64_t page, int64_t next) {
    has_first_ = page == 0;
    if (task_.log_weights != nullptr) at_weights_ = task_.log_weights + page * kUnit;
    const int64_t id = task_.pages[page];
    coded_.reset();
    features_.reset();
    if (task_.coded.holds(task_.pages[page]))
      return lie_coded(task_.pages[page], task_.pages[next]);
    lines_k_ = task_.k.data + id * task_.k.page_stride;
    lines_v_ = task_.v.data + id * task_.v.page_stride;
    if (Kv::kScaled) {
      at_k_scales_ = task_.k.scales + id * task_.k.scale_page_stride;
      if (task_.v.scales != nullptr) {  // there are none of values that nobody wants
        at_v_scales_ = task_.v.scales + id * task_.v.scale_page_stride;
      }
    }
    ahead_ = (task_.pages[next] - id) * task_.k.page_stride;
  }

  void lie_coded(int32_t page, int32_t next) {
    const ops::CodedPages& coded = task_.coded;
    if (coded.features != nullptr) {
      features_.emplace(coded, page, task_.kv_head);
      features_->expand_keys(k_);
      lines_k_ = reinterpret_cast<const uint8_t*>(k_);
      ahead_ = 0;
      return;
    }
    if (coded.codebooks != nullptr) return expand(CodebookPage<Kv>(coded, page, task_.kv_head));
    const int64_t ahead = coded.holds(next) ? coded.head(next, 0) - coded.head(page, 0) : 0;
    coded_.emplace(coded, page, ahead);
  }

  void expand(const CodebookPage<Kv>& page) {
    if constexpr (P <= 2) {
      page.expand_keys(k_);
      if (task_.v.data != nullptr) page.expand_values(v_);
    }
    lines_k_ = reinterpret_cast<const uint8_t*>(k_);
    lines_v_ = reinterpret_cast<const uint8_t*>(v_);
    ahead_ = 0;
  }

  // The tokens taken together, as a page of their own.
  void gather() {
    coded_.reset();
    features_.reset();
    has_first_ = gathers_first_;
    if (task_.log_weights != nullptr) at_weights_ = weights_;
    for (int64_t first = 0; first < count_; first += 16) {
      if (is_line(first)) {
        copy_line(first);
        continue;
      }
      const int64_t end = first + 16 < count_ ? first + 16 : count_;
      for (int64_t i = first; i < end; ++i) copy_key(i);
      for (int64_t i = first; i < end; i += P) copy_values(i);
    }
    lines_k_ = reinterpret_cast<const uint8_t*>(k_);
    lines_v_ = reinterpret_cast<const uint8_t*>(v_);
    if (Kv::kScaled) {
      at_k_scales_ = k_scales_;
      if (task_.v.scales != nullptr) at_v_scales_ = v_scales_;
    }
    ahead_ = 0;
  }

  // Whether the 16 slots from `first` on are tokens whose lines lie together.
  bool is_line(int64_t first) const {
    if (first + 16 > count_ || tokens_[first].token % 16 != 0) return false;
    const Token last = tokens_[first + 15];
    return last.page_id == tokens_[first].page_id && last.token == tokens_[first].token + 15;
  }
  void copy_line(int64_t first) {
    const Token from = tokens_[first];
    const int64_t k = task_.k.dims * (16 / P);  // dwords
    const int64_t v = task_.v.dims * (16 / P);
    copy_dwords(k_ + first / 16 * k, task_.k.data + from.page_id * task_.k.page_stride,
                from.token / 16 * k, k);
    copy_dwords(v_ + first / 16 * v, task_.v.data + from.page_id * task_.v.page_stride,
                from.token / 16 * v, v);
    if (!Kv::kScaled) return;
    const int64_t scale = from.page_id * task_.k.scale_page_stride + from.token;
    __builtin_memcpy(k_scales_ + first, task_.k.scales + scale, 16 * sizeof(float));
    if (task_.v.scales == nullptr) return;
    __builtin_memcpy(v_scales_ + first, task_.v.scales + scale, 16 * sizeof(float));
  }
  static void copy_dwords(uint32_t* to, const uint8_t* page, int64_t first, int64_t count) {
    __builtin_memcpy(to, reinterpret_cast<const uint32_t*>(page) + first,
                     static_cast<size_t>(count) * sizeof(uint32_t));
  }

  // A dword of each line of 16 tokens.
  void copy_key(int64_t slot) {
    const Token from = tokens_[slot];
    const int64_t lines = task_.k.dims / P;
    const uint32_t* source =
        reinterpret_cast<const uint32_t*>(task_.k.data + from.page_id * task_.k.page_stride) +
        from.token / 16 * lines * 16 + from.token % 16;
    uint32_t* to = k_ + slot / 16 * lines * 16 + slot % 16;
    for (int64_t i = 0; i < lines; ++i) to[i * 16] = source[i * 16];
    if (!Kv::kScaled) return;
    const int64_t scale = from.page_id * task_.k.scale_page_stride + from.token;
    k_scales_[slot] = task_.k.scales[scale];
    if (task_.v.scales != nullptr) v_scales_[slot] = task_.v.scales[scale];
  }

  // The lines of P tokens from `slot` on: one element of each of their own lines.
  void copy_values(int64_t slot) {
    const int64_t dim = task_.v.dims;
    uint32_t* to = v_ + slot / P * dim;
    for (int j = 0; j < P; ++j) {
      // Behind the last token: that one again, which nothing multiplies.
      const Token from = tokens_[slot + j < count_ ? slot + j : count_ - 1];
      const uint32_t* source =
          reinterpret_cast<const uint32_t*>(task_.v.data + from.page_id * task_.v.page_stride) +
          from.token / P * dim;
      const int down = from.token % P * kBits;
      if (j == 0) {
        for (int64_t d = 0; d < dim; ++d) to[d] = source[d] >> down & kElement;
      } else {
        for (int64_t d = 0; d < dim; ++d) to[d] |= (source[d] >> down & kElement) << j * kBits;
      }
    }
  }

  const AttentionTask& task_;
  Products& products_;
  TokenWalk walk_;     // of spans
  int64_t page_;       // the next one with visited tokens
  uint64_t left_ = 0;  // of these, those that are not gathered yet
  int32_t chunk_ = 0;
  KeyUnit unit_;
  bool all_seen_ = false;
  const uint8_t* lines_k_ = nullptr;
  const uint8_t* lines_v_ = nullptr;
  std::optional<CodedPage<Kv>> coded_;  // the page at hand, if it is one
  std::optional<FeaturePage<Kv>> features_;
  const float* at_k_scales_ = nullptr;
  const float* at_v_scales_ = nullptr;
  const float* at_weights_ = nullptr;
  bool has_first_ = false;
  int64_t ahead_ = 0;  // bytes to what is likely to be next
  // A gathered unit.
  int64_t count_ = 0;
  Token tokens_[kUnit];
  float weights_[kUnit] = {};
  bool gathers_first_ = false;
  float* k_scales_;
  float* v_scales_;
  uint32_t* k_;
  uint32_t* v_;
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
