#include "weights/pack_cache.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "effinfer/error.h"
#include "graph/op_specs.h"
#include "io/atomic_file.h"
#include "weights/file_digest.h"
#include "weights/ternary_form.h"

namespace effinfer {

std::string_view name(PackCacheState state) {
  switch (state) {
    case PackCacheState::absent:
      return "absent";
    case PackCacheState::hit:
      return "hit";
    case PackCacheState::stored:
      return "stored";
    case PackCacheState::failed:
      return "failed";
    case PackCacheState::off:
      break;
  }
  return "off";
}

PackCacheReport find_pack_cache(const Graph& graph, const WeightSource& weights,
                                const std::string& folder, ThreadPool& pool) {
  if (!std::filesystem::is_directory(folder)) {
    return {PackCacheState::absent, "", "no such folder: " + folder};
  }
  const auto plan =
      weights::PackPlan::of(graph, weights, TernaryPacking::automatic, current_target());
  weights::PackCache cache(plan, folder, pool);
  cache.load();
  return cache.report();
}

namespace weights {
namespace {

constexpr char kMagic[] = "EFFIPACK";
constexpr std::string_view kFileSuffix = ".pack";
constexpr size_t kHeaderBytes = 128;
constexpr size_t kDataAlignment = 4096;

template <class T>
void append(std::string& out, T value) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out.append(bytes, sizeof(T));
}

void append(std::string& out, const Digest& digest) {
  append(out, digest.low);
  append(out, digest.high);
}

std::span<const uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// The matrices of all matmuls, and whether their operand is that of ternary ones. Before the passes
// a matmul is a `linear` or a `ternary_linear`; its weight stands where the first part's does.
std::map<std::string, bool> matmul_weights(const Graph& graph) {
  std::map<std::string, bool> weights;
  std::set<ValueId> ternary_operands;
  const auto add = [&](ValueId id, bool ternary) {
    const std::string& name = graph.value(id).weight_name;
    if (weights.emplace(name, ternary).first->second == ternary) return;
    throw Unsupported("[compile] weight " + name + ": both ternary_linear and linear read it");
  };
  for (const Node& node : graph.nodes) {
    if (graph::is_ternary_operand(node))
      ternary_operands.insert(node.outputs.begin(), node.outputs.end());
    if (node.op == "linear") add(node.inputs[1], false);
    if (node.op == "ternary_linear") add(node.inputs[1], true);
    if (node.op != "matmul" && node.op != "matmul_glu") continue;
    const graph::MatmulInputs inputs = graph::matmul_inputs(node);
    for (size_t part = 0; part < inputs.parts; ++part) {
      add(node.inputs[inputs.weight(part)], ternary_operands.contains(node.inputs[0]));
    }
  }
  return weights;
}

size_t packed_bytes(const TensorView& weight, ops::TernaryForm form) {
  return ops::packed_shape(weight, form).num_bytes();
}

}  // namespace

PackPlan PackPlan::of(const Graph& graph, const WeightSource& source, TernaryPacking packing,
                      const Target& target) {
  PackPlan plan;
  const std::map<std::string, bool> weights = matmul_weights(graph);
  size_t ternary_bytes = 0;
  for (const auto& [name, ternary] : weights) {
    if (ternary) ternary_bytes += packed_bytes(source.weight(name), ops::TernaryForm::t2);
  }
  const ops::TernaryForm form = ternary_form(packing, ternary_bytes, target);
  for (const auto& [name, ternary] : weights) {
    PackedItem item{name, source.weight(name), {}, source.origin(name)};
    if (ternary) item.form = form;
    item.shape = ops::packed_shape(item.source, item.form);
    plan.items.push_back(std::move(item));
  }
  // Items are never ordered by address: every process must find the same order.
  std::sort(plan.items.begin(), plan.items.end(), [](const PackedItem& a, const PackedItem& b) {
    const auto place = [](const PackedItem& item) {
      return item.origin ? std::pair(std::string_view(item.origin->path), item.origin->offset)
                         : std::pair(std::string_view(), uint64_t{0});
    };
    return std::tuple(place(a), std::string_view(a.name)) <
           std::tuple(place(b), std::string_view(b.name));
  });
  plan.place();
  return plan;
}

void PackPlan::place() {
  num_bytes = 0;
  for (PackedItem& item : items) {
    item.offset = num_bytes;
    num_bytes += item.shape.num_bytes();
  }
}

void PackPlan::drop(const std::function<bool(const std::string& name)>& is_there) {
  std::erase_if(items, [&](const PackedItem& item) { return is_there(item.name); });
  place();
}

PackCache::PackCache(const PackPlan& plan, std::string folder, ThreadPool& pool)
    : plan_(plan), folder_(std::move(folder)), pool_(pool) {
  if (folder_.empty()) return;
  try {
    key_ = key();
    report_.state = PackCacheState::absent;
    report_.path = folder_ + "/" + file_stem() + std::to_string(ops::kPackedLayoutVersion);
    report_.path += kFileSuffix;
  } catch (const std::exception& error) {
    report_ = {PackCacheState::failed, "", error.what()};
  }
}

// The key has contents, place, name and shape of each weight, and nothing of a layout version.
Digest PackCache::key() const {
  std::map<std::string, Digest> files;
  std::string text;
  for (const PackedItem& item : plan_.items) {
    const std::optional<WeightOrigin>& origin = item.origin;
    if (!origin) {
      throw FileError("[pack_cache] weight " + item.name + ": expected one of a mapped file");
    }
    auto file = files.find(origin->path);
    if (file == files.end()) {
      const Digest digest = file_digest(origin->path, origin->state, folder_, pool_);
      file = files.emplace(origin->path, digest).first;
    }
    append(text, file->second);
    append(text, origin->offset);
    append(text, static_cast<uint32_t>(item.name.size()));
    text += item.name;
    append(text, static_cast<uint32_t>(item.source.dtype));
    append(text, static_cast<uint64_t>(item.shape.rows));
    append(text, static_cast<uint64_t>(item.shape.cols));
    // Other weights add nothing: what has been cached of them stays valid.
    if (item.form != ops::TernaryForm::u4) append(text, static_cast<uint32_t>(item.form));
  }
  return digest(bytes_of(text), pool_);
}

// A file's name up to its layout version.
std::string PackCache::file_stem() const {
  return to_hex(key_) + "-v";
}

// Who has a file mapped keeps it. A newer version's file stays: both programs may be in use.
void PackCache::remove_older_versions() const {
  const std::string stem = file_stem();
  std::error_code error;  // of a folder or a file that another process is changing too
  for (std::filesystem::directory_iterator entry(folder_, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with(stem) || !name.ends_with(kFileSuffix)) continue;
    const char* last = name.data() + name.size() - kFileSuffix.size();
    uint32_t version = 0;
    const auto [parsed, failure] = std::from_chars(name.data() + stem.size(), last, version);
    if (failure != std::errc() || parsed != last || version >= ops::kPackedLayoutVersion) {
      continue;
    }
    std::error_code ignored;
    std::filesystem::remove(entry->path(), ignored);
  }
}

std::string PackCache::table() const {
  std::string out;
  for (const PackedItem& item : plan_.items) {
    append(out, static_cast<uint32_t>(item.name.size()));
    out += item.name;
    append(out, static_cast<uint32_t>(item.source.dtype));
    append(out, static_cast<uint64_t>(item.shape.rows));
    append(out, static_cast<uint64_t>(item.shape.cols));
    append(out, static_cast<uint64_t>(item.offset));
    append(out, static_cast<uint64_t>(item.shape.num_bytes()));
  }
  return out;
}

std::string PackCache::header(const std::string& table, const Digest& data_digest) const {
  const size_t data_begin =
      (kHeaderBytes + table.size() + kDataAlignment - 1) / kDataAlignment * kDataAlignment;
  std::string out(kMagic, 8);
  append(out, ops::kPackedLayoutVersion);
  append(out, static_cast<uint32_t>(plan_.items.size()));
  append(out, static_cast<uint64_t>(table.size()));
  append(out, static_cast<uint64_t>(plan_.num_bytes));
  append(out, static_cast<uint64_t>(data_begin + plan_.num_bytes));
  append(out, static_cast<uint64_t>(data_begin));
  append(out, key_);
  append(out, digest_chunk(bytes_of(table)));
  append(out, data_digest);
  out.resize(kHeaderBytes - sizeof(Digest));
  append(out, digest_chunk(bytes_of(out)));
  return out;
}

// What the file must be is known before it is read: all but the digest of the data, which is read
// from the header and then compared with the data. Returns what is wrong, or nothing.
std::string PackCache::find_damage(std::span<const uint8_t> bytes, size_t& data_begin) const {
  constexpr size_t kVersionAt = 8;
  constexpr size_t kDataDigestAt = 80;
  if (bytes.size() < kHeaderBytes) return "truncated header";
  if (std::memcmp(bytes.data(), kMagic, 8) != 0) return "no pack cache file";
  uint32_t version = 0;
  std::memcpy(&version, bytes.data() + kVersionAt, sizeof(version));
  if (version != ops::kPackedLayoutVersion) {
    return "layout version " + std::to_string(version);
  }
  Digest data_digest;
  std::memcpy(&data_digest, bytes.data() + kDataDigestAt, sizeof(data_digest));
  const std::string expected_table = table();
  const std::string expected = header(expected_table, data_digest);
  if (std::memcmp(bytes.data(), expected.data(), kHeaderBytes) != 0) return "damaged header";
  uint64_t file_bytes = 0;
  std::memcpy(&file_bytes, expected.data() + 32, sizeof(file_bytes));
  std::memcpy(&data_begin, expected.data() + 40, sizeof(data_begin));
  if (bytes.size() != file_bytes) return "truncated";
  if (std::memcmp(bytes.data() + kHeaderBytes, expected_table.data(), expected_table.size()) != 0) {
    return "damaged table";
  }
  if (digest(bytes.subspan(data_begin), pool_) != data_digest) return "damaged weights";
  return {};
}

PackCache::Mapping PackCache::load() {
  if (report_.state != PackCacheState::absent) return {};
  try {
    if (!std::filesystem::exists(report_.path)) {
      report_.reason = "no such file";
      return {};
    }
    auto file = std::make_shared<MappedFile>(report_.path);
    size_t data_begin = 0;
    report_.reason = find_damage(file->bytes(), data_begin);
    if (!report_.reason.empty()) return {};
    report_.state = PackCacheState::hit;
    const uint8_t* data = file->bytes().data() + data_begin;
    return {std::move(file), data};
  } catch (const std::exception& error) {
    report_.reason = error.what();
    return {};
  }
}

// The weights were read after the fingerprint: only files that are still what they were have
// packed what it says.
void PackCache::check_sources() const {
  for (const PackedItem& item : plan_.items) {
    if (file_state(item.origin->path) == item.origin->state) continue;
    throw FileError("[pack_cache] " + item.origin->path + ": the file changed while it was loaded");
  }
}

void PackCache::store(const uint8_t* data) {
  if (report_.state != PackCacheState::absent) return;
  try {
    check_sources();
    const std::string text = table();
    std::string front = header(text, digest({data, plan_.num_bytes}, pool_)) + text;
    front.resize((front.size() + kDataAlignment - 1) / kDataAlignment * kDataAlignment);
    AtomicFile file(report_.path, "[pack_cache]");
    file.write(front.data(), front.size());
    file.write(data, plan_.num_bytes);
    file.commit();
    report_.state = PackCacheState::stored;
    remove_older_versions();
  } catch (const std::exception& error) {
    report_.state = PackCacheState::failed;
    report_.reason = error.what();
  }
}

}  // namespace weights
}  // namespace effinfer
