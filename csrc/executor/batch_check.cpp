#include "executor/batch_check.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#include "effinfer/error.h"
#include "kv/groups.h"
#include "kv/page_pool.h"
#include "ops/visits.h"

namespace effinfer::executor {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw InvalidArgument("[run] " + what);
}

void check_size(const char* argument, size_t size, int64_t most) {
  if (static_cast<int64_t>(size) > most) {
    fail(std::string(argument) + ": expected at most " + std::to_string(most) + " entries, got " +
         std::to_string(size));
  }
}

void check_range(const char* argument, std::span<const int32_t> values, int64_t end) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] < 0 || values[i] >= end) {
      fail(std::string(argument) + "[" + std::to_string(i) + "]: expected 0.." +
           std::to_string(end - 1) + ", got " + std::to_string(values[i]));
    }
  }
}

// A CSR row pointer of S + 1 entries: from 0 to `end`, never falling.
void check_indptr(const char* argument, std::span<const int32_t> indptr, size_t sequences,
                  size_t end) {
  if (indptr.size() != sequences + 1) {
    fail(std::string(argument) + ": expected " + std::to_string(sequences + 1) + " entries, got " +
         std::to_string(indptr.size()));
  }
  if (indptr.front() != 0 || indptr.back() < 0 || static_cast<size_t>(indptr.back()) != end) {
    fail(std::string(argument) + ": expected 0 first and " + std::to_string(end) + " last, got " +
         std::to_string(indptr.front()) + " and " + std::to_string(indptr.back()));
  }
  for (size_t i = 1; i < indptr.size(); ++i) {
    if (indptr[i] < indptr[i - 1]) fail(std::string(argument) + ": expected it to never fall");
  }
}

void check_sequences(const Batch& batch, int64_t max_seq_len) {
  for (size_t s = 0; s < batch.kv_len.size(); ++s) {
    const std::string label = "kv_len[" + std::to_string(s) + "]: ";
    const int64_t length = batch.kv_len[s];
    const int64_t rows = batch.qo_indptr[s + 1] - batch.qo_indptr[s];
    const int64_t pages = batch.kv_indptr[s + 1] - batch.kv_indptr[s];
    if (length < rows || length > max_seq_len) {
      fail(label + "expected " + std::to_string(rows) + " (the step's tokens) to " +
           std::to_string(max_seq_len) + " (max_seq_len), got " + std::to_string(length));
    }
    if (length > pages * KvCache::kPageSize) {
      fail(label + "expected at most " + std::to_string(pages * KvCache::kPageSize) +
           " tokens on " + std::to_string(pages) + " pages, got " + std::to_string(length));
    }
  }
}

// A tree's words: each is the row's own bit and the word of the row before it in the tree. What
// precedes a row of an earlier step is not known any more.
void check_tree(std::span<const uint64_t> words, size_t first, int64_t below) {
  for (size_t i = 0; i < words.size(); ++i) {
    const auto place = below + static_cast<int64_t>(i);
    const uint64_t own = uint64_t{1} << place;
    const uint64_t above = words[i] & ~own;
    // The last of the ancestors.
    const auto parent = static_cast<int64_t>(std::bit_width(above)) - 1;
    const bool known = parent >= below && parent < place;
    const bool follows =
        known ? above == words[static_cast<size_t>(parent - below)] : parent < below;
    if ((words[i] & own) != 0 && follows) continue;
    fail("ancestors[" + std::to_string(first + i) +
         "]: expected the row's own bit and the ancestors of an earlier row, or none");
  }
}

