// The GGUF reader on files made here byte by byte: what is right is read, each kind of damage is
// its typed error, and a copy with more metadata keeps everything else.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "check.h"
#include "effinfer/error.h"
#include "effinfer/gguf.h"
#include "gguf_bytes.h"
#include "io/gguf_blocks.h"

using namespace effinfer;
using namespace gguf_bytes;

namespace {

std::shared_ptr<GgufFile> parse(const Bytes& bytes) {
  return GgufFile::parse(bytes.data, "test");
}

Bytes sample(uint32_t version = 3) {
  Bytes bytes;
  bytes.header(3, 6, version);
  bytes.string("name").u32(kString).string("tiny");
  bytes.string("layers").u32(kU32).u32(7);
  bytes.string("shift").u32(kI32).number(int32_t{-3});
  bytes.string("base").u32(kF32).number(0.5f);
  bytes.string("tied").u32(kBool).number(uint8_t{1});
  bytes.string("tokens").u32(kArray).u32(kString).u64(2).string("a").string("bc");
  bytes.tensor("x", {4, 2}, kTypeF32, 0);
  bytes.tensor("q", {32, 1}, kTypeQ8_0, 32);
  bytes.tensor("odd", {256}, kTypeIq1S, 96);
  bytes.pad();
  for (int i = 0; i < 8; ++i) bytes.number(static_cast<float>(i));
  bytes.number(uint16_t{0x3c00}).fill(32, 2).pad().fill(50, 9);
  return bytes;
}

std::vector<uint8_t> read_all(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_all(const std::string& path, const Bytes& bytes) {
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(bytes.data.data()),
            static_cast<std::streamsize>(bytes.data.size()));
}

}  // namespace

TEST("reads metadata and tensors of versions 2 and 3") {
  for (const uint32_t version : {2u, 3u}) {
    const Bytes bytes = sample(version);
    const auto file = parse(bytes);
    CHECK_EQ(file->version(), version);
    CHECK_EQ(file->alignment(), 32u);
    CHECK_EQ(file->file_bytes(), bytes.data.size());
    CHECK_EQ(file->get_string("name"), "tiny");
    CHECK_EQ(file->get_int("layers"), 7);
    CHECK_EQ(file->get_int("shift"), -3);
    CHECK_EQ(file->get_float("base"), 0.5);
    CHECK(std::get<bool>(*file->find("tied")));
    const auto& tokens = std::get<GgufArray>(*file->find("tokens"));
    CHECK_EQ(tokens.size, 2u);
    CHECK_EQ(tokens.string(1), "bc");
    CHECK(file->find("absent") == nullptr);
    CHECK_THROWS(FormatError, "no such key", file->get_int("absent"));
    CHECK_THROWS(FormatError, "another type", file->get_float("name"));
    CHECK_THROWS(FormatError, "another type", file->get_string("layers"));
  }
}

namespace {

// A file of a split model with one tensor of eight floats, the first of them `value`.
Bytes shard(uint32_t number, uint32_t count, std::string_view tensor, float value,
            uint32_t all_tensors) {
  Bytes bytes;
  bytes.header(1, 3);
  bytes.string("split.no").u32(kU32).u32(number);
  bytes.string("split.count").u32(kU32).u32(count);
  bytes.string("split.tensors.count").u32(kI32).u32(all_tensors);
  bytes.tensor(tensor, {8}, kTypeF32, 0).pad();
  for (int i = 0; i < 8; ++i) bytes.number(value + static_cast<float>(i));
  return bytes;
}

// Removes the files of a split model at the end of a test.
struct SplitModel {
  std::string stem = scratch("split");
  std::string path(int number, int count) const {
    return stem + "-0000" + std::to_string(number) + "-of-0000" + std::to_string(count) + ".gguf";
  }
  ~SplitModel() {
    for (int number = 1; number <= 3; ++number) std::filesystem::remove(path(number, 3));
  }
};

}  // namespace

