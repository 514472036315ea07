#include "effinfer/ops/packbits.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "ops/run_rows.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

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

template <class Visit>
void with_indptr(const Validator& check, const TensorView& indptr, Visit&& visit) {
  if (indptr.dtype != DType::i64) check.dtype("indptr", indptr, DType::i32);
  check.data("indptr", indptr);
  check.rank("indptr", indptr, 1);
  if (indptr.dtype == DType::i64) {
    visit(static_cast<const int64_t*>(indptr.data));
  } else {
    visit(static_cast<const int32_t*>(indptr.data));
  }
}

}  // namespace

BitOrder parse_bit_order(std::string_view text) {
  if (text == "big") return BitOrder::big;
  if (text == "little") return BitOrder::little;
  throw InvalidArgument("[packbits] bitorder: expected big or little, got \"" + std::string(text) +
                        "\"");
}

void packed_indptr(const TensorView& indptr, int64_t size, int64_t* out) {
  const Validator check("segment_packbits");
  with_indptr(check, indptr, [&](const auto* starts) {
    check.indptr_of_rows("indptr", starts, indptr.dims[0], size);
    out[0] = 0;
    for (int64_t s = 1; s < indptr.dims[0]; ++s) {
      out[s] = out[s - 1] + (int64_t{starts[s]} - int64_t{starts[s - 1]} + 7) / 8;
    }
  });
}

void packbits(const TensorView& x, const TensorView& indptr, const int64_t* out_indptr,
              BitOrder order, uint8_t* out, ThreadPool& pool) {
  const Validator check("packbits");
  check.dtype("x", x, DType::u8);
  check.rank("x", x, 1);
  const auto* elements = static_cast<const uint8_t*>(x.data);
  with_indptr(check, indptr, [&](const auto* starts) {
    check.indptr_of_rows("indptr", starts, indptr.dims[0], x.dims[0]);
    const int64_t segments = indptr.dims[0] - 1;
    const int64_t bytes = out_indptr[segments];
    pool_for(bytes, pool).parallel([&](Team& team) {
      team.for_chunks((bytes + kChunkBytes - 1) / kChunkBytes, [&](int64_t chunk) {
        const int64_t begin = chunk * kChunkBytes;
        const int64_t end = begin + kChunkBytes < bytes ? begin + kChunkBytes : bytes;
        // The last segment that starts at or before `begin`; those that end there are empty.
        const int64_t* place = std::upper_bound(out_indptr, out_indptr + segments + 1, begin);
        for (int64_t s = place - out_indptr - 1; s < segments && out_indptr[s] < end; ++s) {
          const int64_t first = std::max(begin, out_indptr[s]) - out_indptr[s];
          const int64_t last = std::min(end, out_indptr[s + 1]) - out_indptr[s];
          pack_segment(elements + starts[s], first, last, starts[s + 1] - starts[s], order,
                       out + out_indptr[s]);
        }
      });
    });
  });
}

}  // namespace effinfer::ops