void check_trees(const Batch& batch) {
  const size_t sequences = batch.kv_len.size();
  if (!batch.tree_start.empty() && batch.tree_start.size() != sequences) {
    fail("tree_start: expected none or " + std::to_string(sequences) + " entries, got " +
         std::to_string(batch.tree_start.size()));
  }
  if (batch.ancestors.empty()) return;
  if (batch.ancestors.size() != batch.token_ids.size()) {
    fail("ancestors: expected none or " + std::to_string(batch.token_ids.size()) +
         " entries, got " + std::to_string(batch.ancestors.size()));
  }
  for (size_t s = 0; s < sequences; ++s) {
    const auto first = static_cast<size_t>(batch.qo_indptr[s]);
    const size_t rows = static_cast<size_t>(batch.qo_indptr[s + 1]) - first;
    const std::span<const uint64_t> words = batch.ancestors.subspan(first, rows);
    if (std::ranges::all_of(words, [](uint64_t word) { return word == 0; })) continue;
    const int64_t begin = int64_t{batch.kv_len[s]} - static_cast<int64_t>(rows);
    const int64_t start = batch.tree_start.empty() ? begin : batch.tree_start[s];
    if (start < 0 || start > begin) {
      fail("tree_start[" + std::to_string(s) + "]: expected 0.." + std::to_string(begin) +
           " (the step's first token), got " + std::to_string(start));
    }
    if (batch.kv_len[s] - start > 64) {
      fail("ancestors: expected at most 64 tokens in the tree of sequence " + std::to_string(s) +
           ", got " + std::to_string(batch.kv_len[s] - start));
    }
    check_tree(words, first, begin - start);
  }
}

// A flag of each sequence, or none.
void check_flags(const std::string& field, std::span<const uint8_t> flags, size_t sequences) {
  if (flags.empty()) return;
  if (flags.size() != sequences) {
    fail(field + ": expected none or " + std::to_string(sequences) + " entries, got " +
         std::to_string(flags.size()));
  }
  for (size_t s = 0; s < sequences; ++s) {
    if (flags[s] <= 1) continue;
    fail(field + "[" + std::to_string(s) + "]: expected 0 or 1, got " + std::to_string(flags[s]));
  }
}

// Of a plane: those of the longest table of a group without a window.
int64_t plane_slots(const Batch& batch, const KvCacheConfig& cache, size_t sequence) {
  int32_t most = batch.kv_len[sequence];
  for (size_t group = 1; group < kv::num_whole_groups(cache); ++group) {
    most = std::max(most, batch.more_groups[group - 1].kv_len[sequence]);
  }
  return most;
}

void check_plane(const std::string& label, const SlotPlane& plane, int64_t heads, int64_t slots) {
  if (plane.values != nullptr && plane.num_heads == heads && plane.num_slots == slots &&
      plane.stride >= slots && plane.stride % KvCache::kPageSize == 0) {
    return;
  }
  fail(label + "plane: expected " + std::to_string(heads) + " heads of " + std::to_string(slots) +
       " slots, got " + std::to_string(plane.num_heads) + " of " + std::to_string(plane.num_slots));
}

// Kernels write planes of the heads of layers without a window, up to the end of a sequence's last
// page.
void check_scored(const Batch& batch, const KvCacheConfig& cache) {
  const int64_t heads = kv::num_plane_heads(cache);
  for (size_t i = 0; i < batch.scored.size(); ++i) {
    const ScoredRows& scored = batch.scored[i];
    const std::string label = "scored[" + std::to_string(i) + "].";
    const auto sequences = static_cast<int64_t>(batch.kv_len.size());
    if (scored.sequence < 0 || scored.sequence >= sequences) {
      fail(label + "sequence: expected 0.." + std::to_string(sequences - 1) + ", got " +
           std::to_string(scored.sequence));
    }
    const auto s = static_cast<size_t>(scored.sequence);
    const int32_t rows = batch.qo_indptr[s + 1] - batch.qo_indptr[s];
    if (scored.rows < 1 || scored.rows > rows) {
      fail(label + "rows: expected 1.." + std::to_string(rows) + ", got " +
           std::to_string(scored.rows));
    }
    const int64_t slots = plane_slots(batch, cache, s);
    check_plane(label, scored.plane, heads, slots);
    if (scored.noise.values != nullptr) check_plane(label + "noise: ", scored.noise, heads, slots);
    for (size_t other = 0; other < i; ++other) {
      if (batch.scored[other].plane.values != scored.plane.values) continue;
      fail(label + "plane: expected another one than scored[" + std::to_string(other) + "]'s");
    }
  }
}

