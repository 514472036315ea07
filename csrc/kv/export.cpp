// A sequence as bytes:
//
//   Header                 of the cache's layout and the sequence's counts
//   Group[num_groups]      slots, pages, pages that a window has freed, pages that are encoded
//   int32[length]          tokens
//   planes                 of each its name's length as int64, its name, float[heads][slots], each
//                          head with the slots of its group
//   pages                  group by group, in order of the table, freed ones left out; a page is
//                          what PagePool::read_page() writes
#include <algorithm>
#include <cstring>
#include <string>

#include "core/digest.h"
#include "effinfer/error.h"
#include "kv/kv_cache_impl.h"

namespace effinfer {
namespace {

constexpr uint32_t kMagic = 0x564b4645;  // "EFKV"

struct Header {
  uint32_t magic = kMagic;
  int32_t num_layers = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t dtype = 0;
  int32_t num_groups = 0;
  int32_t coding_bits = 0;
  int32_t coding_rank = 0;
  int32_t coding_outliers = 0;
  int32_t coding_features = 0;
  int32_t coding_shared_layers = 0;
  int32_t nothing = 0;
  Digest coding_basis;
  Digest coding_codebooks;
  int64_t length = 0;
  int64_t shift = 0;
  int64_t fixed = 0;
  int64_t is_prefix = 0;
  int64_t num_planes = 0;
};
struct Group {
  int64_t page_bytes = 0;
  int64_t window_left = 0;
  int64_t slots = 0;
  int64_t num_pages = 0;
  int64_t num_freed = 0;
  int64_t num_encoded = 0;
};

[[noreturn]] void fail(const std::string& what) {
  throw InvalidArgument("[kv_cache] import: blob: expected " + what);
}

// Reads a blob from its start.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> blob) : blob_(blob) {}

  std::span<const std::byte> take(size_t bytes) {
    if (bytes > blob_.size()) {
      fail(std::to_string(bytes) + " more bytes, got " + std::to_string(blob_.size()));
    }
    const auto taken = blob_.first(bytes);
    blob_ = blob_.subspan(bytes);
    return taken;
  }
  template <class T>
  T take() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  size_t left() const { return blob_.size(); }

 private:
  std::span<const std::byte> blob_;
};

Digest digest_of(std::span<const uint16_t> numbers) {
  std::span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(numbers.data()),
                                 numbers.size_bytes());
  std::vector<Digest> chunks;
  for (; !bytes.empty(); bytes = bytes.subspan(std::min(bytes.size(), kDigestChunk))) {
    chunks.push_back(digest_chunk(bytes.first(std::min(bytes.size(), kDigestChunk))));
  }
  return digest_chunks(chunks, numbers.size_bytes());
}

Header layout_of(const KvCacheConfig& config, size_t groups) {
  Header header;
  header.num_layers = config.num_layers;
  header.num_kv_heads = config.num_kv_heads;
  header.head_dim = config.head_dim;
  header.dtype = static_cast<int32_t>(config.dtype);
  header.num_groups = static_cast<int32_t>(groups);
  header.coding_bits = config.coding.bits;
  header.coding_rank = config.coding.rank;
  header.coding_outliers = config.coding.outliers;
  header.coding_features = config.coding.features;
  header.coding_shared_layers = config.coding.shared_layers;
  if (config.coding.basis) header.coding_basis = digest_of(*config.coding.basis);
  if (config.coding.codebooks) header.coding_codebooks = digest_of(*config.coding.codebooks);
  return header;
}

bool same_layout(const Header& a, const Header& b) {
  return a.magic == b.magic && a.num_layers == b.num_layers && a.num_kv_heads == b.num_kv_heads &&
         a.head_dim == b.head_dim && a.dtype == b.dtype && a.num_groups == b.num_groups &&
         a.coding_bits == b.coding_bits && a.coding_rank == b.coding_rank &&
         a.coding_outliers == b.coding_outliers && a.coding_features == b.coding_features &&
         a.coding_shared_layers == b.coding_shared_layers && a.coding_basis == b.coding_basis &&
         a.coding_codebooks == b.coding_codebooks;
}

void check_header(const Header& header) {
  const bool moved = header.is_prefix == 0;
  constexpr int64_t kMost = int64_t{1} << 31;
  const bool counts = header.length >= 0 && header.length < kMost && header.fixed >= 0 &&
                      header.fixed <= header.length && header.shift >= -header.length &&
                      header.shift < kMost - header.length &&
                      (header.is_prefix == 0 || header.is_prefix == 1);
  if (!counts || (!moved && (header.shift != 0 || header.fixed != 0))) fail("sound counts");
}

