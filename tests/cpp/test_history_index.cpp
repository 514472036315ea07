// history_index beside float64: the scores of pages that it keeps, and that the pages it chooses
// are those for which the network gives most of them; at every ISA level.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "arrays.h"
#include "check.h"
#include "kv_model.h"
#include "ops/history_index.h"
#include "ops/registry.h"

namespace {

using namespace effinfer;
using namespace effinfer::ops;

constexpr int32_t kKvHeads = 2;
constexpr int32_t kDim = 16;
constexpr float kScale = 0.4f;
constexpr int32_t kEvery = 7;
constexpr int32_t kKept = 2;  // pages

// A score has the roundings of a logit of 16 products of numbers below 5, and of a logarithm.
constexpr double kScoreError = 2e-4;
// A hidden channel sums 96 products of scores below 15 with weights below 1, rounded each.
constexpr double kGuessError = 5e-3;

// What a KV head of a sequence has, in float64.
struct History {
  std::vector<std::vector<double>> scores;  // [page][kHistoryRows], the newest first
  int64_t next = 0;
  int64_t all = 0;
};

KvCacheConfig config(DType dtype) {
  KvCacheConfig config;
  config.num_layers = 2;
  config.num_kv_heads = kKvHeads;
  config.head_dim = kDim;
  config.dtype = dtype;
  config.num_pages = 64;
  return config;
}

// Texts, whose rows are fed behind each other.
struct Fixture {
  Fixture(DType dtype, int32_t group, const std::vector<int32_t>& first, int32_t count)
      : heads(kKvHeads * group), rows(count), model(config(dtype)) {
    std::mt19937 random(3);
    for (const int32_t before : first) {
      std::vector<int32_t> tokens(static_cast<size_t>(before + count));
      for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 1000);
      ids.push_back(model.create({}));
      model.feed(ids.back(), tokens);
      const auto pages = model.cache.pages(ids.back());
      kv_indices.insert(kv_indices.end(), pages.begin(), pages.end());
      kv_indptr.push_back(static_cast<int32_t>(kv_indices.size()));
      starts.push_back(before);
      model.cache.add_plane(ids.back(), "history");
    }
    q = normals(static_cast<int64_t>(ids.size()) * count * heads * kDim, random);
    network = normals(kHistoryWeights, random);
    for (float& x : network) x *= 0.2f;
    VisitShape shape;
    shape.num_qo_heads = heads;
    shape.num_kv_heads = kKvHeads;
    shape.blocks = false;
    shape.rows = true;
    buffers = VisitBuffers(shape, 200, 8, 1500);
  }

  SlotPlane plane(size_t s) { return model.cache.plane(ids[s], "history"); }

  // Steps of the rows [begin, begin + count) of each text.
  void run(int32_t begin, int32_t count, int threads, bool with_planes = true) {
    ThreadPool pool(threads);
    qo_indptr = {0};
    kv_len.clear();
    step_q.clear();
    scored.clear();
    for (size_t s = 0; s < ids.size(); ++s) {
      qo_indptr.push_back(qo_indptr.back() + count);
      kv_len.push_back(starts[s] + begin + count);
      const float* from = query(s, begin, 0);
      step_q.insert(step_q.end(), from, from + int64_t{count} * heads * kDim);
      if (with_planes) scored.push_back({"history", plane(s), static_cast<int32_t>(s), count});
    }
    HistoryIndexProblem p;
    p.pages.q = step_q.data();
    p.pages.q_stride = heads * kDim;
    p.pages.num_qo_heads = heads;
    p.pages.kv = KvCacheAccess::layers(model.cache)[1];
    p.pages.batch.num_tokens = qo_indptr.back();
    p.pages.batch.num_sequences = static_cast<int64_t>(ids.size());
    p.pages.batch.qo_indptr = qo_indptr.data();
    p.pages.batch.kv_indptr = kv_indptr.data();
    p.pages.batch.kv_indices = kv_indices.data();
    p.pages.batch.kv_len = kv_len.data();
    if (!ancestors.empty()) p.pages.batch.ancestors = ancestors.data();
    p.pages.visits = plan = buffers.plan(p.pages.batch);
    p.pages.sm_scale = kScale;
    p.pages.sink_tokens = 64;
    p.pages.keys = kKept * 64;
    p.pages.heads = chosen.data();
    p.pages.max_kv_len = 1500;
    p.network = network.data();
    p.every = kEvery;
    p.pages.planes = {"history", scored.data(), static_cast<int64_t>(scored.size()), kKvHeads};
    run_alone(p, pool);
  }

