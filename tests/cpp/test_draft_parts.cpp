// The parts that speculation is made of, each alone: the index of n-grams, measured step times,
// calibration, trees, the controller by cost.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "effinfer/speculative.h"
#include "runtime/speculative/calibration.h"
#include "runtime/speculative/draft.h"
#include "runtime/speculative/ngram_index.h"
#include "runtime/speculative/pace.h"
#include "runtime/speculative/step_times.h"

using namespace effinfer;
using namespace effinfer::runtime;

namespace {

std::vector<int32_t> random_text(std::mt19937& random, size_t size, uint32_t vocab) {
  std::vector<int32_t> text(size);
  for (int32_t& token : text) token = static_cast<int32_t>(random() % vocab);
  return text;
}

// How many of the last tokens of `text` stand before `next` in `all`, from `first` on.
int32_t agreement(const std::vector<int32_t>& all, int64_t first, int64_t next,
                  const std::vector<int32_t>& text) {
  int32_t length = 0;
  while (length < NgramIndex::kLongestMatch && next - 1 - length >= first &&
         length < static_cast<int32_t>(text.size()) &&
         all[static_cast<size_t>(next - 1 - length)] ==
             text[text.size() - 1 - static_cast<size_t>(length)]) {
    ++length;
  }
  return length;
}

DraftView view_of(RequestId request, int32_t max_nodes = 63, int32_t max_depth = 63) {
  DraftView view;
  view.request = request;
  view.max_nodes = max_nodes;
  view.max_depth = max_depth;
  return view;
}

void add_node(Draft& draft, int32_t token, int32_t parent, float score, uint8_t source = 0) {
  draft.add(token, parent, score);
  draft.sources.push_back(source);
}

Draft random_tree(std::mt19937& random, int32_t nodes) {
  Draft draft;
  for (int32_t i = 0; i < nodes; ++i) {
    const auto parent = static_cast<int32_t>(random() % static_cast<uint32_t>(i + 1)) - 1;
    add_node(draft, static_cast<int32_t>(random() % 7), parent,
             static_cast<float>(random() % 100) / 100.0f);
  }
  return draft;
}

}  // namespace

TEST(
    "an index finds what scanning the text finds, whatever wrapped around and where documents "
    "end") {
  std::mt19937 random(1);
  for (int round = 0; round < 40; ++round) {
    NgramIndex index(64);
    CHECK_EQ(index.capacity(), 64);
    std::vector<int32_t> all;
    for (int piece = 0; piece < 30; ++piece) {
      const std::vector<int32_t> more = random_text(random, 1 + random() % 20, 2 + random() % 6);
      index.append(more);
      all.insert(all.end(), more.begin(), more.end());
      if (random() % 4 == 0) {
        const int32_t separator = NgramIndex::kSeparator;
        index.append({&separator, 1});
        all.push_back(separator);
      }
      CHECK_EQ(index.size(), static_cast<int64_t>(all.size()));
      const std::vector<int32_t> text = random_text(random, 2 + random() % 12, 4);
      std::array<NgramIndex::Match, 48> matches;
      const size_t found = index.find(text, 2, matches);
      std::map<int64_t, int32_t> places;
      for (size_t i = 0; i < found; ++i) {
        const auto [next, length] = matches[i];
        CHECK(next > index.first() && next < index.size());
        CHECK(all[static_cast<size_t>(next)] != NgramIndex::kSeparator);
        CHECK_EQ(length, agreement(all, index.first(), next, text));
        CHECK(length >= 2);
        CHECK(places.emplace(next, length).second);  // each once
      }
    }
  }
}

