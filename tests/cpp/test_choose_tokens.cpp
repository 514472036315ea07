// Sets of tokens and the methods that fill them, beside sets of single tokens.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "cpu/choose_tokens.h"

using namespace effinfer;
using namespace effinfer::cpu;

namespace {

// The tokens before `limit` that the spans have, one by one.
std::vector<bool> tokens_of(const TokenSet& set, int64_t limit) {
  std::vector<int32_t> spans;
  const int32_t count = set.append_spans(limit, spans);
  CHECK(spans.size() == 2 * static_cast<size_t>(count));
  std::vector<bool> tokens(static_cast<size_t>(limit));
  int32_t last = -1;
  for (size_t i = 0; i < spans.size(); i += 2) {
    // Ascending, none empty, none that touch.
    CHECK(spans[i] > last && spans[i] < spans[i + 1] && spans[i + 1] <= limit);
    last = spans[i + 1];
    std::fill(tokens.begin() + spans[i], tokens.begin() + spans[i + 1], true);
  }
  return tokens;
}

TEST("ranges that leave the set are cut, and come back as spans") {
  std::mt19937 random(1);
  for (const int64_t size : {1, 63, 64, 65, 200}) {
    std::vector<uint64_t> words(static_cast<size_t>(TokenSet::words_of(size)));
    const TokenSet set(words.data(), static_cast<int64_t>(words.size()));
    for (int round = 0; round < 50; ++round) {
      set.clear();
      std::vector<bool> expected(static_cast<size_t>(size));
      for (int i = 0; i < 3; ++i) {
        const int64_t begin = static_cast<int64_t>(random() % 300) - 50;
        const int64_t end = begin + static_cast<int64_t>(random() % 90) - 10;
        set.add(begin, end);
        for (int64_t t = std::max<int64_t>(0, begin); t < std::min(size, end); ++t) {
          expected[static_cast<size_t>(t)] = true;
        }
      }
      CHECK(tokens_of(set, size) == expected);
      const int64_t limit = static_cast<int64_t>(random() % static_cast<uint64_t>(size)) + 1;
      expected.resize(static_cast<size_t>(limit));
      CHECK(tokens_of(set, limit) == expected);
    }
  }
}

TEST("columns and slashes in either order of distances") {
  constexpr int64_t kCount = 150;
  std::mt19937 random(2);
  std::vector<float> columns(kCount), near(kCount), far(kCount);
  for (float& x : columns) x = static_cast<float>(random() % 1000);
  for (int64_t i = 0; i < kCount; ++i) {
    near[static_cast<size_t>(i)] = static_cast<float>(i * 37 % kCount);  // all differ
    far[static_cast<size_t>(kCount - 1 - i)] = near[static_cast<size_t>(i)];
  }
  std::vector<int32_t> order(kCount);
  const auto visited = [&](const std::vector<float>& slashes, DistanceOrder first) {
    std::vector<uint64_t> memory(9);
    const ChosenColumns chosen = {{memory.data(), 3}, {memory.data() + 3, 3}};
    choose_keys(columns.data(), kCount, {5, 0.0f}, order.data(), chosen.keys);
    choose_distances(slashes.data(), kCount, first, {4, 0.0f}, order.data(), chosen.distances);
    const TokenSet set(memory.data() + 6, 2);  // the keys up to the block's last row
    add_columns(chosen, {0, 0, 20, 90}, set);
    return tokens_of(set, 110);
  };
  const std::vector<bool> got = visited(near, DistanceOrder::nearest_first);
  CHECK(got == visited(far, DistanceOrder::farthest_first));
  for (int64_t t = 0; t < 110; ++t) {
    const auto higher = std::count_if(columns.begin(), columns.end(), [&](const float& x) {
      const float own = columns[static_cast<size_t>(t)];
      return x > own || (x == own && &x < &columns[static_cast<size_t>(t)]);
    });
    bool expected = higher < 5;
    for (int64_t row = 90; row < 110; ++row) {
      if (row >= t) expected |= near[static_cast<size_t>(row - t)] >= kCount - 4;
    }
    CHECK(got[static_cast<size_t>(t)] == expected);
  }
}

TEST("as few as hold a mass") {
  std::mt19937 random(3);
  for (const int64_t count : {1, 2, 63, 500}) {
    for (const float mass : {0.1f, 0.5f, 0.95f, 1.0f}) {
      // Whole numbers: sums are exact in any order. Many are equal, and some are zeros.
      std::vector<float> scores(static_cast<size_t>(count));
      for (float& x : scores) x = static_cast<float>(random() % 9);
      scores[0] = 20.0f;
      std::vector<int32_t> order(scores.size());
      std::vector<uint64_t> memory(static_cast<size_t>(TokenSet::words_of(count)));
      const TokenSet set(memory.data(), static_cast<int64_t>(memory.size()));
      choose_keys(scores.data(), count, {0, mass}, order.data(), set);
      std::vector<int32_t> sorted(scores.size());
      std::iota(sorted.begin(), sorted.end(), 0);
      const auto score = [&](int32_t i) {
        return static_cast<double>(scores[static_cast<size_t>(i)]);
      };
      std::stable_sort(sorted.begin(), sorted.end(),
                       [&](int32_t a, int32_t b) { return score(a) > score(b); });
      const double all = std::accumulate(scores.begin(), scores.end(), 0.0);
      std::vector<bool> expected(scores.size());
      double sum = 0.0;
      for (const int32_t i : sorted) {
        if (sum >= static_cast<double>(mass) * all) break;
        sum += score(i);
        expected[static_cast<size_t>(i)] = true;
      }
      CHECK(tokens_of(set, count) == expected);
      std::fill(scores.begin(), scores.end(), 0.0f);
      set.clear();
      choose_keys(scores.data(), count, {0, mass}, order.data(), set);
      CHECK(tokens_of(set, count) == std::vector<bool>(scores.size()));
    }
  }
}

TEST("blocks, and what is visited in any case") {
  const std::vector<float> scores = {1.0f, 5.0f, 2.0f, 4.0f};
  std::vector<int32_t> order(scores.size());
  std::vector<uint64_t> memory(2);
  const TokenSet set(memory.data(), 2);
  add_blocks(scores.data(), 4, {2, 0.0f}, 16, order.data(), set);
  add_always({3, 10}, {0, 0, 8, 70}, set);
  const std::vector<bool> got = tokens_of(set, 128);
  for (int64_t t = 0; t < 128; ++t) {
    const bool block = (t >= 16 && t < 32) || (t >= 48 && t < 64);
    CHECK(got[static_cast<size_t>(t)] == (t < 3 || block || (t >= 61 && t < 78)));
  }
}

}  // namespace
CHECK_MAIN()