// A table that integrity checks would let pass.
void check_group(const Header& header, const Group& group) {
  constexpr int64_t kPage = KvCache::kPageSize;
  const bool window = group.window_left >= 0;
  const bool counts = group.slots >= 0 && group.slots <= header.length &&
                      group.num_pages == (group.slots + kPage - 1) / kPage &&
                      group.num_freed >= 0 && group.num_freed <= group.num_pages &&
                      group.num_encoded >= 0 && group.num_encoded <= group.slots / kPage &&
                      (group.num_encoded == 0 || (header.coding_bits != 0 && !window));
  if (!counts) fail("sound tables");
  const int64_t first = header.length - group.slots;
  const int64_t held = first / kPage + group.num_freed;
  const bool sound = window ? first % (kv::kChunkPages * kPage) == 0 &&
                                  group.num_freed < kv::kChunkPages &&
                                  held <= kv::first_needed_page(group.window_left, header.length)
                            : group.num_freed == 0 && (header.is_prefix == 0 || first == 0);
  if (!sound) fail("sound tables");
}

// The heads of a group in planes, and its slots.
struct PlanePart {
  kv::PlaneRows heads;
  int64_t slots = 0;
};

// Names are unique and not longer than what is left; no memory is taken for what is not there.
std::vector<kv::Plane> read_planes(Reader& reader, int64_t count, std::span<const PlanePart> parts,
                                   Device device) {
  std::vector<kv::Plane> planes;
  for (int64_t i = 0; i < count; ++i) {
    const auto size = reader.take<int64_t>();
    if (size < 0 || size > static_cast<int64_t>(reader.left())) fail("sound planes");
    const auto name = reader.take(static_cast<size_t>(size));
    kv::Plane plane;
    plane.name.assign(reinterpret_cast<const char*>(name.data()), name.size());
    for (const kv::Plane& other : planes) {
      if (other.name == plane.name) fail("sound planes");
    }
    plane.num_heads = parts.back().heads.end;
    plane.values = kv::PlaneNumbers(device);
    for (const auto& [heads, slots] : parts) {
      const auto row = static_cast<size_t>(slots) * sizeof(float);
      if (reader.left() / static_cast<size_t>(heads.end - heads.begin) < row) fail("sound planes");
      plane.add(heads, 0, slots);
      for (int64_t head = heads.begin; head < heads.end && slots > 0; ++head) {
        std::memcpy(plane.values.data() + head * plane.stride, reader.take(row).data(), row);
      }
    }
    planes.push_back(std::move(plane));
  }
  return planes;
}

}  // namespace

std::vector<std::byte> KvCache::export_(SequenceId id) const {
  const kv::Sequence& sequence = impl_->find(id);
  if (sequence.uncommitted() != 0) {
    throw InvalidArgument("[kv_cache] export: expected every token committed, got " +
                          std::to_string(sequence.committed) + " of " +
                          std::to_string(sequence.length()));
  }
  Header header = layout_of(config(), impl_->pools.size());
  header.length = sequence.length();
  header.shift = sequence.shift;
  header.fixed = sequence.fixed;
  header.is_prefix = sequence.is_prefix ? 1 : 0;
  header.num_planes = static_cast<int64_t>(sequence.planes.size());
  std::vector<std::byte> blob;
  const auto add = [&](const void* data, size_t bytes) {
    const auto* first = static_cast<const std::byte*>(data);
    blob.insert(blob.end(), first, first + bytes);
  };
  blob.reserve(sizeof(Header) + sizeof(Group) * impl_->pools.size() +
               sequence.tokens.size() * sizeof(int32_t) + used_bytes(id));
  add(&header, sizeof(header));
  for (size_t group = 0; group < impl_->pools.size(); ++group) {
    const kv::PageTable& table = sequence.tables[group];
    const Group entry = {static_cast<int64_t>(impl_->pool(group).page_bytes()),
                         impl_->window_of(group),
                         table.slots,
                         static_cast<int64_t>(table.pages.size()),
                         static_cast<int64_t>(table.num_freed()),
                         static_cast<int64_t>(group == 0 ? impl_->num_encoded(table) : 0)};
    add(&entry, sizeof(entry));
  }
  add(sequence.tokens.data(), sequence.tokens.size() * sizeof(int32_t));
  for (const kv::Plane& plane : sequence.planes) {
    const auto size = static_cast<int64_t>(plane.name.size());
    add(&size, sizeof(size));
    add(plane.name.data(), plane.name.size());
    for (size_t group = 0; group < impl_->num_whole_groups(); ++group) {
      const auto bytes = static_cast<size_t>(sequence.tables[group].slots) * sizeof(float);
      const auto [begin, end] = impl_->plane_rows(group);
      for (int64_t head = begin; head < end; ++head) {
        add(plane.values.data() + head * plane.stride, bytes);
      }
    }
  }
  for (size_t group = 0; group < impl_->pools.size(); ++group) {
    const kv::PagePool& pool = impl_->pool(group);
    for (const int32_t page : sequence.tables[group].pages) {
      if (page == kv::kFreed) continue;
      const size_t size = pool.page_bytes(page);
      blob.resize(blob.size() + size);
      pool.read_page(page, blob.data() + blob.size() - size);
    }
  }
  return blob;
}

