// Planes of a sequence: what they hold follows its slots through everything that moves these.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "effinfer/error.h"
#include "effinfer/kv_cache.h"

using namespace effinfer;

namespace {

// A cache beside plain vectors of what its planes hold, [head][slot].
class Model {
 public:
  using Rows = std::vector<std::vector<float>>;
  struct Sequence {
    std::map<std::string, Rows> planes;
    int64_t slots = 0;
    int64_t fixed = 0;
    bool may_publish = true;
  };

  explicit Model(bool windows) : cache(config(windows)) {}

  static KvCacheConfig config(bool windows) {
    KvCacheConfig config = {
        .num_layers = 3, .num_kv_heads = 2, .head_dim = 16, .dtype = DType::f32, .num_pages = 200};
    config.rope.resize(3);
    if (windows) config.groups = {{{0, 2}, -1}, {{1}, 70}};
    return config;
  }
  size_t num_heads() const { return cache.config().groups.empty() ? 6 : 4; }

  SequenceId create() {
    const SequenceId id = cache.create({});
    sequences[id] = {};
    return id;
  }

  void add_plane(SequenceId id, const std::string& name) {
    cache.add_plane(id, name);
    Sequence& sequence = sequences.at(id);
    sequence.planes[name].assign(num_heads(),
                                 std::vector<float>(static_cast<size_t>(sequence.slots), 0.0f));
  }

  void append(SequenceId id, int64_t count) {
    cache.append(id, std::vector<int32_t>(static_cast<size_t>(count), 7));
    Sequence& sequence = sequences.at(id);
    sequence.slots += count;
    for_rows(sequence, [&](auto& row) { row.resize(static_cast<size_t>(sequence.slots)); });
  }

  void write(SequenceId id, std::mt19937& random) {
    for (auto& [name, rows] : sequences.at(id).planes) {
      const SlotPlane plane = cache.plane(id, name);
      for (size_t head = 0; head < rows.size(); ++head) {
        for (size_t slot = 0; slot < rows[head].size(); ++slot) {
          rows[head][slot] = static_cast<float>(random() % 1000);
          plane.values[static_cast<int64_t>(head) * plane.stride + static_cast<int64_t>(slot)] =
              rows[head][slot];
        }
      }
    }
  }

  // With lists of all slots in any order the same as reorder().
  void retain(SequenceId id, const std::vector<std::vector<int32_t>>& lists) {
    const bool all = static_cast<int64_t>(lists[0].size()) == sequences.at(id).slots;
    all ? cache.reorder(id, 0, lists) : cache.retain(id, 0, lists);
    Sequence& sequence = sequences.at(id);
    for (auto& [name, rows] : sequence.planes) {
      for (size_t head = 0; head < rows.size(); ++head) {
        std::vector<float> kept;
        for (const int32_t slot : lists[lists.size() == 1 ? 0 : head]) {
          kept.push_back(rows[head][static_cast<size_t>(slot)]);
        }
        rows[head] = kept;
      }
    }
    sequence.slots = static_cast<int64_t>(lists[0].size());
  }

  void evict(SequenceId id, int64_t begin, int64_t end) {
    cache.evict(id, 0, begin, end);
    Sequence& sequence = sequences.at(id);
    for_rows(sequence, [&](auto& row) { row.erase(row.begin() + begin, row.begin() + end); });
    sequence.slots -= end - begin;
  }

  void keep(SequenceId id, int64_t count, const std::vector<int32_t>& kept) {
    cache.keep(id, kept);
    Sequence& sequence = sequences.at(id);
    const auto first = static_cast<size_t>(sequence.slots - count);
    for_rows(sequence, [&](auto& row) {
      for (size_t i = 0; i < kept.size(); ++i) {
        row[first + i] = row[first + static_cast<size_t>(kept[i])];
      }
      row.resize(first + kept.size());
    });
    sequence.slots = static_cast<int64_t>(first + kept.size());
  }

  void rollback(SequenceId id, int64_t count) {
    cache.rollback(id, count);
    Sequence& sequence = sequences.at(id);
    sequence.slots -= count;
    for_rows(sequence, [&](auto& row) { row.resize(static_cast<size_t>(sequence.slots)); });
  }

  SequenceId fork(SequenceId id) {
    const SequenceId forked = cache.fork(id);
    sequences[forked] = sequences.at(id);
    return forked;
  }

  SequenceId move_through_blob(SequenceId id) {
    const std::vector<std::byte> blob = cache.export_(id);
    cache.release(id, false);
    const SequenceId moved = cache.import_(blob);
    auto sequence = sequences.extract(id);
    sequence.key() = moved;
    sequences.insert(std::move(sequence));
    return moved;
  }

