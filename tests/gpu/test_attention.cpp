// Attention over pages on the GPU against float64, and the bits of rows that share calls.
#include <array>
#include <random>

#include "gpu/attention_reference.h"
#include "gpu/hopper_device.h"
#include "gpu/mutations.h"

namespace effinfer {
namespace {

constexpr DType kKvTypes[] = {DType::bf16, DType::f16, DType::i8, DType::f32};

// On Hopper, where pages come whole: with two places for values, as there are more items than
// multiprocessors. Another GPU that the tests run on has nothing to say of it.
bool same_on_hopper(const Batch& batch, const Results& right) {
  if (!OnHopper::is_possible()) return true;
  const OnHopper machine(1);
  return same(right, batch.run({.shares = 1000}));
}
// And with four.
bool same_alone_on_hopper(const Batch& batch, const Results& right, bool far = false) {
  if (!OnHopper::is_possible()) return true;
  const OnHopper machine;
  return same(right, batch.run({.shares = 1, .far = far}));
}

// Decoding, a few rows, a part of a prompt, one without rows; unsplit and split.
void check_ragged(const Heads& heads, const Rules& rules, uint32_t seed) {
  Cache cache(heads, seed);
  std::vector<Part> parts;
  const int32_t lengths[] = {1, 300, 65, 530, 64, 20};
  const int32_t rows[] = {1, 1, 3, 5, 0, 20};
  for (int i = 0; i < 6; ++i) parts.push_back({cache.add(lengths[i]), lengths[i], rows[i]});
  cache.upload();
  const Batch batch(cache, rules, parts);
  const Results whole = batch.run({.shares = 1});
  check_batch(cache, rules, batch, whole, heads.q);
  CHECK(same(whole, batch.run({.shares = 1000})));
  // Scales of i8 are in one place.
  const bool far = heads.kv != DType::i8;
  if (far) CHECK(same(whole, batch.run({.shares = 1, .far = true})));
  CHECK(same_alone_on_hopper(batch, whole, far));
  CHECK(same_on_hopper(batch, whole));
}

TEST("ragged batches of every dtype") {
  uint32_t seed = 1;
  for (const DType kv : kKvTypes) {
    check_ragged({kv, 64, 2, 4}, {}, ++seed);
  }
}

TEST("dims of heads, groups, dtypes of queries") {
  check_ragged({DType::bf16, 16, 1, 8, DType::bf16}, {}, 11);
  check_ragged({DType::bf16, 80, 1, 3, DType::f16}, {}, 12);
  check_ragged({DType::f16, 128, 1, 1, DType::f16}, {}, 13);
  check_ragged({DType::i8, 48, 1, 9, DType::bf16}, {}, 14);
  check_ragged({DType::f32, 80, 1, 2, DType::f32}, {}, 15);
  check_ragged({DType::i8, 128, 1, 2, DType::f32}, {}, 16);
}

TEST("heads of 256 dims") {
  check_ragged({DType::bf16, 256, 1, 1}, {}, 21);
  check_ragged({DType::i8, 144, 1, 1}, {}, 22);
  check_ragged({DType::f32, 256, 1, 1}, {}, 23);
}

TEST("groups of more than 16 heads") {
  check_ragged({DType::bf16, 16, 1, 17}, {}, 31);
}

TEST("windows, sinks, soft caps, slopes") {
  Rules rules;
  rules.window_left = 70;
  check_ragged({DType::bf16, 32, 1, 2}, rules, 41);
  rules.sink_tokens = 3;
  check_ragged({DType::i8, 32, 1, 2}, rules, 42);
  rules.soft_cap = 2.0f;
  check_ragged({DType::f16, 32, 1, 2}, rules, 43);
  rules.slopes = {0.1f, 0.01f};
  rules.sinks = {1.0f, -40.0f};
  check_ragged({DType::f32, 32, 1, 2}, rules, 44);
  rules = {};
  rules.causal = false;
  rules.slopes = {0.0f, 0.5f};
  check_ragged({DType::bf16, 32, 1, 2}, rules, 45);
}

TEST("a window and sinks far apart") {
  Rules rules;
  rules.window_left = 10;
  rules.sink_tokens = 70;
  Cache cache({DType::bf16, 16, 1, 1}, 51);
  const int long_one = cache.add(1500);
  cache.upload();
  const Batch batch(cache, rules, {{long_one, 1500, 3}});
  const Results whole = batch.run({.shares = 1});
  check_batch(cache, rules, batch, whole, DType::f32);
  CHECK(same(whole, batch.run({.shares = 1000})));
  CHECK(same_on_hopper(batch, whole));
}

TEST("more partial results than a warp has lanes, and than states are there at once") {
  for (const auto& [dims, group] : {std::pair{16, 2}, {16, 5}, {16, 16}, {144, 7}}) {
    Cache cache({DType::bf16, dims, 1, group}, 52);
    const int long_one = cache.add(34 * 256 - 5);
    cache.upload();
    const Batch batch(cache, {}, {{long_one, 34 * 256 - 5, 2}});
    const Results whole = batch.run({.shares = 1});
    check_batch(cache, {}, batch, whole, DType::f32);
    CHECK(same(whole, batch.run({.shares = 1000})));
    CHECK(same_on_hopper(batch, whole));
  }
}

TEST("queries that are rounded") {
  for (const DType kv : {DType::bf16, DType::f16, DType::i8}) {
    Cache cache({kv, 64, 1, 2}, 61);
    const int s = cache.add(200, false);
    cache.upload();
    const Batch batch(cache, {}, {{s, 200, 4}});
    // Of about 64 products of normal numbers, each off by a rounding; |k| of a row of keys
    // and |q| of its query are below 12, and scores are scaled by 1 / 8.
    const double error = epsilon_of(kv == DType::f16 ? kv : DType::bf16) * 12 * 12 / 8;
    check_batch(cache, {}, batch, batch.run(), DType::f32, error);
  }
}

TEST("queries of any size beside float16 keys") {
  Cache cache({DType::f16, 32, 1, 1}, 62);
  const int s = cache.add(40);
  cache.upload();
  Batch batch(cache, {}, {{s, 40, 2}});
  batch.scale_queries(0x1p20f);
  for (const float x : batch.run().out) CHECK(std::isfinite(x));
}

TEST("logits of up to 1e8") {
  for (const DType kv : kKvTypes) {
    for (const double size : {1e4, 1e6, 1e8}) {
      check_large_logits({kv, 64, 1, 5}, {.shares = 1}, size);
      check_large_logits({kv, 64, 1, 5}, {.shares = 1000}, size);
    }
  }
}

TEST("a row's bits do not depend on its batch") {
  for (const DType kv : kKvTypes) {
    const Heads heads = {kv, 32, 1, 3};
    Cache cache(heads, 71);
    const int a = cache.add(330);
    const int b = cache.add(90);
    cache.upload();
    const Results all = Batch(cache, {}, {{b, 90, 7}, {a, 330, 12}}).run({.shares = 1});
    for (const int32_t row : {0, 1, 5, 11}) {
      const Results alone = Batch(cache, {}, {{a, 319 + row, 1}}).run({.shares = 1000});
      CHECK(same(alone, rows_of(all, heads, 7 + row, 1)));
    }
  }
}

TEST("a row of a tree has the bits of its path") {
  for (const DType kv : kKvTypes) {
    const Heads heads = {kv, 32, 1, 2};
    Rules rules;
    if (kv == DType::i8) rules = {true, 100, 5, 0.0f, {0.05f, 0.2f}, {}};
    Cache cache(heads, 81);
    // The tree begins two tokens before a chunk's end, and one token before the step.
    const int32_t begin = 510;
    const std::vector<int> parents = {-1, 0, 1, 1, 0, 4, 3, 5};
    std::vector<uint64_t> paths;
    for (size_t i = 0; i < parents.size(); ++i) {
      const uint64_t above = parents[i] < 0 ? 0 : paths[static_cast<size_t>(parents[i])];
      paths.push_back(above | uint64_t{1} << i);
    }
    const auto count = static_cast<int32_t>(parents.size());
    const int tree = cache.add(begin + count);
    std::vector<int> chains;
    for (const uint64_t path : paths) {
      std::vector<int32_t> tokens(static_cast<size_t>(begin));
      std::iota(tokens.begin(), tokens.end(), 0);
      for (int32_t i = 0; i < count; ++i) {
        if ((path >> i & 1) != 0) tokens.push_back(begin + i);
      }
      chains.push_back(cache.add_tokens(tree, tokens));
    }
    cache.upload();
    Part part = {tree, begin + count, count - 1};
    part.paths = {paths.begin() + 1, paths.end()};
    part.tree_start = begin;
    const Batch batch(cache, rules, {part});
    const Results rows = batch.run();
    check_batch(cache, rules, batch, rows, DType::f32);
    CHECK(same(rows, batch.run({.shares = 1000})));
    CHECK(same_on_hopper(batch, rows));
    CHECK(same_alone_on_hopper(batch, rows, kv != DType::i8));
    if (cache.heads().kv != DType::i8) CHECK(same(rows, batch.run({.far = true})));
    for (int32_t i = 1; i < count; ++i) {
      const int chain = chains[static_cast<size_t>(i)];
      const Batch alone(cache, rules, {{chain, cache.sequence(chain).length, 1}});
      CHECK(same(alone.run(), rows_of(rows, heads, i - 1, 1)));
    }
  }
}

// Any of the above in any company.
class Random {
 public:
  explicit Random(uint32_t seed) : random_(seed) {}