SequenceId KvCache::import_(std::span<const std::byte> blob) {
  Reader reader(blob);
  const auto header = reader.take<Header>();
  if (!same_layout(header, layout_of(config(), impl_->pools.size()))) {
    fail("one of a cache of these layers, heads, types and groups");
  }
  check_header(header);
  std::vector<Group> groups;
  size_t bytes = 0;
  for (size_t group = 0; group < impl_->pools.size(); ++group) {
    groups.push_back(reader.take<Group>());
    const Group& entry = groups.back();
    if (entry.page_bytes != static_cast<int64_t>(impl_->pool(group).page_bytes()) ||
        entry.window_left != impl_->window_of(group)) {
      fail("one of a cache of these layers, heads, types and groups");
    }
    check_group(header, entry);
    const auto pages = static_cast<size_t>(entry.num_pages - entry.num_freed);
    const auto encoded = static_cast<size_t>(entry.num_encoded);
    bytes += (pages - encoded) * impl_->pool(group).page_bytes();
    bytes += encoded * impl_->pool(group).coded_page_bytes();
    const size_t needed = impl_->pool(group).pages_of(pages - encoded, encoded);
    if (!impl_->has_pages(group, needed)) {
      throw OutOfMemory("[kv_cache] import: " + std::to_string(needed) + " pages needed, " +
                        std::to_string(available_pages()) + " available");
    }
  }
  const auto tokens = reader.take(static_cast<size_t>(header.length) * sizeof(int32_t));
  std::vector<PlanePart> parts;
  for (size_t group = 0; group < impl_->num_whole_groups(); ++group) {
    parts.push_back({impl_->plane_rows(group), groups[group].slots});
  }
  std::vector<kv::Plane> planes =
      read_planes(reader, header.num_planes, parts, impl_->plane_device());
  if (reader.left() != bytes) {
    fail(std::to_string(bytes) + " bytes of pages, got " + std::to_string(reader.left()));
  }
  kv::Sequence sequence;
  sequence.tokens.resize(static_cast<size_t>(header.length));
  if (!tokens.empty()) std::memcpy(sequence.tokens.data(), tokens.data(), tokens.size());
  sequence.committed = header.length;
  sequence.shift = header.shift;
  sequence.fixed = header.fixed;
  sequence.is_prefix = header.is_prefix != 0;
  sequence.planes = std::move(planes);
  for (size_t group = 0; group < groups.size(); ++group) {
    kv::PagePool& pool = impl_->pool(group);
    kv::PageTable& table = sequence.tables.emplace_back();
    table.slots = groups[group].slots;
    const auto freed = static_cast<size_t>(groups[group].num_freed);
    const auto pages = static_cast<size_t>(groups[group].num_pages);
    table.pages.assign(freed, kv::kFreed);
    const auto num_encoded = static_cast<size_t>(groups[group].num_encoded);
    impl_->make_free(group, pool.pages_of(pages - freed - num_encoded, num_encoded));
    for (size_t i = freed; i < pages; ++i) {
      const int32_t page = i < num_encoded ? pool.allocate_coded() : pool.allocate();
      table.pages.push_back(page);
      pool.write_page(page, reader.take(pool.page_bytes(page)).data());
    }
  }
  const SequenceId id = impl_->next_id++;
  impl_->sequences.emplace(id, std::move(sequence));
  return id;
}

}  // namespace effinfer
