// KvCache::check_integrity: what must hold between sequences, tables, pools and the radix tree.
#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "core/float16.h"
#include "effinfer/error.h"
#include "kv/kv_cache_impl.h"
#include "kv/token_rows.h"

namespace effinfer {
namespace {

[[noreturn]] void fail(const std::string& label, const std::string& what) {
  throw InternalError(label + what);
}

void check_counts(const std::string& label, const kv::Sequence& sequence) {
  if (sequence.committed < 0 || sequence.committed > sequence.length()) {
    fail(label, "committed " + std::to_string(sequence.committed));
  }
  if (sequence.fixed < 0 || sequence.fixed > sequence.committed) {
    fail(label, "fixed " + std::to_string(sequence.fixed));
  }
  if (sequence.is_prefix && (sequence.fixed != 0 || sequence.shift != 0)) {
    fail(label, "a prefix whose keys moved");
  }
  if (sequence.length() + sequence.shift < 0) fail(label, "a negative position");
}

// What is known of a unit's keys in a dimension holds for each of them.
bool holds_bounds(const uint16_t* bounds, size_t dim, size_t d, std::span<const float> keys) {
  const float least = bf16_to_f32(bounds[d]), most = bf16_to_f32(bounds[dim + d]);
  for (size_t i = d; i < keys.size(); i += dim) {
    if (!(least <= keys[i] && keys[i] <= most)) return false;
  }
  return true;
}
// To float32 and then to bf16 rounded.
bool holds_mean(const uint16_t* mean, size_t dim, size_t d, std::span<const float> keys) {
  double sum = 0.0, size = 0.0;
  for (size_t i = d; i < keys.size(); i += dim) {
    sum += double{keys[i]};
    size += std::abs(double{keys[i]});
  }
  const double count = static_cast<double>(keys.size() / dim);
  const double error = 0x1p-8 * std::abs(sum) + 0x1p-19 * size;
  return std::abs(double{bf16_to_f32(mean[d])} * count - sum) <= error;
}

void check_page(const ops::KvLayer& layer, int32_t page, int32_t head) {
  const auto dim = static_cast<size_t>(layer.head_dim);
  const auto unit = static_cast<size_t>(layer.bounds.unit);
  const bool means = layer.bounds.vectors == 1;
  const uint16_t* kept = layer.bounds.of(page, head, layer.num_kv_heads, layer.head_dim);
  std::vector<float> keys(unit * dim);
  for (size_t first = 0; first < KvCache::kPageSize; first += unit, kept += means ? dim : 2 * dim) {
    for (size_t i = 0; i < unit; ++i) {
      kv::read_key(layer, head, {page, static_cast<int32_t>(first + i)}, &keys[i * dim]);
    }
    for (size_t d = 0; d < dim; ++d) {
      if (means ? holds_mean(kept, dim, d, keys) : holds_bounds(kept, dim, d, keys)) continue;
      fail("[kv_cache] page " + std::to_string(page),
           means ? ": a mean of other keys" : ": a key outside its bounds");
    }
  }
}
// Codes of keys are the index's alone.
void check_bounds(const kv::PagePool& pool) {
  if (pool.config().index_unit <= 1 || !pool.config().on_host()) return;  // a GPU's: out of reach
  for (const ops::KvLayer& layer : pool.layers()) {
    for (int32_t page = 0; page < pool.num_pages(); ++page) {
      const int32_t* known = layer.bounds.known + page * layer.bounds.known_stride;
      for (int32_t head = 0; head < layer.num_kv_heads; ++head) {
        if (pool.references(page) > 0 && known[head] != 0) check_page(layer, page, head);
      }
    }
  }
}

// Slots of a window begin at a chunk, and what it needs is there.
void check_window(const std::string& label, const kv::Sequence& sequence,
                  const kv::PageTable& table, int64_t window) {
  const int64_t first = sequence.first_token(table);
  const auto freed = static_cast<int64_t>(table.num_freed());
  if (first < 0 || first % (kv::kChunkPages * KvCache::kPageSize) != 0 ||
      freed >= kv::kChunkPages) {
    fail(label, "a window that begins at token " + std::to_string(first));
  }
  const int64_t held = first / KvCache::kPageSize + freed;
  if (held > kv::first_needed_page(window, sequence.committed)) {
    fail(label, "page " + std::to_string(held - 1) + " of a window is gone too early");
  }
}

void check_planes(const std::string& label, const kv::Sequence& sequence, int64_t heads,
                  int64_t slots) {
  for (const kv::Plane& plane : sequence.planes) {
    const bool sound = plane.num_heads == heads && plane.stride % KvCache::kPageSize == 0 &&
                       plane.stride >= slots &&
                       plane.values.size() == static_cast<size_t>(heads * plane.stride);
    if (!sound) fail(label, "plane " + plane.name + " has no room for its slots");
  }
}

}  // namespace

void KvCache::check_integrity() const {
  std::vector<std::vector<int32_t>> references(impl_->pools.size());
  for (size_t group = 0; group < references.size(); ++group) {
    references[group].assign(static_cast<size_t>(impl_->pool(group).num_ids()), 0);
  }
  for (const auto& [id, sequence] : impl_->sequences) {
    const std::string label = "[kv_cache] sequence " + std::to_string(id) + ": ";
    check_counts(label, sequence);
    check_planes(label, sequence, impl_->num_plane_heads(), impl_->most_slots(sequence));
    for (size_t group = 0; group < sequence.tables.size(); ++group) {
      const kv::PageTable& table = sequence.tables[group];
      if (table.slots < sequence.uncommitted() || table.slots > sequence.length() ||
          table.pages.size() != pages_for(static_cast<size_t>(table.slots))) {
        fail(label, std::to_string(table.pages.size()) + " pages for " +
                        std::to_string(table.slots) + " slots of " +
                        std::to_string(sequence.length()) + " tokens");
      }
      const bool whole = group < impl_->num_whole_groups();
      if (whole && sequence.is_prefix && table.slots != sequence.length()) {
        fail(label, "a prefix that lacks keys");
      }
      if (whole && table.num_freed() > 0) fail(label, "a page of a group without a window is gone");
      if (!whole) check_window(label, sequence, table, impl_->window_of(group));
      std::vector<int32_t> sorted;
      for (size_t i = table.num_freed(); i < table.pages.size(); ++i) {
        const int32_t page = table.pages[i];
        if (page < 0 || page >= impl_->pool(group).num_ids()) {
          fail(label, "page " + std::to_string(page) + " is not of the pool");
        }
        ++references[group][static_cast<size_t>(page)];
        if (impl_->pool(group).is_coded(page) && i >= impl_->num_encoded(table)) {
          fail(label, "an encoded page behind one that is not");
        }
        // What a step will write into has one reader.
        const int64_t end = std::min<int64_t>(static_cast<int64_t>(i + 1) * kPageSize, table.slots);
        if (table.slots - sequence.uncommitted() < end &&
            impl_->pool(group).references(page) != 1) {
          fail(label, "page " + std::to_string(page) + " is written and shared");
        }
        sorted.push_back(page);
      }
      std::sort(sorted.begin(), sorted.end());
      if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
        fail(label, "a page appears twice");
      }
    }
  }
  impl_->tree.check(references);
  for (size_t group = 0; group < impl_->pools.size(); ++group) {
    impl_->pool(group).check(references[group]);
    check_bounds(impl_->pool(group));
  }
}

}  // namespace effinfer
