// Attention of prompts on the GPU: against float64, and the same bits as in decoding's kernel.
#include <array>
#include <random>

#include "gpu/attention_reference.h"
#include "gpu/mutations.h"
#include "gpu/paths.h"

namespace effinfer {
namespace {

constexpr DType kKvTypes[] = {DType::bf16, DType::f16, DType::i8};

// The rows of tiles for which there are kernels: those for blocks with little shared memory are not
// on Hopper.
std::vector<int32_t> tile_rows(const Heads& heads) {
  if (heads.dims > 128) return {64};
  if (heads.kv == DType::i8 && current_target(kGpu).arch != 90) return {128, 64};
  return {128};
}

// In tiles of few rows, of many, and of many whose keys are divided: all the same, and right.
void check_all(const Cache& cache, const Rules& rules, std::vector<Part> parts) {
  const Batch batch(cache, rules, std::move(parts));
  const Results few = batch.run({.shares = 1});
  check_batch(cache, rules, batch, few, cache.heads().q);
  for (const int32_t tile : tile_rows(cache.heads())) {
    CHECK(same(few, batch.run({.shares = 1, .long_rows = tile})));
    CHECK(same(few, batch.run({.shares = 4000, .long_rows = tile})));
    if (cache.heads().kv == DType::i8) continue;  // whose pages are in one place
    CHECK(same(few, batch.run({.shares = 1, .long_rows = tile, .far = true})));
  }
}

// A prompt from its start, the end of a prompt, a few rows between, and decoding.
void check_ragged(const Heads& heads, const Rules& rules, uint32_t seed) {
  Cache cache(heads, seed);
  std::vector<Part> parts;
  const int32_t lengths[] = {75, 330, 65, 0, 20};
  const int32_t rows[] = {75, 40, 3, 0, 1};
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
    for (const DType kv : of_one_path(kKvTypes)) {
      Cache cache({kv, 64, 1, 4}, 51);
      const int s = cache.add(1700);
      cache.upload();
      check_all(cache, rules, {{s, 1700, 40}, {s, 1000, 30}});
    }
  }
}

TEST("logits of up to 1e8") {
  for (const DType kv : kKvTypes) {
    const Heads heads = {kv, 64, 1, 3};
    for (const int32_t tile : tile_rows(heads)) {
      for (const double size : {1e4, 1e6, 1e8}) {
        check_large_logits(heads, {.shares = 1, .long_rows = tile}, size);
      }
    }
  }
}

TEST("lists of visits") {
  std::mt19937 random(91);
  constexpr DType kTypes[] = {DType::bf16, DType::i8};
  constexpr int32_t kGroups[] = {1, 3};
  for (const DType kv : of_one_path(kTypes)) {
    for (const int32_t group : of_one_path(kGroups)) {
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
      Part weighted = part;
      weighted.weigh(random);
      check_all(cache, {}, {dense, part});
      check_all(cache, {}, {part, weighted});
      check_all(cache, {true, 300, 70, 0.0f, {}, {}}, {dense, part});
    }
  }
}

TEST("lists of visits with weights, of the widest heads in int8") {
  std::mt19937 random(93);
  Cache cache({DType::i8, 256, 1, 1}, 94);
  Part part = {cache.add(520), 520, 70};
  for (int list = 0; list < 2; ++list) {
    std::vector<uint64_t> words;
    for (int word = 0; word < 9; ++word) {
      words.push_back(word % 4 == 1 ? 0 : uint64_t{random()} << 32 | random());
    }
    part.words.push_back(words);
  }
  part.weigh(random);
  cache.upload();
  check_all(cache, {}, {part});
}

TEST("planes that weigh keys, and first keys") {
  std::mt19937 random(95);
  constexpr DType kTypes[] = {DType::bf16, DType::i8};
  for (const DType kv : of_one_path(kTypes)) {
    const Heads heads = {kv, 64, 2, 3};
    Cache cache(heads, 96);
    Part whole = {cache.add(330), 330, 100};
    Part start = {cache.add(75), 75, 75};
    const Part plain = {cache.add(65), 65, 50};
    cache.upload();
    for (Part* part : {&whole, &start}) part->weigh_slots(random, heads.kv_heads);
    check_all(cache, {}, {plain, whole});
    check_all(cache, {true, 200, 5, 0.0f, {}, {}, {-1.0f, 2.0f, 0.0f, 0.5f, -0.25f, 3.0f}},
              {whole, start, plain});
  }
}

TEST("keys in chunks") {
  Rules rules;
  rules.chunk = 256;
  for (const DType kv : of_one_path(kKvTypes)) {
    Cache cache({kv, 64, 1, 2}, 97);
    const Part across = {cache.add(800), 800, 90};
    Part whole = {cache.add(600), 600, 30};
    whole.unchunked = true;
    cache.upload();
    check_all(cache, rules, {across, whole, {across.sequence, 300, 1}});
  }
}

TEST("trees stay with decoding's kernel") {
  Cache cache({DType::bf16, 64, 1, 4}, 101);
  Part tree = {cache.add(240), 240, 12};
  for (int i = 0; i < 12; ++i) tree.paths.push_back((uint64_t{1} << i) | (i % 2 == 0 ? 0 : 1));
  const Part prompt = {cache.add(50), 50, 50};
  cache.upload();
  check_all(cache, {}, {tree, prompt});
}

TEST("long tiles stand first, those of most keys before others") {
  const std::vector<int32_t> qo_indptr = {0, 1, 401, 403, 443}, kv_len = {900, 400, 2, 1000};
  ops::BatchLayout batch;
  batch.num_tokens = 443;
  batch.num_sequences = 4;
  batch.qo_indptr = qo_indptr.data();
  batch.kv_len = kv_len.data();
  ops::AttentionShape shape;
  shape.num_qo_heads = 8;
  shape.num_kv_heads = 2;
  shape.most_rows = 16;
  shape.long_rows = 128;
  shape.shares = 1;
  ops::AttentionWork work;
  ops::plan_attention(shape, batch, work);
  // 32 tokens of 4 heads each: of the last one of the first prompt 16, of the second 8.
  CHECK_EQ(work.num_long_items, 2 * (13 + 2));
  int32_t before = INT32_MAX;
  for (size_t i = 0; i < work.items.size(); ++i) {
    const ops::AttentionTile& tile = work.tiles[static_cast<size_t>(work.items[i].tile)];
    const bool is_long = static_cast<int64_t>(i) < work.num_long_items;
    CHECK_EQ(tile.num_rows * tile.num_heads > 16, is_long);
    CHECK(tile.num_rows * tile.num_heads <= (is_long ? 128 : 16));
    if (!is_long) continue;
    CHECK(work.items[i].end_unit <= before);
    before = work.items[i].end_unit;
  }
}

TEST("every barrier is needed") {
  if (cuda::host::detected_races() != cuda::host::Races::all) {
    check::skip("races are not detected in this build");
  }
  for (const DType kv : {DType::bf16, DType::i8}) {
    Cache cache({kv, 64, 1, 2}, 111);
    const int s = cache.add(800);
    cache.upload();
    const Batch batch(cache, {}, {{s, 800, 20}});
    const Results right = batch.run();
    expect_every_barrier_matters(
        [&] { return same(right, batch.run({.shares = 4000, .long_rows = 128})); });
  }
}

TEST("shared memory has few conflicts of banks") {
  if (cuda::host::detected_races() != cuda::host::Races::all) {
    check::skip("conflicts are not counted in this build");
  }
  for (const DType kv : kKvTypes) {
    Cache cache({kv, 64, 1, 8}, 121);
    const int s = cache.add(512);
    cache.upload();
    const Batch batch(cache, {}, {{s, 512, 16}});
    const cuda::host::Banks banks =
        cuda::host::count_banks([&] { batch.run({.shares = 1, .long_rows = 128}); });
    CHECK(banks.least > 0);
    CHECK(banks.cycles <= banks.least + banks.least / 100);
  }
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
