#include "effinfer/ops/page.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/float16.h"
#include "core/float8.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

// Bytes that a thread claims at once.
constexpr int64_t kChunkBytes = 64 << 10;

struct Place {
  int64_t page;
  int64_t slot;
};

const int32_t* ints(const TensorView& view) {
  return static_cast<const int32_t*>(view.data);
}

std::string item(std::string_view argument, int64_t i) {
  return std::string(argument).append("[").append(std::to_string(i)).append("]");
}

void check_vector(const Validator& check, std::string_view argument, const TensorView& view,
                  int64_t size) {
  check.dtype(argument, view, DType::i32);
  check.shape(argument, view, {size});
}

// [low, high)
void check_range(const Validator& check, std::string_view argument, int64_t i, int64_t value,
                 int64_t low, int64_t high) {
  if (value >= low && value < high) return;
  check.expect(false, item(argument, i),
               std::to_string(low).append(" to ").append(std::to_string(high - 1)),
               std::to_string(value));
}

// The number of tokens of each sequence.
std::vector<int64_t> check_sequences(const Validator& check, const AppendPlaces& places,
                                     int64_t num_pages, int64_t page_size) {
  check.dtype("kv_indptr", places.kv_indptr, DType::i32);
  check.rank("kv_indptr", places.kv_indptr, 1);
  const int64_t count = places.kv_indptr.dims[0] - 1;
  const int32_t* indptr = ints(places.kv_indptr);
  check.indptr("kv_indptr", indptr, count + 1);
  check_vector(check, "kv_last_page_len", places.kv_last_page_len, count);
  check.indices("kv_indices", places.kv_indices, num_pages);
  const int32_t* last = ints(places.kv_last_page_len);
  std::vector<int64_t> lengths(static_cast<size_t>(count));
  for (int64_t b = 0; b < count; ++b) {
    const int64_t pages = int64_t{indptr[b + 1]} - indptr[b];
    if (pages == 0) continue;
    check_range(check, "kv_last_page_len", b, last[b], 1, page_size + 1);
    lengths[static_cast<size_t>(b)] = (pages - 1) * page_size + last[b];
  }
  const int64_t listed = places.kv_indices.dims[0];
  check.expect(indptr[count] <= listed, "kv_indptr",
               "at most " + std::to_string(listed) + ", the size of kv_indices",
               std::to_string(indptr[count]));
  return lengths;
}

std::vector<Place> places_of(const Validator& check, const AppendPlaces& places, int64_t rows,
                             int64_t num_pages, int64_t page_size) {
  const std::vector<int64_t> lengths = check_sequences(check, places, num_pages, page_size);
  check_vector(check, "batch_indices", places.batch_indices, rows);
  check_vector(check, "positions", places.positions, rows);
  std::vector<Place> out(static_cast<size_t>(rows));
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t sequence = ints(places.batch_indices)[i];
    check_range(check, "batch_indices", i, sequence, 0, static_cast<int64_t>(lengths.size()));
    const int64_t position = ints(places.positions)[i];
    check_range(check, "positions", i, position, 0, lengths[static_cast<size_t>(sequence)]);
    const int64_t entry = ints(places.kv_indptr)[sequence] + position / page_size;
    out[static_cast<size_t>(i)] = {ints(places.kv_indices)[entry], position % page_size};
  }
  return out;
}

bool is_float(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::f16:
    case DType::bf16:
    case DType::f8_e4m3:
    case DType::f8_e5m2:
      return true;
    default:
      return false;
  }
}

void check_tensors(const Validator& check, const AppendTensors& x, std::string_view rows_name,
                   std::string_view cache_name, int slot_axis) {
  const auto rank = [&](std::string_view argument, const StridedView& view, int expected) {
    check.expect(view.dims.rank() == expected, argument, std::to_string(expected) + " dimensions",
                 "shape " + view.dims.to_string());
    check.expect(view.contiguous_rows(), argument, "a contiguous last dimension", "strides");
    check.data(argument, view);
  };
  rank(rows_name, x.rows, 3);
  rank(cache_name, x.cache, 4);
  const int head_axis = 3 - slot_axis;
  const Dims expected = {x.rows.dims[0], x.cache.dims[head_axis], x.cache.dims[3]};
  check.expect(x.rows.dims == expected, rows_name, "shape " + expected.to_string(),
               x.rows.dims.to_string());
  check.expect(x.rows.dtype == x.cache.dtype || (is_float(x.rows.dtype) && is_float(x.cache.dtype)),
               rows_name,
               "dtype " + std::string(name(x.cache.dtype)) + " of " + std::string(cache_name),
               name(x.rows.dtype));
}

