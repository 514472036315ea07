// Fingerprints of bytes: fast enough to run at the speed of memory.
//
// They tell damaged or changed bytes from whole ones; they are no defence against someone who
// builds collisions. Any change of one 8-byte word changes the fingerprint for certain (each step
// is a bijection of the state), any other change but for one chance in 2^64.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "effinfer/threads.h"

namespace effinfer {

struct Digest {
  uint64_t low = 0;
  uint64_t high = 0;
  bool operator==(const Digest&) const = default;
};

std::string to_hex(const Digest& digest);

// A chunk of up to kDigestChunk bytes has its own digest, longer data that of their digests.
inline constexpr size_t kDigestChunk = size_t{1} << 20;
Digest digest_chunk(std::span<const uint8_t> bytes);
Digest digest_chunks(std::span<const Digest> chunks, uint64_t size);

// Digests bytes of any length: digest_chunks() of its chunks, which the pool's threads share.
Digest digest(std::span<const uint8_t> bytes, ThreadPool& pool);

}  // namespace effinfer
