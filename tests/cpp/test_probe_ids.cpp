// Probes with ids that no token has: rows of the model's embedding behind the vocabulary.
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "effinfer/speculative.h"
#include "engine_harness.h"
#include "runtime/speculative/draft.h"

using namespace effinfer;
using namespace fake;

namespace {

constexpr int kExtra = 3;

// A draft of a token with a group of such probes behind it and behind the root.
class GroupProposer : public Proposer {
 public:
  std::string_view name() const override { return "groups"; }
  int32_t top_k() const override { return 1; }
  void propose(std::span<const DraftView> views, std::span<Draft> drafts) override {
    for (size_t i = 0; i < views.size(); ++i) {
      Draft& draft = drafts[i];
      for (int32_t parent : {-1, draft.add(views[i].tokens.back() / 2, -1, 0.5f)}) {
        for (int32_t n = 0; n < kExtra && draft.size() < views[i].max_nodes; ++n) {
          parent = draft.add(kVocab + n, parent, Draft::kProbe);
        }
      }
    }
  }
  void observe(std::span<const StepFacts> facts) override {
    for (const StepFacts& fact : facts) {
      if (fact.verified == nullptr) continue;
      for (size_t i = 0; i < fact.verified->tokens.size(); ++i) {
        if (fact.verified->tokens[i] < kVocab) continue;
        ++probed;
        CHECK(fact.top.tokens[i + 1] >= 0 && fact.top.tokens[i + 1] < kVocab);
      }
      for (const int32_t node : fact.accepted) {
        CHECK(fact.verified->tokens[static_cast<size_t>(node)] < kVocab);
      }
    }
  }
  int64_t probed = 0;
};

Setup setup_with(std::vector<std::shared_ptr<Proposer>> proposers,
                 std::shared_ptr<Verifier> verifier) {
  Setup setup;
  setup.max_batch_tokens = 200;
  setup.probe_ids = kExtra;
  setup.speculation = {std::move(proposers), std::move(verifier), fixed_controller(12)};
  return setup;
}

int64_t refused(Harness& harness) {
  int64_t count = 0;
  for (const auto& [id, output] : harness.outputs) {
    count += harness.engine->metrics(id).speculation.refused_drafts;
  }
  return count;
}

}  // namespace

TEST("probes may have ids behind the vocabulary, drafts may not") {
  const runtime::DraftIds ids = {kVocab, kVocab + kExtra};
  for (const int32_t id : {kVocab - 1, kVocab, kVocab + kExtra - 1, kVocab + kExtra, -1}) {
    Draft token, probe;
    token.add(id, -1, 0.5f);
    probe.add(id, -1, Draft::kProbe);
    CHECK_EQ(runtime::trouble_of(token, 4, ids).empty(), id == kVocab - 1);
    CHECK_EQ(runtime::trouble_of(probe, 4, ids).empty(), id >= 0 && id < kVocab + kExtra);
    CHECK_EQ(runtime::trouble_of(probe, 4, {kVocab, 0}).empty(), id == kVocab - 1);
  }
}

TEST("texts beside such probes are plain decoding's, and other proposers learn nothing of them") {
  const auto groups = std::make_shared<GroupProposer>();
  const std::vector<std::shared_ptr<Proposer>> proposers = {
      groups, recycling_proposer({.width = 4, .pairs = 64}), suffix_proposer(),
      lookahead_proposer()};
  Harness harness(setup_with(proposers, nullptr));
  check_texts(harness, ragged_requests(3, 6, 30), false);
  CHECK(groups->probed > 40);
  CHECK_EQ(refused(harness), 0);
  CHECK_EQ(harness.log.faults, 0);
}

TEST("a verifier that asks for distributions gets no such probe") {
  const auto groups = std::make_shared<GroupProposer>();
  Harness harness(setup_with({groups}, rejection_verifier()));
  for (const Ask& ask : ragged_requests(3, 4, 30)) harness.engine->add(ask.prompt, ask.params);
  harness.finish();
  CHECK_EQ(groups->probed, 0);
  CHECK(refused(harness) > 0);
}

CHECK_MAIN()