TEST("the first file of a split model opens all") {
  const SplitModel model;
  const std::vector<std::string> names = {"a", "b", "c"};
  size_t size = 0;
  for (uint32_t i = 0; i < 3; ++i) {
    const Bytes bytes = shard(i, 3, names[i], 10.0f * static_cast<float>(i), 3);
    write_all(model.path(static_cast<int>(i) + 1, 3), bytes);
    size += bytes.data.size();
  }
  const auto file = GgufFile::open(model.path(1, 3));
  CHECK_EQ(file->tensors().size(), 3u);
  CHECK_EQ(file->file_bytes(), size);
  for (size_t i = 0; i < 3; ++i) {
    const TensorView weight = file->weight(names[i]);
    CHECK_EQ(static_cast<const float*>(weight.data)[3], 10.0f * static_cast<float>(i) + 3.0f);
    const auto origin = file->origin(names[i]);
    CHECK_EQ(origin->path, model.path(static_cast<int>(i) + 1, 3));
    const auto bytes = read_all(origin->path);
    CHECK(std::memcmp(bytes.data() + origin->offset, weight.data, 32) == 0);
    file->release(names[i], 0, 32);
    CHECK_EQ(static_cast<const float*>(weight.data)[0], 10.0f * static_cast<float>(i));
  }
  CHECK_THROWS(Unsupported, "several files",
               write_gguf_with_metadata(*file, "key", "value", scratch("joined")));
  CHECK_THROWS(FormatError, "expected the first", GgufFile::open(model.path(2, 3)));
}

TEST("files of a split model that do not belong together") {
  const SplitModel model;
  const auto write = [&](int number, const Bytes& bytes) {
    write_all(model.path(number, 3), bytes);
  };
  const auto open = [&] { return GgufFile::open(model.path(1, 3)); };
  write(1, shard(0, 3, "a", 0, 3));
  CHECK_THROWS(FileError, "00002-of-00003", open());
  write(2, shard(2, 3, "b", 0, 3));
  write(3, shard(2, 3, "c", 0, 3));
  CHECK_THROWS(FormatError, "expected file 2 of 3", open());
  write(2, shard(1, 3, "a", 0, 3));
  CHECK_THROWS(FormatError, "tensor \"a\": an earlier file", open());
  write(2, shard(1, 3, "b", 0, 3));
  write(1, shard(0, 3, "a", 0, 4));
  CHECK_THROWS(FormatError, "expected 4 tensors in all files, got 3", open());
  write(1, shard(0, 2, "a", 0, 3));
  CHECK_THROWS(FormatError, "-00001-of-00002.gguf", open());
  write(1, shard(0, 4000000000u, "a", 0, 3));
  CHECK_THROWS(FormatError, "to end in", open());
}

TEST("weights are views; a type that is not decoded is an error at use, not at open") {
  const Bytes bytes = sample();
  const auto file = parse(bytes);
  const TensorView x = file->weight("x");
  CHECK(x.dtype == DType::f32 && x.dims == (Dims{2, 4}));
  CHECK_EQ(static_cast<const float*>(x.data)[5], 5.0f);
  std::vector<float> q(32);
  dequantize(DType::q8_0, file->weight("q").data, 32, q.data());
  CHECK_EQ(q[31], 2.0f);
  const GgufTensor* odd = file->find_tensor("odd");
  CHECK(!odd->dtype && odd->type_name == "iq1_s" && odd->num_bytes == 50);
  CHECK_THROWS(Unsupported, "tensor \"odd\": type iq1_s", file->weight("odd"));
  CHECK_THROWS(InvalidArgument, "no tensor named \"y\"", file->weight("y"));
}

TEST("a tensor of an unknown type number keeps the file readable") {
  Bytes bytes;
  bytes.header(1, 0).tensor("t", {33}, kTypeUnknown, 0).pad().fill(8, 1);
  const auto file = parse(bytes);
  CHECK_EQ(file->find_tensor("t")->num_bytes, 0u);
  CHECK_THROWS(Unsupported, "type 77", file->weight("t"));
}

TEST("block structs have the sizes of the dtype table") {
  for (int i = 0; i < kNumDTypes; ++i) {
    const DTypeInfo& info = dtype_info(static_cast<DType>(i));
    if (!info.quantized || info.tail_bytes > 0) continue;
    gguf::with_block_type(static_cast<DType>(i), [&]<class Block>(std::type_identity<Block>) {
      CHECK_EQ(static_cast<int>(sizeof(Block)), info.block_bytes);
      CHECK_EQ(Block::kSize, info.block_size);
      CHECK(Block::kDType == static_cast<DType>(i));
    });
  }
  CHECK_THROWS(InvalidArgument, "got f32", gguf::with_block_type(DType::f32, [](auto) {}));
}

