#include "core/digest.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <vector>

namespace effinfer {
namespace {

// Both are odd with bits spread evenly: the fractions of the golden ratio and of sqrt(2).
constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;
constexpr uint64_t kFold = 0x6a09e667f3bcc909u;
// Lanes are independent words in flight: they hide the latency of the multiplier (4 cycles, plus
// the rest of a step), so that one word of 8 bytes is taken in a cycle.
constexpr size_t kLanes = 8;
constexpr size_t kBlock = kLanes * sizeof(uint64_t);

using State = std::array<uint64_t, kLanes>;

inline void step(State& state, const uint8_t* block) {
  for (size_t lane = 0; lane < kLanes; ++lane) {
    uint64_t word;
    std::memcpy(&word, block + lane * sizeof(word), sizeof(word));
    state[lane] = std::rotl(state[lane] ^ word, 29) * kStep;
  }
}

// Every input bit reaches every output bit: xor-shifts and odd multipliers, each invertible.
constexpr uint64_t scramble(uint64_t x) {
  x = (x ^ x >> 32) * kFold;
  x = (x ^ x >> 29) * kStep;
  return x ^ x >> 32;
}

}  // namespace

std::string to_hex(const Digest& digest) {
  std::array<char, 33> text{};
  std::snprintf(text.data(), text.size(), "%016llx%016llx",
                static_cast<unsigned long long>(digest.high),
                static_cast<unsigned long long>(digest.low));
  return text.data();
}

Digest digest_chunk(std::span<const uint8_t> bytes) {
  State state;
  for (size_t lane = 0; lane < kLanes; ++lane) state[lane] = kFold * (2 * lane + 1);
  const size_t whole = bytes.size() / kBlock * kBlock;
  for (size_t i = 0; i < whole; i += kBlock) step(state, bytes.data() + i);
  if (whole < bytes.size()) {
    std::array<uint8_t, kBlock> tail{};
    std::memcpy(tail.data(), bytes.data() + whole, bytes.size() - whole);
    step(state, tail.data());
  }
  Digest result{bytes.size(), ~bytes.size()};
  for (const uint64_t lane : state) {
    result.low = scramble(result.low ^ lane);
    result.high = scramble(std::rotl(result.high, 23) + lane * kFold);
  }
  return result;
}

Digest digest_chunks(std::span<const Digest> chunks, uint64_t size) {
  std::vector<uint64_t> words = {size};
  for (const Digest& chunk : chunks) words.insert(words.end(), {chunk.low, chunk.high});
  return digest_chunk({reinterpret_cast<const uint8_t*>(words.data()), words.size() * 8});
}

Digest digest(std::span<const uint8_t> bytes, ThreadPool& pool) {
  std::vector<Digest> chunks((bytes.size() + kDigestChunk - 1) / kDigestChunk);
  pool.parallel([&](Team& team) {
    team.for_chunks(static_cast<int64_t>(chunks.size()), [&](int64_t index) {
      const size_t begin = static_cast<size_t>(index) * kDigestChunk;
      const size_t count = std::min(kDigestChunk, bytes.size() - begin);
      chunks[static_cast<size_t>(index)] = digest_chunk(bytes.subspan(begin, count));
    });
  });
  return digest_chunks(chunks, bytes.size());
}

}  // namespace effinfer