  void check() {
    const Heads heads = {kKvTypes[below(4)], 16 * (1 + below(6)), 1 + below(2), 1 + below(9),
                         std::array{DType::f32, DType::bf16, DType::f16}[below(3)]};
    Rules rules;
    if (below(2) == 0) rules.window_left = below(400);
    if (rules.window_left >= 0 && below(2) == 0) rules.sink_tokens = below(100);
    if (below(3) == 0) rules.soft_cap = 3.0f;
    rules.causal = below(4) != 0;
    for (int head = 0; head < heads.qo_heads() && below(8) != 0; ++head) {
      if (head == 0 || !rules.slopes.empty()) rules.slopes.push_back(0.01f * below(20));
    }
    if (static_cast<int32_t>(rules.slopes.size()) < heads.qo_heads()) rules.slopes.clear();
    Cache cache(heads, static_cast<uint32_t>(random_()));
    std::vector<Part> parts;
    for (int count = 1 + below(3); count > 0; --count) {
      const int32_t length = 1 + below(700);
      Part part = {cache.add(length), length, below(std::min(length, 20) + 1)};
      if (below(2) == 0) grow_tree(part);
      parts.push_back(part);
    }
    cache.upload();
    const Batch batch(cache, rules, parts);
    const Results whole = batch.run({.shares = 1});
    check_batch(cache, rules, batch, whole, heads.q);
    CHECK(same(whole, batch.run({.shares = 1 + below(20)})));
    CHECK(same_on_hopper(batch, whole));
  }

