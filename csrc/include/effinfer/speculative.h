// Speculative decoding: guesses of the next tokens, verified in one step beside the token that the
// step computes anyway.
//
// A Proposer guesses, as a chain or a tree. A DraftController says which guesses are worth a row of
// the step. A Verifier walks the tree along the rows' logits. With the default verifier a text is
// plain decoding's, whatever the others do: see docs/speculation.md.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "effinfer/compiler.h"
#include "effinfer/export.h"
#include "effinfer/model.h"
#include "effinfer/sampling.h"

namespace effinfer {

using RequestId = int64_t;

// Tokens guessed to follow a request's text. A parent comes before its children.
struct EFFINFER_API Draft {
  static constexpr int32_t kMostNodes = 63;

  std::vector<int32_t> tokens;
  std::vector<int32_t> parents;  // an earlier node; -1: the request's last token
  std::vector<float> scores;     // believed P(token | parent), in [0, 1]; kProbe: a probe
  // The proposer of each node, an index into Speculation::proposers; the engine fills it in.
  std::vector<uint8_t> sources;

  // A node that is worth its row for what its logits tell: it takes a place like a certain one. Its
  // id may be one that no token has, where the model's embedding has more rows than there are
  // logits and the verifier needs no distributions.
  static constexpr float kProbe = 2.0f;

  // How the children of a row got their tokens. Those that were drawn are in the order in which
  // they were: independently of each other, or each from what those before it had left.
  enum class Draw : uint8_t { none, with_replacement, without_replacement };
  struct Candidate {
    int32_t token;
    float probability;
  };
  struct Range {
    int32_t first = 0;
    int32_t count = 0;
  };
  static constexpr int32_t kMostCandidates = 64;  // of a row

  // What children were drawn from, for verifiers that need it: all that could have been drawn, so
  // whoever draws does it from kMostCandidates tokens at most. Row 0 is the root's, row i + 1 that
  // of node i; the children of a row without candidates were chosen.
  Draw draw = Draw::none;
  std::vector<Candidate> candidates;  // of all rows
  std::vector<Range> ranges;          // by row, into `candidates`; rows at the end may lack

  // Why there is no draft for this request, where its user shall know; empty: no reason.
  std::string refusal;

  std::span<const Candidate> candidates_of(int32_t row) const;
  void set_candidates(int32_t row, std::span<const Candidate> list);

  int32_t size() const { return static_cast<int32_t>(tokens.size()); }
  void clear();
  // Returns the node's number. There is no check: the engine refuses what is wrong as a whole.
  int32_t add(int32_t token, int32_t parent, float score);
  // The child of `parent` with that token, or -1.
  int32_t child(int32_t parent, int32_t token) const;
};

// What a proposer sees of a request.
struct DraftView {
  RequestId request = 0;
  std::span<const int32_t> tokens;  // prompt and output; drafts follow the last one
  size_t prompt_size = 0;
  const SamplingParams* params = nullptr;
  int32_t max_nodes = 0;
  int32_t max_depth = 0;  // of a child of the root: 1
  // Whether the verifier makes use of drawn tokens (Draft::candidates). How many nodes such a draft
  // has, and where, must not depend on the tokens that were drawn for them: what would have been
  // drawn and left out could not be told from what was not.
  bool draws = false;
  // Whether the text will be plain decoding's (Guarantee::same_text): the n-th token of the output
  // is then drawn with the uniform number of params->seed and n, which a proposer may compute too.
  bool same_text = false;
};

// A value of the model's graph, of all rows of a step.
struct OutputRows {
  std::string_view name;
  NamedRows rows;
};

// What a step gave a request.
struct EFFINFER_API StepFacts {
  RequestId request = 0;
  std::span<const int32_t> tokens;  // prompt and output, this step's tokens included
  size_t prompt_size = 0;
  size_t num_emitted = 0;             // tokens at the end that are this step's
  const Draft* proposed = nullptr;    // all guesses; empty: nobody was asked
  const Draft* verified = nullptr;    // those with a row: row i + 1 is of node i, row 0 of the root
  std::span<const int32_t> accepted;  // nodes of `verified` on the path taken, from the root on
  // The highest logits of each row, where a proposer needs them: [1 + verified->size(), k].
  TopLogits top;
  // Values of the graph that proposers asked for, of all requests' rows; this request's begin with
  // first_row. None where a step's rows were not kept.
  std::span<const OutputRows> outputs;
  size_t first_row = 0;

