// Rows to pages: as fast as memory takes them when they are copied, so wider vectors gain nothing.
#include "ops/page.h"

#include <algorithm>
#include <cstring>

#include "cpu/float_elements.h"
#include "cpu/level.h"

namespace effinfer::cpu {
namespace {

// Bytes that a thread claims at once.
constexpr int64_t kChunkBytes = 64 << 10;

template <class From, class To>
void convert(const uint8_t* from, uint8_t* to, int64_t size) {
  const auto* in = reinterpret_cast<const typename From::Stored*>(from);
  auto* out = reinterpret_cast<typename To::Stored*>(to);
  for (int64_t i = 0; i < size; ++i) out[i] = To::store(From::load(in[i]));
}

void store_row(const ops::PagedRows& x, int64_t row, const ops::PagePlace& place) {
  const uint8_t* from = x.rows + row * x.row_stride;
  uint8_t* to = x.cache + place.page * x.page_stride + place.slot * x.slot_stride;
  const auto for_heads = [&](auto&& store) {
    for (int64_t head = 0; head < x.heads; ++head) {
      store(from + head * x.row_head_stride, to + head * x.head_stride);
    }
  };
  if (x.rows_dtype == x.cache_dtype) {
    const auto bytes = static_cast<size_t>(x.dims * dtype_info(x.cache_dtype).block_bytes);
    for_heads([&](const uint8_t* in, uint8_t* out) { std::memcpy(out, in, bytes); });
    return;
  }
  with_float_elements(x.rows_dtype, [&]<class From>() {
    with_float_elements(x.cache_dtype, [&]<class To>() {
      for_heads([&](const uint8_t* in, uint8_t* out) { convert<From, To>(in, out, x.dims); });
    });
  });
}

}  // namespace

template <>
void run<Level::portable>(const ops::AppendPagesProblem& p, Team& team) {
  const int64_t step = kChunkBytes / (p.keys.row_bytes() + p.values.row_bytes() + 1) + 1;
  team.for_chunks((p.num_rows + step - 1) / step, [&](int64_t chunk) {
    const int64_t end = std::min(p.num_rows, (chunk + 1) * step);
    for (int64_t row = chunk * step; row < end; ++row) {
      store_row(p.keys, row, p.places[row]);
      store_row(p.values, row, p.places[row]);
    }
  });
}

}  // namespace effinfer::cpu