 private:
  int below(int count) { return static_cast<int>(random_() % static_cast<uint32_t>(count)); }

  void grow_tree(Part& part) {
    const int32_t nodes = part.rows + below(std::min(64 - part.rows, part.length - part.rows + 1));
    part.tree_start = part.length - nodes;
    std::vector<uint64_t> paths;
    for (int32_t i = 0; i < nodes; ++i) {
      const int parent = below(i + 1) - 1;
      const uint64_t above = parent < 0 ? 0 : paths[static_cast<size_t>(parent)];
      paths.push_back(above | uint64_t{1} << i);
    }
    part.paths = {paths.end() - part.rows, paths.end()};
  }

  std::mt19937 random_;
};

TEST("random batches") {
  for (uint32_t seed = 0; seed < 20; ++seed) Random(seed).check();
}

TEST("lists of visits") {
  std::mt19937 random(91);
  for (const DType kv : {DType::bf16, DType::i8}) {
    Cache cache({kv, 16, 2, 2}, 92);
    Part part = {cache.add(1400), 1400, 70};
    for (int list = 0; list < 4; ++list) {
      std::vector<uint64_t> words;
      for (int word = 0; word < 22; ++word) {
        const uint64_t bits = uint64_t{random()} << 32 | random();
        words.push_back(list == 3 ? 0 : random() % 3 == 0 ? ~uint64_t{0} : word % 9 < 5 ? 0 : bits);
      }
      part.words.push_back(words);
    }
    const Part dense = {cache.add(70), 70, 1};
    cache.upload();
    Part weighted = part;
    weighted.weigh(random);
    for (const Part& each : {part, weighted}) {
      for (const Rules& rules : {Rules(), Rules{true, 300, 70, 0.0f, {}, {}}}) {
        const Batch batch(cache, rules, {dense, part, each});
        const Results whole = batch.run({.shares = 1});
        check_batch(cache, rules, batch, whole, DType::f32);
        CHECK(same(whole, batch.run({.shares = 1000})));
        CHECK(same_on_hopper(batch, whole));
      }
    }
  }
}

TEST("trees with lists of visits") {
  std::mt19937 random(95);
  for (const DType kv : kKvTypes) {
    Cache cache({kv, 32, 2, 2}, 96);
    const std::vector<int> parents = {-1, 0, 1, 1, 0, 4, 3, 5};
    Part part = {cache.add(508 + 8), 508 + 8, 8};
    for (size_t i = 0; i < parents.size(); ++i) {
      const uint64_t above = parents[i] < 0 ? 0 : part.paths[static_cast<size_t>(parents[i])];
      part.paths.push_back(above | uint64_t{1} << i);
    }
    for (int list = 0; list < 2; ++list) {
      std::vector<uint64_t> words;
      for (int word = 0; word < 9; ++word) {
        const uint64_t bits = uint64_t{random()} << 32 | random();
        words.push_back(word == 1 ? 0 : word < 3 ? ~uint64_t{0} : bits);
      }
      part.words.push_back(words);
    }
    cache.upload();
    Part weighted = part;
    weighted.weigh(random);
    for (const Part& each : {part, weighted}) {
      const Batch batch(cache, {}, {each});
      const Results whole = batch.run({.shares = 1});
      check_batch(cache, {}, batch, whole, DType::f32);
      CHECK(same(whole, batch.run({.shares = 1000})));
      CHECK(same_on_hopper(batch, whole));
    }
  }
}

TEST("planes that weigh keys, and first keys") {
  std::mt19937 random(97);
  uint32_t seed = 98;
  for (const DType kv : kKvTypes) {
    const Heads heads = {kv, 32, 2, 3};
    Cache cache(heads, ++seed);
    Part few = {cache.add(530), 530, 3};
    Part tree = {cache.add(300), 300, 4, {1, 3, 5, 11}};
    const Part plain = {cache.add(70), 70, 2};
    Part one = {cache.add(1), 1, 1};
    cache.upload();
    for (Part* part : {&few, &tree, &one}) part->weigh_slots(random, heads.kv_heads);
    Rules rules;
    for (const bool tunes : {false, true}) {
      if (tunes) rules = {true, 290, 5, 2.0f, {}, {}, {-1.0f, 2.0f, 0.0f, 0.5f, -0.25f, 3.0f}};
      const Batch batch(cache, rules, {plain, few, tree, one});
      const Results whole = batch.run({.shares = 1});
      check_batch(cache, rules, batch, whole, DType::f32);
      CHECK(same(whole, batch.run({.shares = 1000})));
      CHECK(same_on_hopper(batch, whole));
    }
  }
}

TEST("keys in chunks") {
  Rules rules;
  rules.chunk = 256;
  for (const DType kv : kKvTypes) {
    Cache cache({kv, 32, 2, 3}, 99);
    // Rows on both sides of a chunk's end, in the second chunk, and in the first.
    const Part across = {cache.add(1027), 1027, 7};
    const Part second = {cache.add(300), 300, 1};
    const Part first = {cache.add(200), 200, 3};
    Part whole = {cache.add(600), 600, 2};
    whole.unchunked = true;
    Part tree = {cache.add(520), 520, 4, {1, 3, 5, 11}};
    cache.upload();
    const Batch batch(cache, rules, {across, whole, second, first, tree});
    const Results at_once = batch.run({.shares = 1});
    check_batch(cache, rules, batch, at_once, DType::f32);
    CHECK(same(at_once, batch.run({.shares = 1000})));
    CHECK(same_on_hopper(batch, at_once));
    const Results alone = Batch(cache, rules, {{across.sequence, 1022, 1}}).run();
    CHECK(same(alone, rows_of(at_once, cache.heads(), 1, 1)));
  }
}

TEST("operands") {
  const Heads heads = {DType::bf16, 48, 1, 2};
  Cache cache(heads, 101);
  const int s = cache.add(100);
  cache.upload();
  const Batch batch(cache, {}, {{s, 100, 3}, {s, 70, 9}});
  const Results plain = batch.run();
  CHECK(same(plain, batch.run({.operand = ops::Arithmetic::f32})));
  Results rounded = batch.run({.operand = ops::Arithmetic::bf16});
  for (size_t i = 0; i < plain.out.size(); ++i) {
    CHECK_EQ(rounded.out[i], bf16_to_f32(f32_to_bf16(plain.out[i])));
  }
}

TEST("every barrier is needed") {
  if (cuda::host::detected_races() != cuda::host::Races::all) {
    check::skip("races are not detected in this build");
  }
  for (const DType kv : {DType::bf16, DType::f16, DType::f32}) {
    // One merges more chunks than are there at once.
    const bool is_long = kv == DType::bf16;
    const int32_t length = is_long ? 40 * 256 : 600;
    Cache cache({kv, 16, 1, is_long ? 16 : 2}, 111);
    const int s = cache.add(length);
    cache.upload();
    const Batch batch(cache, {}, {{s, length, 2}});
    const Results right = batch.run();
    const auto is_right = [&] { return same(right, batch.run({.shares = 1000})); };
    if (kv == DType::bf16) {
      expect_every_barrier_matters(is_right);
      continue;
    }
    CHECK(needless_barriers(is_right, 4).empty());
  }
}

TEST("on Hopper every barrier is needed") {
  if (cuda::host::detected_races() != cuda::host::Races::all) {
    check::skip("races are not detected in this build");
  }
  // Places of values are taken again; the pages of a displaced row's third unit are gathered, where
  // others were copied and will be.
  for (const DType kv : {DType::bf16, DType::i8}) {
    Cache cache({kv, 80, 1, 2}, 112);
    const int s = cache.add(700);
    const Part tree = {cache.add(700), 700, 4, {1, 3, 5, 11}};
    cache.upload();
    const Batch batch(cache, {}, {{s, 700, 2}, tree});
    const Results right = batch.run();
    const auto is_right = [&] {
      return same_on_hopper(batch, right) && same_alone_on_hopper(batch, right);
    };
    expect_reached([&] { is_right(); }, "attention", "barrier_wait", true);
    if (kv == DType::bf16) {
      expect_every_barrier_matters(is_right);
    } else {
      CHECK(needless_barriers(is_right, 4).empty());
    }
  }
}

TEST("shared memory has few conflicts of banks") {
  if (cuda::host::detected_races() != cuda::host::Races::all) {
    check::skip("conflicts are not counted in this build");
  }
  for (const DType kv : kKvTypes) {
    Cache cache({kv, 64, 1, 8}, 121);
    const int s = cache.add(1024);
    cache.upload();
    const Batch batch(cache, {}, {{s, 1024, 2}});
    const cuda::host::Banks banks = cuda::host::count_banks([&] { batch.run({.shares = 1}); });
    CHECK(banks.least > 0);
    CHECK(banks.cycles <= banks.least + banks.least / 100);
  }
}

TEST("on Hopper two lanes meet at a bank where they read keys alone") {
  if (cuda::host::detected_races() != cuda::host::Races::all) {
    check::skip("conflicts are not counted in this build");
  }
  const OnHopper machine;
  for (const DType kv : {DType::bf16, DType::i8}) {
    for (const int dims : {64, 80, 128}) {
      Cache cache({kv, dims, 1, 8}, 122);
      const int s = cache.add(1024);
      cache.upload();
      const Batch batch(cache, {}, {{s, 1024, 2}});
      const cuda::host::Banks banks = cuda::host::count_banks([&] { batch.run({.shares = 1}); });
      const int64_t key_bytes = int64_t{1024} * dims * dtype_info(kv).block_bytes;
      CHECK(banks.least > 0);
      CHECK(banks.cycles - banks.least <= static_cast<uint64_t>(key_bytes / 128));
    }
  }
}

TEST("what is not done is refused by name") {
  const auto refuses = [](const char* why, auto&& change) {
    ops::AttentionProblem p;
    p.num_qo_heads = p.num_kv_heads = 1;
    p.q.dims = p.k.dims = p.v.dims = 64;
    CHECK(ops::table<ops::AttentionProblem>().find(p, current_target(kGpu)) != nullptr);
    change(p);
    CHECK_THROWS(Unsupported, why,
                 ops::table<ops::AttentionProblem>().select(p, current_target(kGpu)));
  };
  const uint8_t mask = 0;
  refuses("no masks", [&](auto& p) { p.mask = &mask; });
  refuses("head_dim", [](auto& p) { p.k.dims = 40; });
  refuses("other dims", [](auto& p) { p.v.dims = 32; });
  refuses("beside q and k", [](auto& p) { p.k_rope.dims = 64; });
  refuses("16 rows", [](auto& p) { p.work.tile_rows = 48; });
  refuses("bf16 keys of 16 bits", [](auto& p) { p.arithmetic = ops::Arithmetic::bf16; });
  refuses("operand", [](auto& p) {
    p.out_operand.cols = 64;
    p.out_operand.arithmetic = ops::Arithmetic::int8;
  });
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