float load(const char* from, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::f16:
      return f16_to_f32(reinterpret_cast<const uint16_t*>(from)[i]);
    case DType::bf16:
      return bf16_to_f32(reinterpret_cast<const uint16_t*>(from)[i]);
    case DType::f8_e4m3:
      return f8_e4m3_to_f32(reinterpret_cast<const uint8_t*>(from)[i]);
    case DType::f8_e5m2:
      return f8_e5m2_to_f32(reinterpret_cast<const uint8_t*>(from)[i]);
    default:
      return reinterpret_cast<const float*>(from)[i];
  }
}

void store(float value, char* to, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::f16:
      reinterpret_cast<uint16_t*>(to)[i] = f32_to_f16(value);
      break;
    case DType::bf16:
      reinterpret_cast<uint16_t*>(to)[i] = f32_to_bf16(value);
      break;
    case DType::f8_e4m3:
      reinterpret_cast<uint8_t*>(to)[i] = f32_to_f8_e4m3(value);
      break;
    case DType::f8_e5m2:
      reinterpret_cast<uint8_t*>(to)[i] = f32_to_f8_e5m2(value);
      break;
    default:
      reinterpret_cast<float*>(to)[i] = value;
  }
}

void copy_head(const char* from, DType from_dtype, char* to, DType to_dtype, int64_t size) {
  if (from_dtype == to_dtype) {
    const int64_t bytes = size * dtype_info(to_dtype).block_bytes;
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  for (int64_t i = 0; i < size; ++i) store(load(from, from_dtype, i), to, to_dtype, i);
}

void copy_row(const AppendTensors& x, int64_t row, const Place& place, int slot_axis) {
  const int64_t from_bytes = dtype_info(x.rows.dtype).block_bytes;
  const int64_t to_bytes = dtype_info(x.cache.dtype).block_bytes;
  const int head_axis = 3 - slot_axis;
  const char* from = static_cast<const char*>(x.rows.data) + row * x.rows.stride(0) * from_bytes;
  char* to = static_cast<char*>(x.cache.data) +
             (place.page * x.cache.stride(0) + place.slot * x.cache.stride(slot_axis)) * to_bytes;
  for (int64_t head = 0; head < x.rows.dims[1]; ++head) {
    copy_head(from + head * x.rows.stride(1) * from_bytes, x.rows.dtype,
              to + head * x.cache.stride(head_axis) * to_bytes, x.cache.dtype, x.rows.dims[2]);
  }
}

}  // namespace

void append_paged_kv_cache(const AppendTensors& keys, const AppendTensors& values,
                           const AppendPlaces& places, KvOrder order, ThreadPool& pool,
                           const AppendNames& names) {
  const Validator check(names.op);
  const int slot_axis = order == KvOrder::nhd ? 1 : 2;
  check_tensors(check, keys, names.key, names.k_cache, slot_axis);
  check_tensors(check, values, names.value, names.v_cache, slot_axis);
  const int64_t rows = keys.rows.dims[0];
  const auto same = [&](int64_t expected, int64_t given, std::string_view argument,
                        std::string_view what) {
    check.expect(expected == given, argument, std::to_string(expected) + std::string(what),
                 std::to_string(given));
  };
  same(rows, values.rows.dims[0], names.value, " rows");
  same(keys.cache.dims[0], values.cache.dims[0], names.v_cache, " pages");
  same(keys.cache.dims[slot_axis], values.cache.dims[slot_axis], names.v_cache, " tokens a page");
  const std::vector<Place> targets =
      places_of(check, places, rows, keys.cache.dims[0], keys.cache.dims[slot_axis]);
  if (rows == 0) return;
  const int64_t row_bytes =
      (keys.rows.dims[1] * keys.rows.dims[2] + values.rows.dims[1] * values.rows.dims[2]) *
      dtype_info(keys.rows.dtype).block_bytes;
  const int64_t step = kChunkBytes / (row_bytes + 1) + 1;
  pool.parallel([&](Team& team) {
    team.for_chunks((rows + step - 1) / step, [&](int64_t chunk) {
      const int64_t end = std::min(rows, (chunk + 1) * step);
      for (int64_t row = chunk * step; row < end; ++row) {
        copy_row(keys, row, targets[static_cast<size_t>(row)], slot_axis);
        copy_row(values, row, targets[static_cast<size_t>(row)], slot_axis);
      }
    });
  });
}

}  // namespace effinfer::ops