void check_weighted(const Batch& batch, const KvCacheConfig& cache) {
  for (size_t i = 0; i < batch.weighted.size(); ++i) {
    const WeightedSlots& weighted = batch.weighted[i];
    const std::string label = "weighted[" + std::to_string(i) + "].";
    const auto sequences = static_cast<int64_t>(batch.kv_len.size());
    if (weighted.sequence < 0 || weighted.sequence >= sequences) {
      fail(label + "sequence: expected 0.." + std::to_string(sequences - 1) + ", got " +
           std::to_string(weighted.sequence));
    }
    check_plane(label, weighted.plane, kv::num_plane_heads(cache),
                plane_slots(batch, cache, static_cast<size_t>(weighted.sequence)));
  }
}

// Of the cache's layers those that the graph uses are on its device.
void check_cache(const KvCacheConfig& cache, const BatchLimits& limits) {
  const KvCacheConfig& needed = limits.cache;
  if (needed.num_layers == 0) return;  // no page is read
  const auto fail_with = [&](Device device) {
    const auto text = [](const KvCacheConfig& c, Device where) {
      return std::to_string(c.num_layers) + " layers of " + std::to_string(c.num_kv_heads) +
             " heads of " + std::to_string(c.head_dim) + ", " + std::string(name(c.dtype)) +
             " on " + name(where);
    };
    fail("cache: expected " + text(needed, needed.device) + ", got " + text(cache, device));
  };
  if (cache.num_layers < needed.num_layers || cache.num_kv_heads != needed.num_kv_heads ||
      cache.head_dim != needed.head_dim || cache.dtype != needed.dtype) {
    fail_with(cache.device);
  }
  for (const int32_t layer : limits.layers) {
    if (cache.device_of(layer) != needed.device) fail_with(cache.device_of(layer));
  }
  const auto index = [](const KvCacheConfig& config) {
    return std::to_string(config.index_unit) + " keys by " + kv::index_kind(config);
  };
  if (needed.index_unit != 0 && index(cache) != index(needed)) {
    fail("cache: expected one for an index of " + index(needed) +
         " (index_unit, index_means, index_bits), got one for " + index(cache));
  }
  if (cache.groups.empty() || cache.groups == needed.groups) return;
  fail("cache: expected one group of layers, or those of kv_config(), got " +
       std::to_string(cache.groups.size()) + " others");
}

// One group's tables, in the fields of a batch.
void check_tables(const Batch& batch, int64_t num_ids, int64_t max_seq_len) {
  check_indptr("kv_indptr", batch.kv_indptr, batch.kv_len.size(), batch.kv_indices.size());
  check_range("kv_indices", batch.kv_indices, num_ids);
  check_sequences(batch, max_seq_len);
  check_trees(batch);
}

// Encoded pages, whose ids are behind those of others, are read by attention alone.
void check_encoded(const Batch& batch, int32_t num_pages, bool chooses_keys) {
  for (size_t s = 0; s < batch.kv_len.size(); ++s) {
    const int32_t rows = batch.qo_indptr[s + 1] - batch.qo_indptr[s];
    const int32_t first = batch.kv_indptr[s];
    int32_t end = first;
    while (end < batch.kv_indptr[s + 1] &&
           batch.kv_indices[static_cast<size_t>(end)] >= num_pages) {
      ++end;
    }
    if (end == first) continue;
    if (!batch.scored.empty()) {
      throw Unsupported("[run] kv_indices: sequence " + std::to_string(s) +
                        " has encoded pages, which attention alone reads");
    }
    const bool is_tree = rows > 0 && !batch.ancestors.empty() &&
                         batch.ancestors[static_cast<size_t>(batch.qo_indptr[s])] != 0;
    if (chooses_keys && rows >= ops::kSparseRows && !is_tree) {
      throw Unsupported("[run] kv_indices: sequence " + std::to_string(s) +
                        " has encoded pages, of whose keys the graph's index nodes choose none");
    }
    const int32_t written = first + (batch.kv_len[s] - rows) / KvCache::kPageSize;
    const std::span<const int32_t> others = batch.kv_indices.subspan(
        static_cast<size_t>(end), static_cast<size_t>(batch.kv_indptr[s + 1] - end));
    if (end <= written && std::ranges::all_of(others, [&](int32_t id) { return id < num_pages; })) {
      continue;
    }
    fail("kv_indices: expected the encoded pages of sequence " + std::to_string(s) +
         " first, and none that the step writes");
  }
}