  // One of them at this request's rows, [1 + verified->size(), cols]; no values: there are none.
  NamedRows output(std::string_view name) const;
};

// What a proposer with a device of its own has done.
struct DraftingStats {
  std::string name;
  std::string device;     // "cpu:1"
  int64_t levels = 0;     // guesses of a token for some requests
  int64_t cancelled = 0;  // levels that were void before their end
  int64_t asked = 0;      // drafts that steps asked for
  int64_t late = 0;       // of these: nothing was there yet
};

class EFFINFER_API Proposer {
 public:
  virtual ~Proposer() = default;
  virtual std::string_view name() const = 0;
  // The highest logits of each row that observe() wants to see; 0: none.
  virtual int32_t top_k() const { return 0; }
  // Values of the model's graph, f32[R, size], by their names: observe() wants to see them at each
  // row. Asked once, before the graph is compiled, which then returns them too.
  virtual std::vector<std::string> outputs() const { return {}; }
  // Called once, before attach(): the executable of the engine's model, which outlives the
  // proposer's use of it. What it throws is what the engine throws.
  virtual void bind(Executable& /*target*/) {}
  // Called once, by the engine that the proposer is of.
  virtual void attach(int64_t /*vocab_size*/) {}
  // Fills the empty drafts, one a view. One that throws, and a draft with unknown ids, a parent
  // that is not earlier, too many nodes or a score out of range leave their requests undrafted.
  virtual void propose(std::span<const DraftView> views, std::span<Draft> drafts) = 0;
  // Called after each step with every request that got a token.
  virtual void observe(std::span<const StepFacts>) {}
  // The request has ended, or lost its state.
  virtual void forget(RequestId) {}
  // Of a proposer with a device of its own: what it does during the next `target_steps` steps is
  // recorded. Between two steps.
  virtual void start_profile(int64_t /*target_steps*/) {}
  virtual std::optional<NamedProfile> take_profile() { return {}; }
  // From any thread.
  virtual std::optional<DraftingStats> drafting() const { return {}; }
};

// The rows of a request in a step, to a verifier: row 0 is of the request's last token, row i + 1
// of the draft's node i.
class EFFINFER_API TokenRows {
 public:
  virtual ~TokenRows() = default;
  virtual RequestId request() const = 0;
  // What plain decoding would draw from the row's logits after what was emitted so far: the same
  // seed, the same index.
  virtual SampledToken sample(int32_t row) = 0;
  // Another token, with the row's log-probabilities where the request asks for them.
  virtual SampledToken scored(int32_t row, int32_t token) = 0;
  virtual int64_t vocab_size() const = 0;
  // The distribution that sample() would draw from at the row, were the tokens of its path emitted:
  // [vocab]. Needs Verifier::needs_distributions(). Throws InvalidArgument where the request's
  // constraint does not allow the path.
  virtual void distribution(int32_t row, std::span<float> probabilities) = 0;
  // Uniform in [0, 1), of the token that is emitted next; draw 0 is what sample() uses.
  virtual double uniform(uint32_t draw) const = 0;
  // The token that follows the row. The first row emitted from is 0, each later one is a node whose
  // token was emitted last. False: the request has ended.
  virtual bool emit(int32_t row, SampledToken token) = 0;
};

// What a verifier promises of the text.
enum class Guarantee : uint8_t {
  same_text,          // plain decoding's tokens, for the same seed
  same_distribution,  // tokens of plain decoding's distribution
  lossy
};
EFFINFER_API std::string_view name(Guarantee guarantee);

class EFFINFER_API Verifier {
 public:
  virtual ~Verifier() = default;
  virtual std::string_view name() const = 0;
  virtual Guarantee guarantee() const = 0;
  virtual bool needs_distributions() const { return false; }
  // Whether it makes use of Draft::candidates. Nodes that were drawn then keep their order and get
  // scores of the engine's own, and a draft of which some were is not merged with others.
  virtual bool needs_probabilities() const { return false; }
  // Emits at least one token.
  virtual void verify(const Draft& draft, TokenRows& rows) = 0;
  virtual void forget(RequestId) {}
};

// At each row the token that plain decoding would draw; the walk follows the child that has it.
EFFINFER_API std::shared_ptr<Verifier> match_verifier();

// Rejection sampling: the text has the distribution of plain decoding, and depends on what is
// drafted. A chain as Leviathan et al. 2023 (arXiv:2211.17192) accept it, children that were drawn
// with replacement as SpecInfer does (Miao et al. 2024, arXiv:2305.09781, algorithm 2), without as
// Sequoia does (Chen et al. 2024, arXiv:2402.12374, algorithm 2). A child that was chosen is
// accepted with its probability.
EFFINFER_API std::shared_ptr<Verifier> rejection_verifier();

// The same guarantee from the leaves to the root, which accepts more: a token whose own probability
// is low may be kept for those that follow (Weng et al. 2025, Traversal Verification,
// arXiv:2505.12398; of a chain it is block verification, Sun et al. 2024, arXiv:2403.10444).
EFFINFER_API std::shared_ptr<Verifier> traversal_verifier();

// Lossy: follows the longest path of tokens that are likely enough, p > min(epsilon, delta *
// exp(-entropy)) (Cai et al. 2024, Medusa, arXiv:2401.10774, section 2.3.1).
EFFINFER_API std::shared_ptr<Verifier> typical_verifier(double epsilon = 0.09, double delta = 0.3);

// Emits given texts, whatever the logits say, and does otherwise what match_verifier() does. It
// measures what drafts would gain on a text that the model at hand would not write.
class EFFINFER_API ReplayVerifier : public Verifier {
 public:
  ReplayVerifier();
  ~ReplayVerifier() override;
  // The output of a request; behind its end tokens are sampled.
  void set(RequestId request, std::vector<int32_t> text);
  std::string_view name() const override { return "replay"; }
  Guarantee guarantee() const override { return Guarantee::lossy; }
  void verify(const Draft& draft, TokenRows& rows) override;
  void forget(RequestId request) override;

