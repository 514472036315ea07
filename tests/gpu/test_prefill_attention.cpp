// Attention of prompts on the GPU: against float64, and the same bits as in decoding's kernel.
#include <array>
#include <random>

#include "gpu/attention_reference.h"
#include "gpu/mutations.h"

namespace effinfer {
namespace {

constexpr DType kKvTypes[] = {DType::bf16, DType::f16, DType::i8};

// In tiles of few rows, of many, and of many whose keys are divided: all the same, and right.
void check_all(const Cache& cache, const Rules& rules, std::vector<Part> parts) {
  const Batch batch(cache, rules, std::move(parts));
  const Results few = batch.run({.shares = 1});
  check_batch(cache, rules, batch, few, cache.heads().q);
  CHECK(same(few, batch.run({.shares = 1, .long_tiles = true})));
  CHECK(same(few, batch.run({.shares = 4000, .long_tiles = true})));
}

// A prompt from its start, the end of a prompt, a few rows between, and decoding.
void check_ragged(const Heads& heads, const Rules& rules, uint32_t seed) {
  Cache cache(heads, seed);
  std::vector<Part> parts;
  const int32_t lengths[] = {150, 600, 65, 0, 300};
  const int32_t rows[] = {150, 70, 3, 0, 1};
  for (int i = 0; i < 5; ++i) parts.push_back({cache.add(lengths[i]), lengths[i], rows[i]});
  cache.upload();
  check_all(cache, rules, parts);
}

TEST("prompts over every dtype") {
  uint32_t seed = 1;
  for (const DType kv : kKvTypes) check_ragged({kv, 64, 2, 2}, {}, ++seed);
}

TEST("dims of heads, groups, dtypes of queries") {
  check_ragged({DType::bf16, 128, 1, 1, DType::bf16}, {}, 11);
  check_ragged({DType::f16, 96, 1, 3, DType::f16}, {}, 12);
  check_ragged({DType::f16, 128, 1, 2, DType::f32}, {}, 13);
  check_ragged({DType::i8, 96, 1, 2, DType::bf16}, {}, 14);
  check_ragged({DType::i8, 128, 1, 1, DType::f32}, {}, 15);
  check_ragged({DType::bf16, 16, 1, 8}, {}, 16);
  check_ragged({DType::i8, 80, 1, 1}, {}, 17);
  check_ragged({DType::bf16, 112, 1, 1}, {}, 18);
}

TEST("heads of more than 128 dims") {
  check_ragged({DType::bf16, 256, 1, 1}, {}, 21);
  check_ragged({DType::f16, 256, 1, 1}, {}, 22);
  check_ragged({DType::i8, 256, 1, 1}, {}, 23);
  check_ragged({DType::bf16, 144, 1, 2}, {}, 24);
}

TEST("groups of more heads than a tile has rows") {
  check_ragged({DType::bf16, 16, 1, 17}, {}, 31);
  check_ragged({DType::bf16, 16, 1, 130}, {}, 32);
}

TEST("windows, sinks, soft caps, slopes") {
  Rules rules;
  rules.window_left = 70;
  check_ragged({DType::bf16, 32, 1, 2}, rules, 41);
  rules.sink_tokens = 3;
  check_ragged({DType::i8, 32, 1, 2}, rules, 42);
  rules.soft_cap = 2.0f;
  check_ragged({DType::f16, 64, 1, 2}, rules, 43);
  rules.slopes = {0.1f, 0.01f};
  rules.sinks = {1.0f, -40.0f};
  check_ragged({DType::i8, 64, 1, 2}, rules, 44);
  rules = {};
  rules.causal = false;
  rules.slopes = {0.0f, 0.5f};
  check_ragged({DType::bf16, 64, 1, 2}, rules, 45);
  rules.slopes = {};
  check_ragged({DType::bf16, 64, 1, 2}, rules, 46);
}

TEST("chunks that all rows see, and a window and sinks far apart") {
  Rules rules;
  for (const int32_t window : {-1, 600}) {
    rules.window_left = window;
    rules.sink_tokens = window > 0 ? 260 : 0;
    for (const DType kv : kKvTypes) {
      Cache cache({kv, 64, 1, 4}, 51);
      const int s = cache.add(1700);
      cache.upload();
      check_all(cache, rules, {{s, 1700, 40}, {s, 1000, 30}});
    }
  }
}

TEST("lists of visits") {
  std::mt19937 random(91);
  for (const DType kv : {DType::bf16, DType::i8}) {
    for (const int32_t group : {1, 3}) {
      Cache cache({kv, 64, 2, group}, 92);
      Part part = {cache.add(1400), 1400, 100};
      for (int list = 0; list < 4; ++list) {
        std::vector<uint64_t> words;
        for (int word = 0; word < 22; ++word) {
          const uint64_t bits = uint64_t{random()} << 32 | random();
          const bool whole = random() % 3 == 0 || word / 4 == 2;
          words.push_back(list == 3 ? 0 : whole ? ~uint64_t{0} : word % 9 < 5 ? 0 : bits);
        }
        part.words.push_back(words);
      }
      const Part dense = {cache.add(70), 70, 1};
      cache.upload();
      check_all(cache, {}, {dense, part});
    }
  }
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