TEST("an index finds the longest match among many and the latest of equals") {
  NgramIndex index(4096);
  std::vector<int32_t> all = {1, 2, 3, 4, 5, 6, 7, 8, 9, 50};  // agrees in nine tokens
  for (int i = 0; i < 100; ++i) {
    for (const int32_t token : {8, 9, 60 + i}) all.push_back(token);  // in two
  }
  index.append(all);
  const std::vector<int32_t> text = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  std::array<NgramIndex::Match, 8> matches;
  const size_t found = index.find(text, 2, matches);
  CHECK_EQ(found, matches.size());
  CHECK_EQ(matches[0].next, 9);
  CHECK_EQ(matches[0].length, 9);
  CHECK_EQ(matches[1].next, static_cast<int64_t>(all.size()) - 1);
  CHECK_EQ(index.find(text, 10, matches), size_t{0});
  CHECK_EQ(index.find(std::vector<int32_t>{9}, 2, matches), size_t{0});
  CHECK_EQ(index.find({}, 2, matches), size_t{0});
  CHECK_EQ(NgramIndex(0).find(text, 2, matches), size_t{0});
}

TEST("an index with room finds the latest of all places") {
  std::mt19937 random(2);
  NgramIndex index(8192);
  const std::vector<int32_t> all = random_text(random, 6000, 40);
  index.append(all);
  for (int round = 0; round < 200; ++round) {
    const std::vector<int32_t> text = random_text(random, 2, 40);
    int64_t latest = static_cast<int64_t>(all.size()) - 1;
    while (latest > 1 && agreement(all, 0, latest, text) < 2) --latest;
    std::array<NgramIndex::Match, 1> match;
    CHECK_EQ(index.find(text, 2, match), latest > 1 ? size_t{1} : size_t{0});
    if (latest > 1) CHECK_EQ(match[0].next, latest);
  }
}

TEST("a document does not go on in the next one") {
  NgramIndex index(256);
  index.append(std::vector<int32_t>{1, 2, 3, 4, -1, 5, 6, 7, 8});
  std::array<NgramIndex::Match, 8> matches;
  CHECK_EQ(index.find(std::vector<int32_t>{3, 4}, 2, matches), size_t{0});  // nothing follows
  CHECK_EQ(index.find(std::vector<int32_t>{4, 5}, 2, matches), size_t{0});
  CHECK_EQ(index.find(std::vector<int32_t>{2, 3, 5, 6}, 2, matches), size_t{1});
  CHECK_EQ(matches[0].next, 7);
  CHECK_EQ(matches[0].length, 2);
}

TEST("step times: a median of the last steps, and estimates beside what was measured") {
  StepTimes times;
  CHECK_EQ(times.of(3, 100), 0.0);
  CHECK_EQ(times.count(1, 0), 0);
  times.add(1, 100, 1.0);
  CHECK(std::abs(times.of(4, 100) / StepTimes::prior(4) - 1.0) < 1e-6);  // by the prior
  CHECK(std::abs(times.of(4, 1 << 20) / StepTimes::prior(4) - 1.0) < 1e-6);
  for (const double seconds : {5.0, 1.1, 0.9, 1.0}) times.add(1, 100, seconds);
  CHECK(std::abs(times.of(1, 100) - 1.0) < 1e-6);  // an outlier moves nothing
  CHECK_EQ(times.count(1, 100), 5);
  for (int i = 0; i < 9; ++i) times.add(1, 100, 2.0);
  CHECK(std::abs(times.of(1, 100) - 2.0) < 1e-6);  // what is old is forgotten
  CHECK_EQ(times.count(1, 100), times.most_counted(1));
  times.add(5, 100, 4.0);
  CHECK(std::abs(times.of(3, 100) - 3.0) < 1e-6);  // between two
  // Another context, where a plain step takes three times as long.
  times.add(1, 4000, 6.0);
  CHECK(std::abs(times.of(5, 4000) - 12.0) < 1e-5);
  CHECK_EQ(times.count(5, 4000), 0);
  CHECK_EQ(times.most_counted(5), 1);
  // Out of range: nothing is kept, and nothing is read beyond the table.
  times.add(0, 0, 1.0);
  times.add(1000, 0, 1.0);
  CHECK(times.of(1000, 100) > 0.0);
  CHECK(times.of(-3, -5) > 0.0);
}

TEST("step times: a clock that saw nothing pass breaks nothing") {
  StepTimes times;
  times.add(1, 1 << 30, 0.0);
  CHECK(times.of(1, 1 << 30) > 0.0);
  CHECK(std::isfinite(times.of(160, 1 << 30)));
}

