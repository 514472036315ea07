// Copies a GGUF file with one more string in its metadata.
#include <vector>

#include "effinfer/error.h"
#include "effinfer/gguf.h"
#include "io/atomic_file.h"
#include "io/gguf_impl.h"
#include "io/gguf_values.h"

namespace effinfer {

using gguf::append_number;
using gguf::append_string;

void write_gguf_with_metadata(const GgufFile& source, std::string_view key, std::string_view value,
                              const std::string& path) {
  constexpr size_t kMaxKeyLength = 65535;
  if (key.empty() || key.size() > kMaxKeyLength || key == "general.alignment") {
    throw InvalidArgument("[gguf] key: expected 1 to 65535 bytes, and not general.alignment");
  }
  const GgufFile::Impl& file = *source.impl_;
  if (!file.shards.empty()) {
    throw Unsupported("[gguf] " + file.label + ": a model in several files; quantize() makes one");
  }
  const auto replaced = file.metadata_index.find(key);
  const bool is_new = replaced == file.metadata_index.end();

  std::string header = "GGUF";
  append_number<uint32_t>(header, file.version);
  append_number<uint64_t>(header, file.tensors.size());
  append_number<uint64_t>(header, file.metadata.size() + (is_new ? 1 : 0));
  std::string entry;
  append_string(entry, key);
  append_number(entry, static_cast<uint32_t>(gguf::ValueType::string));
  append_string(entry, value);

  // The metadata in three parts: before the entry, the entry, after it.
  const size_t index = is_new ? file.metadata.size() : replaced->second;
  const auto begin_of = [&](size_t i) {
    return i < file.metadata_begin.size() ? file.metadata_begin[i] : file.tensor_infos_begin;
  };
  const auto copy = [&](AtomicFile& out, uint64_t begin, uint64_t end) {
    out.write(file.bytes.data() + begin, end - begin);
  };
  AtomicFile out(path, "[gguf]");
  out.write(header.data(), header.size());
  copy(out, begin_of(0), begin_of(index));
  out.write(entry.data(), entry.size());
  copy(out, begin_of(is_new ? index : index + 1), file.tensor_infos_end);

  const std::vector<char> zeros((0 - out.written()) & (file.alignment - 1));
  out.write(zeros.data(), zeros.size());
  copy(out, file.data_begin, file.bytes.size());
  out.commit();
}

}  // namespace effinfer