 private:
  struct Texts;
  std::unique_ptr<Texts> texts_;
};

// The step that drafts would join.
struct StepBudget {
  int32_t plain_rows = 0;  // rows that run anyway
  int32_t draft_rows = 0;  // rows that drafts may take
  int64_t kv_tokens = 0;   // over all sequences of the step
  int32_t requests = 0;    // that get a token with drafts or without, asked for drafts or not
};

struct StepCost {
  int32_t rows = 0;
  int32_t draft_rows = 0;  // of the rows
  int64_t kv_tokens = 0;
  double seconds = 0;          // of the step's run and the choice of its tokens
  double propose_seconds = 0;  // of what came before it
  bool decoding = false;       // whether all rows are of decoding
};

class EFFINFER_API DraftController {
 public:
  virtual ~DraftController() = default;
  virtual std::string_view name() const = 0;
  // Nodes to ask for; 0: nobody is asked.
  virtual int32_t budget(const DraftView& view) = 0;
  // Sets bit i of a draft's word where its node i shall have a row. Nodes without their parents,
  // and more than budget.draft_rows, get none.
  virtual void choose(std::span<const DraftView> views, std::span<const Draft> drafts,
                      const StepBudget& budget, std::span<uint64_t> keep) = 0;
  virtual void observe(const StepCost& cost, std::span<const StepFacts> facts) = 0;
  virtual void forget(RequestId) {}
};

// Nodes of all requests compete by path probability, calibrated by what was accepted, against the
// measured time of a step with that many rows, down to none. `most_nodes` bounds a draft.
EFFINFER_API std::shared_ptr<DraftController> cost_controller(int32_t most_nodes = 24);
// The first `count` nodes of every draft, whatever they cost.
EFFINFER_API std::shared_ptr<DraftController> fixed_controller(int32_t count);

// Continues the text as it went on where its last tokens occurred before: in the request's own
// text, in those of the requests beside it with `beside`, in the outputs of requests before it when
// `shared_tokens` > 0 (that many are kept), and in a corpus (Oliaro et al. 2024, SuffixDecoding,
// arXiv:2411.04975).
struct SuffixOptions {
  int64_t shared_tokens = 0;
  bool beside = false;
  std::vector<int32_t> corpus;  // documents are separated by -1
};
EFFINFER_API std::shared_ptr<Proposer> suffix_proposer(const SuffixOptions& options = {});

// A chain of what followed the last occurrence of the text's last tokens, `longest` down to
// `shortest` of them (Saxena 2023, prompt lookup decoding).
EFFINFER_API std::shared_ptr<Proposer> prompt_lookup_proposer(int32_t longest = 3,
                                                              int32_t shortest = 2,
                                                              int32_t length = 8);

// Remembers which tokens followed each token most likely, as its last row's logits said, and grows
// a tree of them (Luo et al. 2024, Token Recycling, arXiv:2408.08696). Takes 8 bytes times `width`
// a token of the vocabulary. With `pairs` > 0 it remembers the followers of that many pairs of
// tokens too, at most, and prefers them; `memory` is the share that an old distribution keeps when
// a new one comes (Liu et al. 2024, ADED, arXiv:2407.12021, section 3.1).
struct RecyclingOptions {
  int32_t width = 8;
  int32_t pairs = 0;
  float memory = 0.0f;
};
EFFINFER_API std::shared_ptr<Proposer> recycling_proposer(const RecyclingOptions& options = {});

// Guesses tokens further ahead, refines them in every step as Jacobi iteration would, in rows
// beside the drafts (probes), and drafts the n-grams of `length` tokens that they passed through
// (Fu et al. 2024, Lookahead decoding, arXiv:2402.02057). A step has width * (length - 1) - 1
// probes.
EFFINFER_API std::shared_ptr<Proposer> lookahead_proposer(int32_t width = 4, int32_t length = 3);

// A smaller model of the same vocabulary, with pages and prefixes of its own: on the target's
// threads before its step, or, with a `device`, beside it. It drafts a chain (Leviathan et al.
// 2023, arXiv:2211.17192) or, with `width` > 1, a tree: of each level the `width` likeliest nodes
// get children, and the likeliest of all are the draft (EAGLE-2's way, Li et al. 2024,
// arXiv:2406.16858, section 4). Where the verifier makes use of what tokens were drawn from, the
// last token has `width` children, drawn without replacement, and each goes on as a chain.
//
// On a device of its own it drafts while the target verifies what it drafted before, and goes on
// past that: a chain, whose nodes have `width` children of which the likeliest goes on. Its tokens
// are chosen, not drawn, also where a verifier makes use of drawn ones. A draft that is late is not
// there: with `adaptive` a step waits for it as far as that pays, else not at all. What it guessed
// wrong is cancelled within a kernel (on a GPU, within a step) and rolled back, as PipeInfer does
// it on clusters (Butler et al. 2024, arXiv:2407.11798). A device that fails ends the drafts, and
// the requests of the next step are told.
//
// Where the verifier leaves the text what plain decoding draws, at temperatures above 0, the
// numbers of those draws are known: the draft looks up what they would draw from its own
// distribution (Daliri et al. 2024, arXiv:2408.07978). A draft model that believes what the target
// does is then right always, not only where the likeliest token is drawn.
//
// A request whose text outgrows the draft's context or pages, or whose draft logits hold a NaN,
// goes on without drafts and is told once.
struct DraftModelOptions {
  std::shared_ptr<const Model> model;
  // The graph's weights are the target's own, packed once (compile_beside): layers of it, or its
  // layers with another head.
  bool of_target = false;
  int32_t length = 7;     // depth at most; a step of 8 rows with the last token
  int32_t width = 1;      // 1..8
  int32_t num_pages = 0;  // 0: for one sequence of the context, or 8192 tokens, and 8192 more
  // Shorter drafts, down to none, where those are worth their measured time by what was accepted.
  bool adaptive = true;
  std::string label = "draft_model";
  // "cpu:1", "cuda:0" (placement.h); empty: the target's threads. The cores must not be those of
  // the target, whose pool then needs a set of its own (pinned_pool).
  std::string device = {};

