// Verifiers that take what plain decoding would draw, or a given text in its place.
#include <unordered_map>

#include "effinfer/speculative.h"

namespace effinfer {
namespace {

// Follows the tree from the root as far as it has the tokens that draw(row) gives.
template <class DrawToken>
void walk(const Draft& draft, TokenRows& rows, const DrawToken& draw) {
  for (int32_t node = -1;;) {
    SampledToken token = draw(node + 1);
    const int32_t id = token.token;
    if (!rows.emit(node + 1, std::move(token))) return;
    node = draft.child(node, id);
    if (node < 0) return;
  }
}

class MatchVerifier final : public Verifier {
 public:
  std::string_view name() const override { return "match"; }
  Guarantee guarantee() const override { return Guarantee::same_text; }
  void verify(const Draft& draft, TokenRows& rows) override {
    walk(draft, rows, [&](int32_t row) { return rows.sample(row); });
  }
};

}  // namespace

std::string_view name(Guarantee guarantee) {
  switch (guarantee) {
    case Guarantee::same_text:
      return "same_text";
    case Guarantee::same_distribution:
      return "same_distribution";
    case Guarantee::lossy:
      break;
  }
  return "lossy";
}

std::shared_ptr<Verifier> match_verifier() {
  return std::make_shared<MatchVerifier>();
}

struct ReplayVerifier::Texts {
  struct Text {
    std::vector<int32_t> tokens;
    size_t next = 0;
  };
  std::unordered_map<RequestId, Text> by_request;
};

ReplayVerifier::ReplayVerifier() : texts_(std::make_unique<Texts>()) {}
ReplayVerifier::~ReplayVerifier() = default;

void ReplayVerifier::set(RequestId request, std::vector<int32_t> text) {
  texts_->by_request[request] = {std::move(text), 0};
}

void ReplayVerifier::forget(RequestId request) {
  texts_->by_request.erase(request);
}

// The model's own token is drawn all the same, so that a step costs what it would.
void ReplayVerifier::verify(const Draft& draft, TokenRows& rows) {
  const auto found = texts_->by_request.find(rows.request());
  walk(draft, rows, [&](int32_t row) {
    SampledToken token = rows.sample(row);
    if (found == texts_->by_request.end()) return token;
    Texts::Text& text = found->second;
    if (text.next == text.tokens.size()) return token;
    return rows.scored(row, text.tokens[text.next++]);
  });
}

}  // namespace effinfer