// A copy of the batch with the tables of another group.
Batch with_tables(const Batch& batch, const KvTables& tables) {
  if (tables.kv_len.size() != batch.kv_len.size()) {
    fail("more_groups: expected " + std::to_string(batch.kv_len.size()) +
         " entries of kv_len, got " + std::to_string(tables.kv_len.size()));
  }
  Batch with = batch;
  with.kv_indptr = tables.kv_indptr;
  with.kv_indices = tables.kv_indices;
  with.kv_len = tables.kv_len;
  with.tree_start = tables.tree_start;
  return with;
}

}  // namespace

void check_size_of(const char* argument, size_t size, size_t expected) {
  if (size == expected) return;
  fail(std::string(argument) + ": expected " + std::to_string(expected) + " values, got " +
       std::to_string(size));
}

void copy_inputs(const Batch& batch, std::span<const InputBuffer> buffers) {
  const size_t tokens = batch.token_ids.size();
  for (const FloatInput& input : batch.float_inputs) {
    const auto known = [&](const InputBuffer& buffer) { return buffer.name == input.name; };
    if (std::none_of(buffers.begin(), buffers.end(), known)) {
      fail("float_inputs: expected inputs of the graph, got \"" + std::string(input.name) + "\"");
    }
  }
  for (const InputBuffer& buffer : buffers) {
    const auto of_buffer = [&](const FloatInput& input) { return input.name == buffer.name; };
    const auto found =
        std::find_if(batch.float_inputs.begin(), batch.float_inputs.end(), of_buffer);
    const auto given =
        std::count_if(batch.float_inputs.begin(), batch.float_inputs.end(), of_buffer);
    if (given != 1) {
      fail("float_inputs: expected \"" + buffer.name + "\" once, got it " + std::to_string(given) +
           " times");
    }
    const size_t size = tokens * static_cast<size_t>(buffer.cols);
    check_size_of(buffer.name.c_str(), found->values.size(), size);
    for (size_t i = 0; i < size; ++i) {
      if (std::isfinite(found->values[i])) continue;
      fail(buffer.name + ": expected finite values, got " + std::to_string(found->values[i]) +
           " in row " + std::to_string(i / static_cast<size_t>(buffer.cols)));
    }
    std::copy(found->values.begin(), found->values.end(), buffer.host_values());
  }
}

void check_batch(const Batch& batch, const KvCacheConfig& cache, const BatchLimits& limits) {
  const size_t tokens = batch.token_ids.size();
  const size_t sequences = batch.kv_len.size();
  if (tokens == 0) fail("token_ids: expected at least one token");
  check_size("token_ids", tokens, limits.max_tokens);
  check_size("kv_len", sequences, limits.max_sequences);
  check_size("logit_rows", batch.logit_rows.size(), limits.max_rows);
  if (batch.positions.size() != tokens) {
    fail("positions: expected " + std::to_string(tokens) + " entries, got " +
         std::to_string(batch.positions.size()));
  }
  check_range("token_ids", batch.token_ids, limits.num_ids);
  check_range("positions", batch.positions, int64_t{1} << 31);
  check_range("logit_rows", batch.logit_rows, static_cast<int64_t>(tokens));
  check_indptr("qo_indptr", batch.qo_indptr, sequences, tokens);
  check_cache(cache, limits);
  check_tables(batch, kv::num_page_ids(cache), limits.max_seq_len);
  if (cache.coding.bits != 0) check_encoded(batch, cache.num_pages, limits.chooses_keys);
  const size_t more = cache.groups.empty() ? 0 : cache.groups.size() - 1;
  if (batch.more_groups.size() != more) {
    fail("more_groups: expected " + std::to_string(more) + " (the cache's groups of layers but " +
         "one), got " + std::to_string(batch.more_groups.size()));
  }
  for (const KvTables& tables : batch.more_groups) {
    check_tables(with_tables(batch, tables), cache.num_pages, limits.max_seq_len);
  }
  check_flags("dense", batch.dense, sequences);
  check_flags("unchunked", batch.unchunked, sequences);
  check_scored(batch, cache);
  check_weighted(batch, cache);
}

}  // namespace effinfer::executor