  const float* query(size_t s, int32_t row, int32_t head) const {
    const int64_t at = (static_cast<int64_t>(s) * rows + row) * heads + head;
    return q.data() + at * kDim;
  }
  const uint64_t* list(size_t s, int32_t row, int32_t head) const {
    return plan.list(plan.first_block[s] + row, head);
  }

  int32_t heads, rows;
  KvModel model;
  std::vector<SequenceId> ids;
  std::vector<int32_t> starts, qo_indptr, kv_indptr = {0}, kv_indices, kv_len;
  std::vector<float> q, step_q, network;
  std::vector<uint64_t> ancestors;
  std::vector<ScoredRows> scored;
  std::vector<IndexedHead> chosen = std::vector<IndexedHead>(kKvHeads, IndexedHead::chosen);
  VisitBuffers buffers;
  VisitPlan plan;
};

double guess(const std::vector<float>& network, const History& history, int64_t page) {
  const float* const bias = network.data() + kHistoryFilter;
  double score = 0.0;
  for (int64_t c = 0; c < kHistoryChannels; ++c) {
    double hidden = bias[c];
    for (int64_t n = 0; n < kHistoryPages; ++n) {
      const int64_t from = page + n - 1;
      if (from < 0 || from >= static_cast<int64_t>(history.scores.size())) continue;
      for (int64_t age = 0; age < kHistoryRows; ++age) {
        hidden +=
            double{network[static_cast<size_t>((n * kHistoryRows + age) * kHistoryChannels + c)]} *
            history.scores[static_cast<size_t>(from)][static_cast<size_t>(age)];
      }
    }
    score += std::max(hidden, 0.0) * bias[kHistoryChannels + c];
  }
  for (int64_t age = 0; age < kHistoryRows; ++age) {
    score += double{bias[2 * kHistoryChannels + age]} *
             history.scores[static_cast<size_t>(page)][static_cast<size_t>(age)];
  }
  return score;
}

// 14 + log2 of the greatest probability of the keys of the pages that a row visits; -1 of others.
std::vector<double> page_scores(const Fixture& f, size_t s, int32_t row, int32_t kv_head,
                                const uint64_t* words, int64_t whole) {
  const auto& keys =
      f.model.sequences.at(f.ids[s]).rows[0][static_cast<size_t>(kKvHeads + kv_head)];
  std::vector<double> scores(static_cast<size_t>(whole), -1.0);
  const int32_t group = f.heads / kKvHeads;
  for (int32_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const float* q = f.query(s, row, head);
    std::vector<double> most(static_cast<size_t>(whole), -1e30);
    double total = 0.0;
    for (int64_t slot = 0; slot < whole * 64; ++slot) {
      if (words[slot / 64] != ~uint64_t{0}) continue;
      double logit = 0.0;
      for (size_t d = 0; d < kDim; ++d) {
        logit += double{q[d]} * keys[static_cast<size_t>(slot)].k[d] * double{kScale};
      }
      total += std::exp(logit);
      double& of_page = most[static_cast<size_t>(slot / 64)];
      of_page = std::max(of_page, logit);
    }
    for (size_t page = 0; page < most.size(); ++page) {
      if (words[page] != ~uint64_t{0}) continue;
      const double score = 14.0 + (most[page] - std::log(total)) / std::log(2.0);
      scores[page] = std::max({scores[page], score, 0.0});
    }
  }
  return scores;
}