TEST("calibration: what comes true is believed, by proposer, by score and by request") {
  Calibration calibration;
  CHECK(std::abs(calibration.probability(1, 0, 0.5f, 1) - 0.5f) < 1e-6f);
  const std::vector<int32_t> text = {1, 2, 3};
  for (int step = 0; step < 300; ++step) {
    for (const RequestId request : {1, 2}) {
      // Proposer 0 is sure and wrong; proposer 1 doubts and is right, for the first request.
      Draft draft;
      add_node(draft, 9, -1, 0.9f, 0);
      add_node(draft, request == 1 ? 3 : 8, -1, 0.3f, 1);
      add_node(draft, 7, 0, 0.9f, 0);  // below what was wrong: tells nothing
      StepFacts facts;
      facts.request = request;
      facts.tokens = text;
      facts.num_emitted = 1;
      facts.proposed = &draft;
      calibration.observe(facts);
    }
  }
  CHECK(calibration.probability(1, 0, 0.9f, 1) < 0.1f);
  CHECK(calibration.probability(1, 1, 0.3f, 1) > 0.6f);
  CHECK(calibration.probability(2, 1, 0.3f, 1) < 0.2f);
  CHECK(calibration.probability(3, 1, 0.3f, 1) > 0.3f);  // unknown: as requests are in general
  const float deeper = calibration.probability(1, 0, 0.9f, 2);
  CHECK(deeper > calibration.probability(1, 0, 0.9f, 1));
  calibration.forget(1);
  CHECK(calibration.probability(1, 1, 0.3f, 1) == calibration.probability(3, 1, 0.3f, 1));
}

TEST("a planted tree is in preorder, closed, and on the pages of plain decoding") {
  std::mt19937 random(3);
  DraftTree tree;
  tree.reserve();
  for (int round = 0; round < 2000; ++round) {
    const Draft draft = random_tree(random, static_cast<int32_t>(random() % 64));
    const uint64_t all = (uint64_t{1} << draft.size()) - 1;
    const uint64_t keep = (uint64_t{random()} << 32 | random()) & all;
    const TreePlace place = {static_cast<int64_t>(random() % 200), 64};
    plant(draft, keep, place, tree);
    const size_t nodes = tree.draft.tokens.size();
    CHECK_EQ(tree.words.size(), nodes + 1);
    CHECK_EQ(tree.words[0], uint64_t{1});
    CHECK(nodes <= static_cast<size_t>(std::popcount(keep)));
    bool chain = true;
    for (size_t i = 0; i < nodes; ++i) {
      const int32_t parent = tree.draft.parents[i];
      CHECK(parent < static_cast<int32_t>(i) && parent >= -1);
      chain &= parent == static_cast<int32_t>(i) - 1;
      const auto above = static_cast<size_t>(parent + 1);
      CHECK_EQ(tree.words[i + 1], tree.words[above] | uint64_t{1} << (i + 1));
      CHECK_EQ(tree.depths[i + 1], tree.depths[above] + 1);
      const int64_t row = place.root + 1 + static_cast<int64_t>(i);
      CHECK_EQ(row / 64, (place.root + tree.depths[i + 1]) / 64);
      // Preorder: a node follows its parent or what descends from an earlier sibling.
      CHECK(parent == static_cast<int32_t>(i) - 1 || (tree.words[i] >> above & 1) != 0);
    }
    CHECK_EQ(tree.is_chain(), chain);
    const size_t cut = random() % 8;
    tree.cut(cut);
    CHECK_EQ(tree.draft.tokens.size(), std::min(cut, nodes));
    CHECK_EQ(tree.words.size(), std::min(cut, nodes) + 1);
  }
}