TEST("dequantize refuses part of a block and dtypes that are no weights") {
  float out[32];
  CHECK_THROWS(InvalidArgument, "multiple of 32", dequantize(DType::q4_0, out, 31, out));
  CHECK_THROWS(InvalidArgument, "dtype", dequantize(DType::i64, out, 1, out));
  CHECK_THROWS(InvalidArgument, "dtype", dequantize(DType::act, out, 1, out));
}

TEST("every truncation is a FormatError") {
  const Bytes whole = sample();
  for (size_t size = 0; size < whole.data.size(); ++size) {
    Bytes part;
    part.data.assign(whole.data.begin(), whole.data.begin() + static_cast<ptrdiff_t>(size));
    part.data.shrink_to_fit();
    CHECK_THROWS(FormatError, "[gguf] test: ", parse(part));
  }
}

TEST("wrong magic, version and byte order") {
  CHECK_THROWS(FormatError, "got no bytes", parse(Bytes{}));
  CHECK_THROWS(FormatError, "expected \"GGUF\", got \"ggml\"", parse(Bytes{}.text("ggml").u64(0)));
  CHECK_THROWS(FormatError, "other bytes", parse(Bytes{}.u32(0).u64(0)));
  CHECK_THROWS(FormatError, "expected 2 or 3, got 1", parse(Bytes{}.header(0, 0, 1)));
  CHECK_THROWS(FormatError, "expected 2 or 3, got 4", parse(Bytes{}.header(0, 0, 4)));
  CHECK_THROWS(FormatError, "big-endian", parse(Bytes{}.header(0, 0, 0x03000000)));
}

TEST("counts beyond the file are refused before anything is allocated") {
  for (const uint64_t huge : {uint64_t{2}, uint64_t{1} << 40, ~uint64_t{0}}) {
    CHECK_THROWS(FormatError, "tensor count", parse(Bytes{}.header(huge, 0)));
    CHECK_THROWS(FormatError, "metadata count", parse(Bytes{}.header(0, huge)));
    CHECK_THROWS(FormatError, "metadata \"k\"",
                 parse(Bytes{}.header(0, 1).string("k").u32(kString).u64(huge)));
    for (const uint32_t type : {kU8, kU32, kString}) {
      CHECK_THROWS(
          FormatError, "metadata \"k\"",
          parse(Bytes{}.header(0, 1).string("k").u32(kArray).u32(type).u64(huge).fill(1, 0)));
    }
  }
  CHECK_THROWS(FormatError, "metadata key",
               parse(Bytes{}.header(0, 1).u64(~uint64_t{0}).fill(99, 1)));
}

TEST("metadata: duplicate keys, unknown types, nested arrays, bools that are not") {
  CHECK_THROWS(
      FormatError, "got it twice",
      parse(Bytes{}.header(0, 2).string("k").u32(kU32).u32(1).string("k").u32(kU32).u32(1)));
  CHECK_THROWS(FormatError, "0..12, got 13",
               parse(Bytes{}.header(0, 1).string("k").u32(13).u64(0)));
  CHECK_THROWS(FormatError, "0..12, got 99",
               parse(Bytes{}.header(0, 1).string("k").u32(kArray).u32(99).u64(0)));
  CHECK_THROWS(FormatError, "array of arrays",
               parse(Bytes{}.header(0, 1).string("k").u32(kArray).u32(kArray).u64(0)));
  CHECK_THROWS(FormatError, "expected a bool",
               parse(Bytes{}.header(0, 1).string("k").u32(kBool).fill(1, 2)));
  CHECK_THROWS(FormatError, "expected bools",
               parse(Bytes{}.header(0, 1).string("k").u32(kArray).u32(kBool).u64(1).fill(1, 2)));
  const std::string long_key(70000, 'k');
  CHECK_THROWS(FormatError, "at most 65535 bytes",
               parse(Bytes{}.header(0, 1).string(long_key).u32(kU32).u32(1)));
}