  void check() {
    cache.check_integrity();
    for (auto& [id, sequence] : sequences) {
      CHECK_EQ(cache.slots(id), sequence.slots);
      for (auto& [name, rows] : sequence.planes) {
        const SlotPlane plane = cache.plane(id, name);
        CHECK_EQ(plane.num_slots, sequence.slots);
        CHECK_EQ(plane.num_heads, static_cast<int64_t>(rows.size()));
        for (size_t head = 0; head < rows.size(); ++head) {
          const float* row = plane.values + static_cast<int64_t>(head) * plane.stride;
          CHECK(std::equal(rows[head].begin(), rows[head].end(), row));
        }
      }
    }
  }

  KvCache cache;
  std::map<SequenceId, Sequence> sequences;

 private:
  template <class F>
  static void for_rows(Sequence& sequence, F&& f) {
    for (auto& [name, rows] : sequence.planes) std::ranges::for_each(rows, f);
  }
};

std::vector<int32_t> pick(std::mt19937& random, int64_t end, int64_t count) {
  std::set<int32_t> picked;
  while (static_cast<int64_t>(picked.size()) < count) {
    picked.insert(static_cast<int32_t>(random() % static_cast<uint32_t>(end)));
  }
  return {picked.begin(), picked.end()};
}

}  // namespace

TEST("numbers follow their slots through random verbs") {
  for (const bool windows : {false, true}) {
    for (uint32_t seed = 0; seed < 12; ++seed) {
      std::mt19937 random(seed);
      Model model(windows);
      SequenceId id = model.create();
      model.add_plane(id, "a");
      model.append(id, 1 + static_cast<int64_t>(random() % 150));
      model.cache.commit(id, model.cache.length(id));
      model.add_plane(id, "b");
      for (int round = 0; round < 30; ++round) {
        model.write(id, random);
        const int64_t slots = model.sequences.at(id).slots;
        switch (random() % 8) {
          case 7: {
            std::vector<std::vector<int32_t>> orders(model.num_heads(), pick(random, slots, slots));
            for (auto& order : orders) std::shuffle(order.begin(), order.end(), random);
            model.retain(id, orders);
            break;
          }
          case 0: {
            const auto count = 1 + static_cast<int64_t>(random() % static_cast<uint32_t>(slots));
            std::vector<std::vector<int32_t>> lists;
            for (size_t head = 0; head < (random() % 2 == 0 ? 1 : model.num_heads()); ++head) {
              lists.push_back(pick(random, slots, count));
            }
            if (lists.size() > 1) lists.resize(model.num_heads(), lists[0]);
            model.retain(id, lists);
            break;
          }
          case 1: {
            if (slots < 2) break;
            const auto begin = static_cast<int64_t>(random() % static_cast<uint32_t>(slots - 1));
            const int64_t most = slots - begin - (begin == 0 ? 1 : 0);
            int64_t count = 1 + static_cast<int64_t>(random() % static_cast<uint32_t>(most));
            if (count > 64) count = count / 64 * 64;  // by whole pages
            model.evict(id, begin, begin + count);
            break;
          }
          case 2: {
            const SequenceId other = model.fork(id);
            model.append(id, 5);
            model.cache.commit(id, 5);
            model.write(id, random);  // the other's stay
            model.check();
            model.cache.release(other, false);
            model.sequences.erase(other);
            break;
          }
          case 3: {
            model.append(id, 9);
            model.write(id, random);
            model.keep(id, 9, pick(random, 9, 4));
            break;
          }
          case 4: {
            model.append(id, 8);
            model.write(id, random);
            model.rollback(id, 8);
            model.append(id, 3);  // zeros again
            model.cache.commit(id, 3);
            break;
          }
          case 5:
            id = model.move_through_blob(id);
            break;
          default: {
            const auto count = static_cast<int64_t>(random() % 200);
            model.append(id, count);
            model.cache.commit(id, count);
          }
        }
        model.check();
      }
    }
  }
}

TEST("wrong names and blobs are refused") {
  Model model(false);
  const SequenceId id = model.create();
  CHECK_THROWS(InvalidArgument, "plane: name: expected one of the sequence's (it has none), got",
               model.cache.plane(id, "a"));
  model.add_plane(id, "a");
  model.append(id, 70);
  model.cache.commit(id, 70);
  CHECK_THROWS(InvalidArgument, "add_plane: name: expected a new one, got \"a\"",
               model.cache.add_plane(id, "a"));
  CHECK_THROWS(InvalidArgument, "(a), got \"b\"", model.cache.plane(id, "b"));
  const std::vector<std::byte> blob = model.cache.export_(id);
  std::mt19937 random(3);
  for (size_t size = 0; size < blob.size(); size += 1 + random() % 97) {
    CHECK_THROWS(InvalidArgument, "import", model.cache.import_({blob.data(), size}));
  }
  for (int round = 0; round < 2000; ++round) {  // whatever is there, nothing is read behind its end
    std::vector<std::byte> changed = blob;
    changed[random() % 700] = static_cast<std::byte>(random());
    try {
      const SequenceId made = model.cache.import_(changed);
      model.cache.check_integrity();
      model.cache.release(made, false);
    } catch (const Error&) {
      model.cache.check_integrity();
    }
  }
}

CHECK_MAIN()
