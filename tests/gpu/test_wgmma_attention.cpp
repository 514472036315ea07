// Attention of prompts by Hopper's wgmma: against float64, and the same bits however rows come.
#include <array>
#include <random>

#include "gpu/attention_reference.h"
#include "gpu/hopper_device.h"
#include "gpu/mutations.h"

namespace effinfer {
namespace {

constexpr Launch kWhole = {.shares = 1, .long_rows = 128, .own_sums = true};
constexpr Launch kDivided = {.shares = 4000, .long_rows = 128, .own_sums = true};

// Pages that are re-arranged first: all, or those of short sequences.
constexpr int64_t kAll = 1000;
constexpr int64_t kSome = 4;
Launch arranged(Launch how, int64_t pages) {
  how.arranged = pages;
  return how;
}

// By a GPU of so many multiprocessors: where these are few a block has several items.
Results run_on(int multiprocessors, const Batch& batch, const Launch& how) {
  const OnHopper machine(multiprocessors);
  return batch.run(how);
}

// Right, and the same with keys divided into items, with the pages of all or
// some sequences re-arranged first, and whatever blocks have which items.
Results check_all(const Cache& cache, const Rules& rules, std::vector<Part> parts) {
  const Batch batch(cache, rules, std::move(parts));
  const Results results = run_on(132, batch, kWhole);
  check_batch(cache, rules, batch, results, cache.heads().q);
  CHECK(same(results, run_on(3, batch, kDivided)));
  CHECK(same(results, run_on(2, batch, arranged(kWhole, kAll))));
  CHECK(same(results, run_on(1, batch, arranged(kDivided, kSome))));
  Launch far = kWhole;
  far.far = true;
  CHECK(same(results, run_on(1, batch, far)));
  return results;
}

// A prompt from its start, the end of a prompt, a few rows between, and one.
void check_ragged(const Heads& heads, const Rules& rules, uint32_t seed) {
  Cache cache(heads, seed);
  std::vector<Part> parts;
  const int32_t lengths[] = {75, 330, 65, 0, 20};
  const int32_t rows[] = {75, 40, 3, 0, 1};
  for (int i = 0; i < 5; ++i) parts.push_back({cache.add(lengths[i]), lengths[i], rows[i]});
  cache.upload();
  check_all(cache, rules, parts);
}

TEST("heads, groups, dtypes of keys and queries") {
  check_ragged({DType::bf16, 64, 2, 1}, {}, 1);
  check_ragged({DType::f16, 64, 1, 2}, {}, 2);
  check_ragged({DType::bf16, 128, 1, 3, DType::bf16}, {}, 3);
  check_ragged({DType::f16, 128, 1, 1, DType::f16}, {}, 4);
  check_ragged({DType::bf16, 64, 1, 1, DType::f16}, {}, 5);
  check_ragged({DType::f16, 64, 1, 1, DType::bf16}, {}, 6);
}

TEST("groups of more heads than a tile has rows") {
  Cache cache({DType::bf16, 64, 1, 130}, 11);
  const int s = cache.add(70);
  cache.upload();
  check_all(cache, {}, {{s, 70, 2}});
}

TEST("windows, sinks, soft caps, slopes") {
  Rules rules;
  rules.window_left = 70;
  check_ragged({DType::bf16, 64, 1, 1}, rules, 21);
  rules.sink_tokens = 3;
  rules.soft_cap = 2.0f;
  check_ragged({DType::f16, 64, 1, 1}, rules, 22);
  rules = {};
  rules.causal = false;
  rules.slopes = {0.1f, 0.01f};
  rules.sinks = {1.0f, -40.0f};
  check_ragged({DType::bf16, 64, 1, 2}, rules, 23);
}

TEST("segments, and windows and sinks far apart") {
  Cache cache({DType::bf16, 64, 1, 1}, 31);
  const int s = cache.add(4500);
  cache.upload();
  Rules rules;
  check_all(cache, rules, {{s, 4500, 20}});
  rules.window_left = 1500;
  rules.sink_tokens = 130;
  check_all(cache, rules, {{s, 4200, 10}});
  check_all(cache, rules, {{s, 1900, 10}});
}

TEST("logits of up to 1e8") {
  const OnHopper machine;
  for (const DType kv : {DType::bf16, DType::f16}) {
    for (const double size : {1e4, 1e6, 1e8}) {
      check_large_logits({kv, 64, 1, 3}, kWhole, size);
    }
  }
}

TEST("lists of visits") {
  std::mt19937 random(41);
  Cache cache({DType::bf16, 64, 1, 2}, 42);
  Part part = {cache.add(2500), 2500, 100};
  for (int list = 0; list < 2; ++list) {
    std::vector<uint64_t> words;
    for (int word = 0; word < 40; ++word) {
      const uint64_t bits = uint64_t{random()} << 32 | random();
      const bool whole = random() % 3 == 0 || word / 4 == 2;
      // Of the second list nothing lies in the second segment.
      const bool none = word % 9 < 5 || (list == 1 && word >= 32);
      words.push_back(whole && word < 32 ? ~uint64_t{0} : none ? 0 : bits);
    }
    part.words.push_back(words);
  }
  const Part dense = {cache.add(70), 70, 1};
  cache.upload();
  check_all(cache, {}, {dense, part});
  check_all(cache, {true, 300, 70, 0.0f, {}, {}}, {dense, part});
}

TEST("trees stay with decoding's kernel") {
  Cache cache({DType::bf16, 64, 1, 4}, 51);
  Part tree = {cache.add(140), 140, 12};
  for (int i = 0; i < 12; ++i) tree.paths.push_back((uint64_t{1} << i) | (i % 2 == 0 ? 0 : 1));
  const Part prompt = {cache.add(50), 50, 9};
  cache.upload();
  check_all(cache, {}, {tree, prompt});
}

// A row's bits: whatever chunk it comes in, whoever is beside it.
TEST("chunks of a prompt, and other prompts beside it, change no bit") {
  const Heads heads = {DType::f16, 64, 1, 2};
  Cache cache(heads, 61);
  const int s = cache.add(200);
  const int other = cache.add(70);
  cache.upload();
  const Results all = check_all(cache, {}, {{s, 200, 200}});
  int32_t begin = 0;
  for (const int32_t end : {1, 60, 61, 129, 200}) {
    const int32_t rows = end - begin;
    const Results some = check_all(cache, {}, {{other, 70, 5}, {s, end, rows}});
    CHECK(same(rows_of(some, heads, 5, rows), rows_of(all, heads, begin, rows)));
    begin = end;
  }
}

// Which units are a step follows from the list alone, whatever windows leave of it.
TEST("rows beside a row change no bit with lists and windows") {
  const Heads heads = {DType::bf16, 64, 1, 2};
  Cache cache(heads, 65);
  const int s = cache.add(2300);
  std::vector<uint64_t> words(36);
  for (const size_t unit : {1, 2, 4, 7, 12, 20, 26, 27, 29, 30, 33, 35}) words[unit] = ~uint64_t{0};
  cache.upload();
  for (const int32_t window_left : {-1, 310, 650}) {
    Rules rules;
    rules.window_left = window_left;
    rules.sink_tokens = 70;
    const Results all = check_all(cache, rules, {{s, 2300, 64, {}, -1, {words}}});
    const Results some = check_all(cache, rules, {{s, 2300, 33, {}, -1, {words}}});
    CHECK(same(some, rows_of(all, heads, 31, 33)));
  }
}

// Segments are 32 units of the list, which begin anywhere.
TEST("lists of more units than a segment has, far apart") {
  const Heads heads = {DType::bf16, 64, 1, 2};
  Cache cache(heads, 67);
  const int32_t units = 170;
  const int s = cache.add(units * 64);
  std::mt19937 random(68);
  std::vector<uint64_t> words(units);
  for (int32_t unit = 0; unit < units; ++unit) {
    // Nothing in the third 2048 tokens, all of the fourth.
    const bool some = unit / 32 != 2 && random() % 3 == 0;
    if (some || unit / 32 == 3) words[static_cast<size_t>(unit)] = ~uint64_t{0};
  }
  cache.upload();
  for (const int32_t end : {units * 64, units * 64 - 64 * 40}) {
    const Results all = check_all(cache, {}, {{s, end, 20, {}, -1, {words}}});
    const Results some = check_all(cache, {}, {{s, end, 7, {}, -1, {words}}});
    CHECK(same(some, rows_of(all, heads, 13, 7)));
  }
}

// Tiles of both warpgroups, of one and of none's steps, with pages as they lie and re-arranged.
TEST("blocks have items of all kinds, in any order") {
  Cache cache({DType::f16, 64, 2, 2}, 69);
  std::mt19937 random(70);
  std::vector<Part> parts;
  for (const int32_t rows : {150, 3, 64, 40}) {
    const int32_t length = rows + static_cast<int32_t>(random() % 400);
    parts.push_back({cache.add(length), length, rows});
  }
  for (int list = 0; list < 3; ++list) {
    Part part = {cache.add(700), 700, list == 0 ? 60 : 20};
    for (int head = 0; head < 2; ++head) {
      std::vector<uint64_t>& words = part.words.emplace_back(11);
      for (uint64_t& word : words) word = list == head || random() % 2 == 0 ? 0 : ~uint64_t{0};
    }
    parts.push_back(std::move(part));
  }
  cache.upload();
  const Results right = check_all(cache, {}, parts);
  const Batch batch(cache, {}, parts);
  for (int time = 1; time <= 8; ++time) {
    const int multiprocessors = time % 4 + 1;
    const Launch how = time % 2 == 0 ? kDivided : kWhole;
    CHECK(same(right, run_on(multiprocessors, batch, arranged(how, 5 * time))));
  }
}

TEST("few rows of a long prompt are divided") {
  const OnHopper machine;
  ops::BatchLayout batch;
  const std::vector<int32_t> qo_indptr = {0, 3, 67}, kv_len = {100, 9000};
  batch.num_tokens = 67;
  batch.num_sequences = 2;
  batch.qo_indptr = qo_indptr.data();
  batch.kv_len = kv_len.data();
  ops::AttentionShape shape;
  shape.num_qo_heads = 2;
  shape.num_kv_heads = 1;
  shape.most_rows = 16;
  shape.long_rows = 128;
  shape.only_long = true;
  shape.shares = 512;
  ops::AttentionWork work;
  ops::plan_attention(shape, batch, work);
  // 9000 tokens are five segments of 2048.
  CHECK_EQ(work.num_long_items, 1 + 5);
  CHECK_EQ(work.num_long_items, static_cast<int64_t>(work.items.size()));
  CHECK_EQ(work.num_partials, 5 * 128);
}

TEST("rows of queries begin at multiples of 16 bytes") {
  const OnHopper machine;
  const auto& table = ops::table<ops::AttentionProblem>();
  const Target target = current_target(kGpu);
  ops::AttentionProblem p;
  p.num_qo_heads = p.num_kv_heads = 1;
  p.q.dims = p.k.dims = p.v.dims = 64;
  p.q.dtype = p.k.dtype = p.v.dtype = DType::bf16;
  p.q.row_stride = p.q.head_stride = 64;
  p.arithmetic = ops::Arithmetic::bf16;
  p.own_sums = p.work.only_long = true;
  p.work.long_rows = 128;
  CHECK(table.find(p, target) != nullptr);
  p.q.row_stride = 68;
  CHECK_THROWS(Unsupported, "multiples of 16 bytes", table.select(p, target));
}

TEST("each barrier, wait and fence") {
  const OnHopper machine(1);
  Cache cache({DType::bf16, 128, 1, 2}, 71);
  // Of both warpgroups, and of one.
  Part part = {cache.add(2200), 2200, 35};
  // More stages than the ring has; with a window, another segment.
  std::vector<uint64_t> words(35);
  for (const size_t unit : {0, 3, 4, 6, 8, 11, 12, 33}) words[unit] = ~uint64_t{0};
  part.words.push_back(words);
  Part half = part;
  half.rows = 3;
  // Short ones, of which the block has more than it knows of at once.
  const int other = cache.add(70);
  const Part few = {other, 70, 3};
  cache.upload();
  const Batch batch(cache, {}, {part, half, few, few});
  const Results right = batch.run(kWhole);
  Rules rules;
  rules.window_left = 2200;
  const Batch windowed(cache, rules, {part});
  const Results windowed_right = windowed.run(kDivided);
  expect_every_barrier_matters([&] {
    return same(right, batch.run(kDivided)) && same(right, batch.run(arranged(kDivided, kAll))) &&
           same(windowed_right, windowed.run(kWhole)) &&
           same(windowed_right, windowed.run(kDivided));
  });
}

TEST("pages are re-arranged with few conflicts of banks") {
  if (cuda::host::detected_races() != cuda::host::Races::all) {
    check::skip("conflicts are not counted in this build");
  }
  const OnHopper machine;
  for (const int32_t dims : {64, 128}) {
    Cache cache({DType::bf16, dims, 1, 1}, 81);
    const int s = cache.add(512);
    cache.upload();
    const Batch batch(cache, {}, {{s, 512, 16}});
    const cuda::host::Banks banks = cuda::host::count_banks([&] { batch.run(kWhole); });
    CHECK(banks.least > 0);
    CHECK(banks.cycles <= banks.least + banks.least / 20);
  }
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
