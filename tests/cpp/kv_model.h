// A KV cache beside a plain model of it: rows of floats in vectors, per sequence, group and head.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "check.h"
#include "coded_reader.h"
#include "core/float16.h"
#include "effinfer/kv_cache.h"
#include "kv/kv_access.h"

namespace effinfer {

// The numbers of one (layer, KV head) in a slot.
struct KvRow {
  std::vector<float> k;
  std::vector<float> v;
  float mark = 0.0f;  // in the plane "marks", if there is one
};

class KvModel {
 public:
  static constexpr int32_t kPage = KvCache::kPageSize;

  struct Sequence {
    std::vector<int32_t> tokens;
    int64_t committed = 0;
    int64_t position = 0;                               // of the next token
    std::vector<std::vector<std::vector<KvRow>>> rows;  // [group][head of the group][slot]
  };

  // With marks: whether sequences have a plane "marks".
  explicit KvModel(const KvCacheConfig& config, bool marks = false)
      : cache(config), has_marks_(marks) {
    groups_ = config.groups;
    if (!groups_.empty()) return;
    groups_.emplace_back();
    for (int32_t layer = 0; layer < config.num_layers; ++layer) groups_[0].layers.push_back(layer);
  }

  size_t num_groups() const { return groups_.size(); }
  bool is_whole(size_t group) const { return groups_[group].window_left < 0; }
  size_t num_heads(size_t group) const {
    return groups_[group].layers.size() * static_cast<size_t>(cache.config().num_kv_heads);
  }

  SequenceId create(const std::vector<int32_t>& tokens) {
    int32_t cached = 0;
    const SequenceId id = cache.create(tokens, &cached);
    if (has_marks_) cache.add_plane(id, "marks");
    Sequence& sequence = sequences[id];
    for (size_t group = 0; group < num_groups(); ++group) {
      sequence.rows.emplace_back(num_heads(group));
    }
    for (int32_t i = 0; i < cached; ++i) add_token(sequence, tokens[static_cast<size_t>(i)]);
    sequence.committed = cached;
    return id;
  }

  void append(SequenceId id, const std::vector<int32_t>& tokens) {
    cache.append(id, tokens);
    Sequence& sequence = sequences.at(id);
    const auto first = sequence.tokens.size();
    for (const int32_t token : tokens) add_token(sequence, token);
    for (size_t i = 0; i < tokens.size(); ++i) write(id, sequence.tokens.size() - first - i);
    if (has_marks_) mark(id, static_cast<int64_t>(tokens.size()));
  }

  void commit(SequenceId id) {
    Sequence& sequence = sequences.at(id);
    cache.commit(id, static_cast<int64_t>(sequence.tokens.size()) - sequence.committed);
    sequence.committed = static_cast<int64_t>(sequence.tokens.size());
  }
  void feed(SequenceId id, const std::vector<int32_t>& tokens) {
    append(id, tokens);
    commit(id);
  }

  void keep(SequenceId id, const std::vector<int32_t>& kept) {
    cache.keep(id, kept);
    Sequence& sequence = sequences.at(id);
    const size_t count = sequence.tokens.size() - static_cast<size_t>(sequence.committed);
    const auto close = [&](auto& values) {
      const auto first = values.size() - count;
      for (size_t i = 0; i < kept.size(); ++i) {
        values[first + i] = values[first + static_cast<size_t>(kept[i])];
      }
      values.resize(first + kept.size());
    };
    close(sequence.tokens);
    for (auto& heads : sequence.rows) std::ranges::for_each(heads, close);
    sequence.position -= static_cast<int64_t>(count - kept.size());
    sequence.committed = static_cast<int64_t>(sequence.tokens.size());
  }

  SequenceId fork(SequenceId id) {
    const SequenceId forked = cache.fork(id);
    sequences[forked] = sequences.at(id);
    return forked;
  }

  void rollback(SequenceId id, int64_t count) {
    cache.rollback(id, count);
    Sequence& sequence = sequences.at(id);
    const auto drop = [&](auto& values) { values.resize(values.size() - count); };
    drop(sequence.tokens);
    for (auto& heads : sequence.rows) std::ranges::for_each(heads, drop);
    sequence.position -= count;
    sequence.committed = std::min(sequence.committed, static_cast<int64_t>(sequence.tokens.size()));
  }