// Looks at a row's list, and plays what the history becomes by it. Whether it chose.
bool follow(const Fixture& f, size_t s, int32_t row, int32_t step_row, int32_t head,
            History& history) {
  const int64_t place = f.starts[s] + row;
  const int64_t whole = place / 64;
  const uint64_t* words = f.list(s, step_row, head);
  const bool follows = history.next == place;
  const bool sees_all = !follows || place - history.all >= kEvery;
  if (sees_all) {
    history.all = place;
    for (int64_t page = 0; page <= whole; ++page) CHECK_EQ(words[page], ~uint64_t{0});
  } else {
    CHECK_EQ(words[0], ~uint64_t{0});
    CHECK_EQ(words[whole - 1], ~uint64_t{0});
    CHECK_EQ(words[whole], ~uint64_t{0} >> (63 - place % 64));
    std::vector<double> guesses;
    for (int64_t page = 1; page < whole - 1; ++page) {
      guesses.push_back(guess(f.network, history, page));
    }
    std::vector<double> sorted = guesses;
    std::ranges::sort(sorted, std::greater());
    const double least = sorted[kKept - 1], next = sorted[kKept];
    int count = 0;
    for (size_t i = 0; i < guesses.size(); ++i) {
      const uint64_t word = words[i + 1];
      CHECK(word == 0 || word == ~uint64_t{0});
      count += word != 0 ? 1 : 0;
      if (word != 0) CHECK(guesses[i] >= least - kGuessError);
      if (word == 0) CHECK(guesses[i] <= next + kGuessError);
    }
    CHECK_EQ(count, kKept);
  }
  const std::vector<double> scores = page_scores(f, s, row, head, words, whole);
  if (!follows) history.scores.clear();
  for (size_t page = 0; page < scores.size(); ++page) {
    if (page == history.scores.size()) {
      history.scores.emplace_back(kHistoryRows, follows ? 0.0 : scores[page]);
    }
    auto& own = history.scores[page];
    const double score = words[page] == ~uint64_t{0} ? scores[page] : own[0];
    own.insert(own.begin(), score);
    own.pop_back();
  }
  history.next = place + 1;
  return !sees_all;
}

void check_plane(Fixture& f, size_t s, int32_t head, const History& history) {
  const SlotPlane plane = f.plane(s);
  const float* own = plane.values + (kKvHeads + head) * plane.stride;
  CHECK_EQ(own[kHistoryNext], static_cast<float>(history.next));
  CHECK_EQ(own[kHistoryAll], static_cast<float>(history.all));
  CHECK_EQ(own[kHistoryWhole], static_cast<float>(history.scores.size()));
  double worst = 0.0;
  for (size_t page = 0; page < history.scores.size(); ++page) {
    for (int64_t age = 0; age < kHistoryRows; ++age) {
      const int64_t number = (history.next - 1 - age) % kHistoryRows;
      const double got = own[page * 64 + static_cast<size_t>(number)];
      worst = std::max(worst, std::abs(got - history.scores[page][static_cast<size_t>(age)]));
    }
  }
  CHECK(worst <= kScoreError);
}

TEST("pages are chosen, and remembered, as float64 has them") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int32_t group : {1, 3}) {
      at_every_isa([&] {
        // The second text begins where all keys are visited, the third fills a page.
        Fixture f(dtype, group, {700, 300, 500}, 60);
        std::vector<History> histories(f.ids.size() * kKvHeads);
        int chose = 0;
        for (int32_t row = 0; row < 60; ++row) {
          f.run(row, 1, 1 + row % 2);
          for (size_t s = 0; s < f.ids.size(); ++s) {
            for (int32_t head = 0; head < kKvHeads; ++head) {
              const int64_t whole = (f.starts[s] + row) / 64;
              if (whole - 2 <= kKept) continue;  // there is nothing to choose
              chose += follow(f, s, row, 0, head, histories[s * kKvHeads + size_t(head)]) ? 1 : 0;
            }
          }
        }
        CHECK(chose > 150);
        for (size_t i = 0; i < histories.size(); ++i) {
          check_plane(f, i / kKvHeads, static_cast<int32_t>(i % kKvHeads), histories[i]);
        }
      });
    }
  }
}