TEST("merged drafts share nodes and keep to the view's room and depth") {
  std::mt19937 random(4);
  for (int round = 0; round < 500; ++round) {
    Draft all;
    const DraftView view =
        view_of(1, 1 + static_cast<int32_t>(random() % 63), 1 + static_cast<int32_t>(random() % 9));
    for (uint8_t source = 0; source < 4; ++source) {
      const Draft draft = random_tree(random, static_cast<int32_t>(random() % 64));
      merge(draft, source, view, all);
      CHECK(all.size() <= view.max_nodes);
    }
    CHECK_EQ(trouble_of(all, view.max_nodes, {7, 7}), "");
    CHECK_EQ(all.sources.size(), all.tokens.size());
    std::vector<int32_t> depths;
    for (int32_t i = 0; i < all.size(); ++i) {
      const auto node = static_cast<size_t>(i);
      const int32_t parent = all.parents[node];
      depths.push_back(parent < 0 ? 1 : depths[static_cast<size_t>(parent)] + 1);
      CHECK(depths.back() <= view.max_depth);
      CHECK_EQ(all.child(parent, all.tokens[node]), i);  // no duplicate below a parent
    }
  }
}

TEST("children are looked for where there can be any") {
  Draft draft;
  draft.add(5, -1, 0.5f);
  CHECK_EQ(draft.child(-1, 5), 0);
  for (const int32_t parent : {INT32_MIN, -5, 0, 1, INT32_MAX})
    CHECK_EQ(draft.child(parent, 5), -1);
}

TEST("drafts of a model get as long as they pay") {
  Pace pace;
  CHECK_EQ(pace.depth(6), 2);  // nothing is known
  for (int i = 0; i < 200; ++i) {
    pace.add_level(1.0);
    pace.add_step(8.0, true);
    pace.count(6, 6);
  }
  CHECK_EQ(pace.depth(6), 6);
  CHECK(pace.pays(0.9f));
  CHECK(!pace.pays(0.05f));
  for (int i = 0; i < 600; ++i) pace.count(6, 2);  // never right beyond the second
  CHECK_EQ(pace.depth(6), 2);
  for (int i = 0; i < 600; ++i) pace.count(6, 0);
  int drafted = 0;
  for (int i = 0; i < 640; ++i) drafted += pace.depth(6) > 0 ? 1 : 0;
  CHECK_EQ(drafted, 3);  // after 64, 128 and 256 calls, so that a change is seen
  for (int i = 0; i < 1000; ++i) pace.count_guess(0.5f, i % 10 == 0);
  CHECK(std::abs(pace.belief(0.5f) - 0.1f) < 0.05f);
  CHECK(pace.belief(0.99f) > 0.9f);
}

TEST("drafts that never pay are tried for a two hundredth of the time") {
  for (const double reading : {0.0, 2.0, 30.0}) {
    for (const double level : {0.9, 3.0}) {
      Pace pace;
      double elapsed = 0.0;
      double first = 0.0;
      double tried = 0.0;
      double longest = 0.0;
      int32_t tries = 0;
      for (int step = 0; step < 200000; ++step) {
        const int32_t depth = pace.depth(6);
        const double draft = depth > 0 ? reading + depth * level : 0.0;
        if (depth > 0) {
          for (int32_t i = 0; i < depth; ++i) pace.add_level(level);
          first = tries == 0 ? draft : first;
          ++tries;
        }
        pace.add_draft(draft);
        pace.add_step(1.0, depth > 0);
        if (depth > 0) pace.count(depth, 0);
        elapsed += draft + 1.0;
        tried += draft;
        longest = std::max(longest, draft);
        // What a try costs is known from the last one.
        CHECK(tried <= std::max(first, 0.005 * elapsed + longest));
      }
      CHECK(tries > 10);
      CHECK(tried <= 0.0051 * elapsed);
    }
  }
}

TEST("drafts that begin to pay are noticed") {
  Pace pace;
  int32_t right = 0;
  int32_t noticed = -1;
  for (int step = 0; step < 20000 && noticed < 0; ++step) {
    if (step == 5000) right = 6;
    const int32_t depth = pace.depth(6);
    if (depth > 2) noticed = step;
    if (depth > 0) pace.add_level(0.2);
    pace.add_draft(0.2 * depth);
    pace.add_step(1.0, depth > 0);
    if (depth > 0) pace.count(depth, std::min(depth, right));
  }
  CHECK(noticed > 5000);
  CHECK(noticed < 15000);
}

CHECK_MAIN()
