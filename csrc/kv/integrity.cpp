// KvCache::check_integrity: what must hold between sequences, tables, pools and the radix tree.
#include <algorithm>
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

// What is known of a page's keys holds for each of them.
void check_page(const ops::KvLayer& layer, int32_t page, int32_t head) {
  const auto dim = static_cast<size_t>(layer.head_dim);
  const uint16_t* least = layer.bounds.of(page, head, layer.num_kv_heads, layer.head_dim);
  std::vector<float> key(dim);
  for (int32_t token = 0; token < KvCache::kPageSize; ++token) {
    kv::read_key(layer, head, {page, token}, key.data());
    for (size_t d = 0; d < dim; ++d) {
      if (bf16_to_f32(least[d]) <= key[d] && key[d] <= bf16_to_f32(least[dim + d])) continue;
      fail("[kv_cache] page " + std::to_string(page), ": a key outside its bounds");
    }
  }
}
void check_bounds(const kv::PagePool& pool) {
  if (!pool.config().page_bounds || !pool.config().on_host()) return;  // a GPU's are out of reach
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

void check_planes(const std::string& label, const kv::Sequence& sequence, int64_t heads) {
  for (const kv::Plane& plane : sequence.planes) {
    const bool sound = plane.num_heads == heads && plane.stride % KvCache::kPageSize == 0 &&
                       plane.stride >= sequence.tables[0].slots &&
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
    check_planes(label, sequence, impl_->num_plane_heads());
    for (size_t group = 0; group < sequence.tables.size(); ++group) {
      const kv::PageTable& table = sequence.tables[group];
      if (table.slots < sequence.uncommitted() || table.slots > sequence.length() ||
          table.pages.size() != pages_for(static_cast<size_t>(table.slots))) {
        fail(label, std::to_string(table.pages.size()) + " pages for " +
                        std::to_string(table.slots) + " slots of " +
                        std::to_string(sequence.length()) + " tokens");
      }
      if (group == 0 && sequence.is_prefix && table.slots != sequence.length()) {
        fail(label, "a prefix that lacks keys");
      }
      if (group > 0) check_window(label, sequence, table, impl_->window_of(group));
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