TEST("alignment: a power of two of an unsigned type") {
  const auto with_alignment = [](uint32_t type, uint32_t value) {
    return Bytes{}.header(0, 1).string("general.alignment").u32(type).u32(value);
  };
  CHECK_EQ(parse(with_alignment(kU32, 64))->alignment(), 64u);
  for (const uint32_t bad : {0u, 3u, 48u, 0x80000000u}) {
    CHECK_THROWS(FormatError, "power of two", parse(with_alignment(kU32, bad)));
  }
  CHECK_THROWS(FormatError, "another type", parse(with_alignment(kI32, 32)));
}

TEST("tensors: shapes") {
  const auto shaped = [](std::vector<uint64_t> dims, uint32_t type = kTypeF32) {
    return Bytes{}.header(1, 0).tensor("t", std::move(dims), type, 0).pad().fill(64, 0);
  };
  const uint64_t big = uint64_t{1} << 62;
  CHECK_THROWS(FormatError, "at most 4 dimensions, got 5", parse(shaped({1, 1, 1, 1, 1})));
  CHECK_THROWS(FormatError, "2^63", parse(shaped({~uint64_t{0}})));
  CHECK_THROWS(FormatError, "2^63", parse(shaped({big, 4})));
  CHECK_THROWS(FormatError, "2^63", parse(shaped({0, big, 4})));
  CHECK_THROWS(FormatError, "2^64 bytes", parse(shaped({big})));
  CHECK_THROWS(FormatError, "of data in all", parse(shaped({17})));
  CHECK_THROWS(FormatError, "multiple of 32", parse(shaped({33}, kTypeQ8_0)));
  CHECK_EQ(parse(shaped({16}))->tensors()[0].num_bytes, 64u);
  CHECK_EQ(parse(shaped({0, 3}))->tensors()[0].num_bytes, 0u);
  CHECK_EQ(parse(shaped({}))->tensors()[0].num_bytes, 4u);
}

TEST("tensors: offsets, overlaps, duplicate names") {
  const auto two = [](std::string_view second, uint64_t offset) {
    return Bytes{}
        .header(2, 0)
        .tensor("a", {16}, kTypeF32, 0)
        .tensor(second, {16}, kTypeF32, offset)
        .pad()
        .fill(128, 0);
  };
  CHECK_EQ(parse(two("b", 64))->tensors().size(), 2u);
  CHECK_THROWS(FormatError, "multiple of 32, got 68", parse(two("b", 68)));
  CHECK_THROWS(FormatError, "overlap", parse(two("b", 32)));
  CHECK_THROWS(FormatError, "overlap", parse(two("b", 0)));
  CHECK_THROWS(FormatError, "of data in all", parse(two("b", 96)));
  CHECK_THROWS(FormatError, "of data in all", parse(two("b", ~uint64_t{31})));
  CHECK_THROWS(FormatError, "got it twice", parse(two("a", 64)));
}

TEST("files: missing, a directory, empty") {
  CHECK_THROWS(FileError, "cannot open", GgufFile::open(scratch("missing")));
  CHECK_THROWS(FileError, "a directory",
               GgufFile::open(std::filesystem::temp_directory_path().string()));
  const std::string path = scratch("empty");
  write_all(path, Bytes{});
  CHECK_THROWS(FormatError, "got no bytes", GgufFile::open(path));
  std::remove(path.c_str());
}