  void release(SequenceId id, bool keep_prefix) {
    cache.release(id, keep_prefix);
    sequences.erase(id);
  }

  void retain(SequenceId id, const std::vector<std::vector<int32_t>>& slots, int32_t group = 0) {
    cache.retain(id, group, slots);
    auto& heads = sequences.at(id).rows[static_cast<size_t>(group)];
    for (size_t head = 0; head < heads.size(); ++head) {
      std::vector<KvRow> kept;
      for (const int32_t slot : slots[slots.size() == 1 ? 0 : head]) {
        kept.push_back(heads[head][static_cast<size_t>(slot)]);
      }
      heads[head] = std::move(kept);
    }
  }

  void reorder(SequenceId id, const std::vector<std::vector<int32_t>>& slots, int32_t group = 0) {
    cache.reorder(id, group, slots);
    auto& heads = sequences.at(id).rows[static_cast<size_t>(group)];
    for (size_t head = 0; head < heads.size(); ++head) {
      const std::vector<KvRow> before = heads[head];
      const auto& list = slots[slots.size() == 1 ? 0 : head];
      for (size_t i = 0; i < list.size(); ++i)
        heads[head][i] = before[static_cast<size_t>(list[i])];
    }
  }

  void evict(SequenceId id, int64_t begin, int64_t end, int32_t group = 0) {
    cache.evict(id, group, begin, end);
    for (auto& rows : sequences.at(id).rows[static_cast<size_t>(group)]) {
      rows.erase(rows.begin() + begin, rows.begin() + end);
    }
  }

  void merge(SequenceId id, const std::vector<KvMerge>& merges, int32_t group = 0) {
    cache.merge(id, group, merges);
    for (const KvMerge& merge : merges) {
      auto& rows =
          sequences.at(id).rows[static_cast<size_t>(group)][static_cast<size_t>(merge.head)];
      KvRow sum;
      sum.mark = rows[static_cast<size_t>(merge.into)].mark;
      for (auto values : {&KvRow::k, &KvRow::v}) {
        (sum.*values).assign(rows[0].k.size(), 0.0f);
        for (size_t i = 0; i < merge.slots.size(); ++i) {
          const auto& from = rows[static_cast<size_t>(merge.slots[i])].*values;
          for (size_t d = 0; d < from.size(); ++d) (sum.*values)[d] += merge.weights[i] * from[d];
        }
      }
      rows[static_cast<size_t>(merge.into)] = std::move(sum);
    }
  }

  // Rotation by a difference of positions, in double precision.
  void reposition(SequenceId id, const std::vector<int64_t>& from, int64_t delta) {
    cache.reposition(id, from, delta);
    Sequence& sequence = sequences.at(id);
    sequence.position += delta;
    const auto kv_heads = static_cast<size_t>(cache.config().num_kv_heads);
    for (size_t group = 0; group < num_groups(); ++group) {
      const auto gone = missing(id, group);
      for (size_t head = 0; head < num_heads(group); ++head) {
        const auto layer = static_cast<size_t>(groups_[group].layers[head / kv_heads]);
        auto& rows = sequence.rows[group][head];
        const int64_t first = from[from.size() == 1 ? 0 : group] + gone;
        for (auto i = static_cast<size_t>(first); i < rows.size(); ++i) {
          rotate(cache.config().rope[layer], delta, rows[i].k);
        }
      }
    }
  }

  void move_through_blob(SequenceId id, SequenceId& moved) {
    const std::vector<std::byte> blob = cache.export_(id);
    cache.release(id, false);
    auto sequence = sequences.extract(id);
    moved = cache.import_(blob);  // pages that were shared come back as its own: there may be none
    sequence.key() = moved;
    sequences.insert(std::move(sequence));
  }

  // The numbers of every slot that kernels may read, lengths and integrity.
  void check() {
    cache.check_integrity();
    for (const auto& [id, sequence] : sequences) {
      CHECK_EQ(cache.length(id), static_cast<int64_t>(sequence.tokens.size()));
      CHECK_EQ(cache.committed(id), sequence.committed);
      CHECK_EQ(cache.next_position(id), sequence.position);
      CHECK(std::ranges::equal(cache.tokens(id), sequence.tokens));
      for (size_t group = 0; group < num_groups(); ++group) check_group(id, sequence, group);
      if (has_marks_) check_marks(id, sequence);
    }
  }