std::vector<float> numbers(Fixture& f, size_t s) {
  const SlotPlane plane = f.plane(s);
  return {plane.values, plane.values + plane.num_heads * plane.stride};
}

TEST("rows that share a step leave the bits of a step each") {
  at_every_isa([] {
    Fixture each(DType::bf16, 3, {700, 500}, 60), together(DType::bf16, 3, {700, 500}, 60);
    for (int32_t row = 0; row < 60; ++row) each.run(row, 1, 1);
    together.run(0, 20, 2);
    together.run(20, 1, 3);
    together.run(21, 39, 1);
    for (size_t s = 0; s < 2; ++s) {
      CHECK(numbers(each, s) == numbers(together, s));
      for (int32_t head = 0; head < kKvHeads; ++head) {
        const uint64_t* last = each.list(s, 0, head);
        const int64_t words = (each.kv_len[s] + 63) / 64;
        CHECK(std::equal(last, last + words, together.list(s, 38, head)));
      }
    }
  });
}

TEST("a row that does not follow the last one visits all keys, and so does one without a history") {
  Fixture f(DType::f32, 2, {700}, 40);
  const auto sees_all = [&] {
    const uint64_t* words = f.list(0, 0, 0);
    return std::all_of(words, words + 10, [](uint64_t word) { return word == ~uint64_t{0}; });
  };
  f.run(0, 1, 1);
  CHECK(sees_all());
  f.run(1, 1, 1);
  CHECK(!sees_all());
  f.run(5, 1, 1);
  CHECK(sees_all());
  f.run(6, 1, 1);
  CHECK(!sees_all());
  const std::vector<float> before = numbers(f, 0);
  f.run(7, 1, 1, false);
  CHECK(sees_all());
  CHECK(numbers(f, 0) == before);
  f.chosen.assign(kKvHeads, IndexedHead::dense);
  f.run(7, 1, 1);
  CHECK(sees_all());
}

TEST("of pages that were taken back nothing is left") {
  at_every_isa([] {
    // Each has a page full within 5 rows, and few that it chooses from.
    const std::vector<int32_t> first = {316, 318, 380, 381, 382, 444, 446, 508};
    Fixture once(DType::f32, 2, first, 12), again(DType::f32, 2, first, 12);
    once.run(0, 12, 1);
    again.run(0, 12, 1);
    again.run(0, 12, 1);
    for (size_t s = 0; s < first.size(); ++s) {
      CHECK(numbers(once, s) == numbers(again, s));
      for (int32_t row = 0; row < 12; ++row) {
        const int64_t words = (first[s] + row) / 64 + 1;
        for (int32_t head = 0; head < kKvHeads; ++head) {
          const uint64_t* list = once.list(s, row, head);
          CHECK(std::equal(list, list + words, again.list(s, row, head)));
        }
      }
    }
  });
}

TEST("rows of a tree visit all keys and leave the history as it is") {
  Fixture f(DType::f32, 2, {700}, 40);
  f.run(0, 2, 1);
  const std::vector<float> before = numbers(f, 0);
  f.ancestors = {1, 3, 5};
  f.run(2, 3, 1);
  CHECK(numbers(f, 0) == before);
  for (int32_t row = 0; row < 3; ++row) {
    const uint64_t* words = f.list(0, row, 1);
    for (int64_t page = 0; page <= (702 + row) / 64; ++page) CHECK_EQ(words[page], ~uint64_t{0});
  }
}

}  // namespace

CHECK_MAIN()