TEST("a copy with metadata keeps every other byte, and may replace its source") {
  const std::string path = scratch("copy");
  Bytes bytes = sample();
  write_all(path, bytes);
  const auto source = GgufFile::open(path);
  const std::string long_text(1000, 'g');
  write_gguf_with_metadata(*source, "graph", long_text, path);
  {
    const auto copy = GgufFile::open(path);
    CHECK_EQ(copy->get_string("graph"), long_text);
    CHECK_EQ(copy->metadata().size(), 7u);
    CHECK_EQ(copy->get_string("name"), "tiny");
    for (const GgufTensor& tensor : source->tensors()) {
      const GgufTensor* same = copy->find_tensor(tensor.name);
      CHECK(same != nullptr && same->num_bytes == tensor.num_bytes &&
            std::memcmp(same->data, tensor.data, tensor.num_bytes) == 0);
    }
    // Replacing keeps the entry's place.
    write_gguf_with_metadata(*copy, "name", "other", path);
  }
  const auto again = GgufFile::open(path);
  CHECK_EQ(again->metadata()[0].first, "name");
  CHECK_EQ(again->get_string("name"), "other");
  CHECK_EQ(again->get_string("graph"), long_text);
  // Back to what it was: the same bytes up to the new entry, and the same data.
  write_gguf_with_metadata(*again, "name", "tiny", path);
  const std::vector<uint8_t> final_bytes = read_all(path);
  const auto metadata_end = std::search(bytes.data.begin(), bytes.data.end(), "bc", "bc" + 2) + 2;
  CHECK(std::equal(bytes.data.begin() + 24, metadata_end, final_bytes.begin() + 24));
  CHECK(std::equal(bytes.data.end() - 146, bytes.data.end(), final_bytes.end() - 146));
  std::remove(path.c_str());
}

TEST("a copy that cannot be written is a FileError and leaves nothing") {
  const Bytes bytes = sample();
  const auto source = parse(bytes);
  CHECK_THROWS(FileError, "cannot create",
               write_gguf_with_metadata(*source, "k", "v", scratch("no/such/folder")));
  const std::string folder = scratch("folder");
  std::filesystem::create_directories(folder + "/target/inside");
  CHECK_THROWS(FileError, "expected a file",
               write_gguf_with_metadata(*source, "k", "v", folder + "/target"));
  CHECK_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1);
  std::filesystem::remove_all(folder);
  CHECK_THROWS(InvalidArgument, "key",
               write_gguf_with_metadata(*source, "general.alignment", "v", scratch("k")));
  CHECK_THROWS(InvalidArgument, "key", write_gguf_with_metadata(*source, "", "v", scratch("k")));
}

CHECK_MAIN()

TEST("i2_s has one scale, behind the tensor's blocks") {
  Bytes bytes;
  bytes.header(2, 0).tensor("w", {128, 3}, kTypeI2S, 0).tensor("none", {128, 0}, kTypeI2S, 128);
  bytes.pad();
  const size_t data_begin = bytes.data.size();
  for (int i = 0; i < 96; ++i) bytes.number(static_cast<uint8_t>(0x86 ^ (i % 2 * 0x22)));
  bytes.number(0.75f).fill(28, 9);
  const auto file = parse(bytes);
  CHECK_EQ(file->find_tensor("w")->num_bytes, 128u);
  CHECK_EQ(file->find_tensor("none")->num_bytes, 0u);
  const TensorView view = file->weight("w");
  CHECK_EQ(view.num_bytes(), 128u);
  CHECK_EQ(file->weight("none").num_bytes(), 0u);

  // Bytes 0x86 (2, 0, 1, 2 from the top) and 0xa4 (2, 2, 1, 0) in turn.
  constexpr float kEven[] = {0.75f, -0.75f, 0.0f, 0.75f};
  constexpr float kOdd[] = {0.75f, 0.75f, 0.0f, -0.75f};
  std::vector<float> values(384);
  dequantize(view.dtype, view.data, 384, values.data());
  for (size_t i = 0; i < values.size(); ++i) {
    CHECK_EQ(values[i], (i % 2 == 0 ? kEven : kOdd)[i % 128 / 32]);
  }
  std::vector<float> part(128);
  dequantize_part(view, 128, 128, part.data());
  CHECK(std::equal(part.begin(), part.end(), values.begin() + 128));
  CHECK_THROWS(InvalidArgument, "part", dequantize_part(view, 64, 128, part.data()));
  CHECK_THROWS(InvalidArgument, "part", dequantize_part(view, 384, 128, part.data()));
  CHECK_THROWS(InvalidArgument, "part", dequantize_part(view, -128, 128, part.data()));

  Bytes cut = bytes;
  cut.data.resize(data_begin + 127);
  CHECK_THROWS(FormatError, "expected 128 bytes", parse(cut));
  Bytes ragged;
  ragged.header(1, 0).tensor("w", {64, 2}, kTypeI2S, 0).pad().fill(64, 0);
  CHECK_THROWS(FormatError, "multiple of 128", parse(ragged));
}