  KvCache cache;
  std::map<SequenceId, Sequence> sequences;

 private:
  // Tokens in front of a window's table.
  int64_t missing(SequenceId id, size_t group) const {
    return static_cast<int64_t>(sequences.at(id).rows[group][0].size()) -
           cache.slots(id, static_cast<int32_t>(group));
  }

  static void rotate(const KvRope& rope, int64_t delta, std::vector<float>& key) {
    const size_t half = rope.inv_freq.size();
    for (size_t d = 0; d < half; ++d) {
      const double angle = static_cast<double>(delta) * static_cast<double>(rope.inv_freq[d]);
      float& x = key[rope.interleaved ? 2 * d : d];
      float& y = key[rope.interleaved ? 2 * d + 1 : d + half];
      const double real = x * std::cos(angle) - y * std::sin(angle);
      y = static_cast<float>(x * std::sin(angle) + y * std::cos(angle));
      x = static_cast<float>(real);
    }
  }

  // What a step would write: numbers of [-1, 1] that every type of cache has exactly, but for i8.
  void add_token(Sequence& sequence, int32_t token) {
    uint32_t state = static_cast<uint32_t>(token) * 2654435761u +
                     static_cast<uint32_t>(sequence.position) * 40503u + 1u;
    for (auto& heads : sequence.rows) {
      for (auto& rows : heads) {
        KvRow& row = rows.emplace_back();
        for (auto* values : {&row.k, &row.v}) {
          values->resize(static_cast<size_t>(cache.config().head_dim));
          for (float& value : *values) {
            state = state * 1664525u + 1013904223u;
            value = static_cast<float>(static_cast<int32_t>(state >> 25) - 64) / 64.0f;
          }
        }
      }
    }
    sequence.tokens.push_back(token);
    ++sequence.position;
  }

  template <class Visit>
  void visit(SequenceId id, size_t group, size_t head, int64_t slot, Visit&& visit) const {
    const auto kv_heads = static_cast<size_t>(cache.config().num_kv_heads);
    const auto layer = static_cast<size_t>(groups_[group].layers[head / kv_heads]);
    const ops::KvLayer& kv = KvCacheAccess::layers(cache)[layer];
    const auto pages = cache.pages(id, static_cast<int32_t>(group));
    const int32_t page = pages[static_cast<size_t>(slot / kPage)];
    const auto in_layer = static_cast<int64_t>(head % kv_heads);
    const int64_t p = 4 / dtype_info(kv.dtype).block_bytes;
    for (int64_t d = 0; d < kv.head_dim; ++d) {
      visit(kv.k_head(page, in_layer), ops::k_offset(slot % kPage, d, kv.head_dim, p), d, false);
      visit(kv.v_head(page, in_layer), ops::v_offset(slot % kPage, d, kv.head_dim, p), d, true);
    }
  }

  // The greatest distance of a coded slot's numbers from what was written.
  float distance_of_coded(size_t group, size_t head, int32_t page, int64_t token,
                          const KvRow& row) const {
    const auto kv_heads = static_cast<size_t>(cache.config().num_kv_heads);
    const auto layer = static_cast<size_t>(groups_[group].layers[head / kv_heads]);
    const CodedReader reader(KvCacheAccess::layers(cache)[layer].coded, page,
                             static_cast<int64_t>(head % kv_heads));
    float worst = 0.0f;
    for (size_t d = 0; d < row.k.size(); ++d) {
      const auto dim = static_cast<int64_t>(d);
      worst = std::max(worst, std::abs(reader.key(token, dim).value - row.k[d]));
      worst = std::max(worst, std::abs(reader.value(token, dim).value - row.v[d]));
    }
    return worst;
  }

  // The slot that lies `back` from the end, in every group and head; f32 and bf16.
  void write(SequenceId id, size_t back) {
    const bool wide = cache.config().dtype == DType::f32;
    const Sequence& sequence = sequences.at(id);
    for (size_t group = 0; group < num_groups(); ++group) {
      const auto slot = cache.slots(id, static_cast<int32_t>(group)) - static_cast<int64_t>(back);
      for (size_t head = 0; head < num_heads(group); ++head) {
        const auto& rows = sequence.rows[group][head];
        const KvRow& row = rows[rows.size() - back];
        visit(id, group, head, slot, [&](uint8_t* page, int64_t at, int64_t d, bool value) {
          const float x = (value ? row.v : row.k)[static_cast<size_t>(d)];
          if (wide) {
            reinterpret_cast<float*>(page)[at] = x;
          } else {
            reinterpret_cast<uint16_t*>(page)[at] = f32_to_bf16(x);
          }
        });
      }
    }
  }