  // Heads (`of_target`): the graph reads, beside the text's tokens, what the target computed before
  // each of them. Its float input %hidden f32[T, n] is `hidden`, a value f32[R, n] of the target's
  // graph, at the row that the token was drawn from; at a guess, it is what the graph returned as
  // %state f32[R, n] at the row above, or without such an output what the text's last token had.
  // The graph sees the text from its first drafted token on. Empty: no heads.
  std::string hidden;
  // The models of depths from 2 on, the last one for all that are deeper; none: `model`.
  std::vector<std::shared_ptr<const Model>> deeper;
};
EFFINFER_API std::shared_ptr<Proposer> draft_model_proposer(const DraftModelOptions& options);

// How an engine speculates. Its parts keep state of the engine's requests: an engine has its own.
struct Speculation {
  std::vector<std::shared_ptr<Proposer>> proposers;  // their drafts are merged
  std::shared_ptr<Verifier> verifier;                // null: match_verifier()
  std::shared_ptr<DraftController> controller;       // null: cost_controller()
};

// What speculation did for a request.
struct SpeculationMetrics {
  static constexpr size_t kDepths = 16;        // deeper nodes count as the last
  int64_t steps = 0;                           // that verified a draft
  int64_t drafted = 0;                         // nodes with a row
  int64_t accepted = 0;                        // of these
  int64_t refused_drafts = 0;                  // of proposers: they were wrong
  Guarantee guarantee = Guarantee::same_text;  // of the engine's verifier
  std::array<int64_t, kDepths> drafted_at{};   // by depth - 1
  std::array<int64_t, kDepths> accepted_at{};
};

}  // namespace effinfer
