// Eight elements at a time in a 64-bit register, which already keeps up with memory.
#include "ops/packbits.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "cpu/level.h"

namespace effinfer::cpu {
namespace {

using ops::BitOrder;

constexpr int64_t kChunkBytes = 2048;  // of packed bits

// Eight elements as one byte. Adding 0x7f to the low seven bits of a byte carries into its highest
// where one of them is set; the multiplication gathers the highest bits of all, in either order.
uint8_t pack_eight(uint64_t elements, BitOrder order) {
  static_assert(std::endian::native == std::endian::little);
  constexpr uint64_t kLow = 0x7f7f7f7f7f7f7f7fu;
  const uint64_t set = ((((elements & kLow) + kLow) | elements) >> 7) & 0x0101010101010101u;
  const uint64_t gather = order == BitOrder::big ? 0x8040201008040201u : 0x0102040810204080u;
  return static_cast<uint8_t>(set * gather >> 56);
}

void pack_segment(const uint8_t* x, int64_t begin, int64_t end, int64_t size, BitOrder order,
                  uint8_t* out) {
  for (int64_t byte = begin; byte < end; ++byte) {
    const int64_t left = size - byte * 8;
    uint64_t elements = 0;
    if (left >= 8) {
      std::memcpy(&elements, x + byte * 8, 8);
    } else {
      std::memcpy(&elements, x + byte * 8, static_cast<size_t>(left));
    }
    out[byte] = pack_eight(elements, order);
  }
}

template <class Index>
void pack(const ops::PackBitsProblem& p, const Index* starts, Team& team) {
  const int64_t bytes = p.bytes;
  team.for_chunks((bytes + kChunkBytes - 1) / kChunkBytes, [&](int64_t chunk) {
    const int64_t begin = chunk * kChunkBytes;
    const int64_t end = std::min(begin + kChunkBytes, bytes);
    // The last segment that starts at or before `begin`; those that end there are empty.
    const int64_t* place = std::upper_bound(p.out_indptr, p.out_indptr + p.num_segments + 1, begin);
    for (int64_t s = place - p.out_indptr - 1; s < p.num_segments && p.out_indptr[s] < end; ++s) {
      const int64_t first = std::max(begin, p.out_indptr[s]) - p.out_indptr[s];
      const int64_t last = std::min(end, p.out_indptr[s + 1]) - p.out_indptr[s];
      pack_segment(p.x + starts[s], first, last, starts[s + 1] - starts[s], p.order,
                   p.out + p.out_indptr[s]);
    }
  });
}

}  // namespace

template <>
void run<Level::portable>(const ops::PackBitsProblem& p, Team& team) {
  if (p.indptr_dtype == DType::i64) return pack(p, static_cast<const int64_t*>(p.indptr), team);
  pack(p, static_cast<const int32_t*>(p.indptr), team);
}

}  // namespace effinfer::cpu