  // Numbers of the last slots, of every head its own.
  void mark(SequenceId id, int64_t count) {
    const SlotPlane plane = cache.plane(id, "marks");
    for (size_t group = 0; group < num_groups(); ++group) {
      if (!is_whole(group)) continue;
      const auto number = static_cast<int32_t>(group);
      const int64_t first = cache.first_plane_head(number);
      const int64_t slots = cache.slots(id, number);
      auto& heads = sequences.at(id).rows[group];
      for (size_t head = 0; head < heads.size(); ++head) {
        float* row = plane.values + (first + static_cast<int64_t>(head)) * plane.stride;
        for (int64_t slot = slots - count; slot < slots; ++slot) {
          row[slot] = heads[head][static_cast<size_t>(slot)].mark = ++marks_;
        }
      }
    }
  }

  // Behind the slots of a group that has fewer than others there are zeros.
  void check_marks(SequenceId id, const Sequence& sequence) {
    const SlotPlane plane = cache.plane(id, "marks");
    int64_t different = 0;
    int64_t most = 0;
    for (size_t group = 0; group < num_groups(); ++group) {
      if (!is_whole(group)) continue;
      const int64_t first = cache.first_plane_head(static_cast<int32_t>(group));
      for (size_t head = 0; head < sequence.rows[group].size(); ++head) {
        const auto& rows = sequence.rows[group][head];
        most = std::max(most, static_cast<int64_t>(rows.size()));
        const float* marks = plane.values + (first + static_cast<int64_t>(head)) * plane.stride;
        for (int64_t slot = 0; slot < plane.num_slots; ++slot) {
          const auto place = static_cast<size_t>(slot);
          different += marks[slot] != (place < rows.size() ? rows[place].mark : 0.0f) ? 1 : 0;
        }
      }
    }
    CHECK_EQ(different, 0);
    CHECK_EQ(plane.num_slots, most);
  }

  void check_group(SequenceId id, const Sequence& sequence, size_t group) const {
    const auto pages = cache.pages(id, static_cast<int32_t>(group));
    const bool wide = cache.config().dtype == DType::f32;
    // Rotations and sums round: to the type of the cache, some dozen times at most.
    const float tolerance = wide ? 1e-5f : 0.1f;
    // Half a step of a range of at most 2, and what else rounds.
    const int32_t bits = cache.config().coding.bits;
    const float coded_tolerance = tolerance + 1.0f / static_cast<float>((1 << bits) - (bits > 0));
    float worst = 0.0f;
    float worst_coded = 0.0f;
    for (size_t head = 0; head < num_heads(group); ++head) {
      const auto& rows = sequence.rows[group][head];
      const int64_t slots = cache.slots(id, static_cast<int32_t>(group));
      const auto gone = static_cast<int64_t>(rows.size()) - slots;
      if (is_whole(group)) CHECK_EQ(gone, 0);
      for (int64_t slot = 0; slot < slots; ++slot) {
        const int32_t id_of_page = pages[static_cast<size_t>(slot / kPage)];
        if (id_of_page < 0) continue;
        const KvRow& row = rows[static_cast<size_t>(slot + gone)];
        if (id_of_page >= cache.config().num_pages) {
          worst_coded =
              std::max(worst_coded, distance_of_coded(group, head, id_of_page, slot % kPage, row));
          continue;
        }
        visit(id, group, head, slot, [&](const uint8_t* page, int64_t at, int64_t d, bool value) {
          const float x = wide ? reinterpret_cast<const float*>(page)[at]
                               : bf16_to_f32(reinterpret_cast<const uint16_t*>(page)[at]);
          worst = std::max(worst, std::abs(x - (value ? row.v : row.k)[static_cast<size_t>(d)]));
        });
      }
    }
    CHECK(worst <= tolerance);
    CHECK(worst_coded <= coded_tolerance);
  }

  std::vector<KvGroup> groups_;
  bool has_marks_ = false;
  float marks_ = 0.0f;
};

}  // namespace effinfer
