#include "effinfer/ops/page.h"

#include <string>
#include <vector>

#include "ops/describe.h"
#include "ops/page.h"
#include "ops/registry.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

const int32_t* ints(const TensorView& view) {
  return static_cast<const int32_t*>(view.data);
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
  check.expect(false, indexed(argument, i),
               std::to_string(low).append(" to ").append(std::to_string(high - 1)),
               std::to_string(value));
}

// Dtypes and shapes.
void check_lists(const Validator& check, const AppendPlaces& places, int64_t rows) {
  check_vector(check, "batch_indices", places.batch_indices, rows);
  check_vector(check, "positions", places.positions, rows);
  check.ints("kv_indices", places.kv_indices);
  check.ints("kv_indptr", places.kv_indptr);
  check.at_least("kv_indptr", places.kv_indptr.dims[0], 1);
  check_vector(check, "kv_last_page_len", places.kv_last_page_len, places.kv_indptr.dims[0] - 1);
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

std::vector<PagePlace> places_of(const Validator& check, const AppendPlaces& places, int64_t rows,
                                 int64_t num_pages, int64_t page_size) {
  const std::vector<int64_t> lengths = check_sequences(check, places, num_pages, page_size);
  check_vector(check, "batch_indices", places.batch_indices, rows);
  check_vector(check, "positions", places.positions, rows);
  std::vector<PagePlace> out(static_cast<size_t>(rows));
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
    check.rank(argument, view, expected);
    check.expect(view.contiguous_rows(), argument, "a contiguous last dimension", "strides");
    check.data(argument, view);
  };
  rank(rows_name, x.rows, 3);
  rank(cache_name, x.cache, 4);
  const int head_axis = 3 - slot_axis;
  check.shape(rows_name, x.rows, {x.rows.dims[0], x.cache.dims[head_axis], x.cache.dims[3]});
  check.expect(x.rows.dtype == x.cache.dtype || (is_float(x.rows.dtype) && is_float(x.cache.dtype)),
               rows_name,
               "dtype " + std::string(name(x.cache.dtype)) + " of " + std::string(cache_name),
               name(x.rows.dtype));
}

PagedRows rows_of(const AppendTensors& x, int slot_axis) {
  const int64_t from_bytes = dtype_info(x.rows.dtype).block_bytes;
  const int64_t to_bytes = dtype_info(x.cache.dtype).block_bytes;
  PagedRows rows;
  rows.rows = static_cast<const uint8_t*>(x.rows.data);
  rows.rows_dtype = x.rows.dtype;
  rows.row_stride = x.rows.stride(0) * from_bytes;
  rows.row_head_stride = x.rows.stride(1) * from_bytes;
  rows.cache = static_cast<uint8_t*>(x.cache.data);
  rows.cache_dtype = x.cache.dtype;
  rows.page_stride = x.cache.stride(0) * to_bytes;
  rows.slot_stride = x.cache.stride(slot_axis) * to_bytes;
  rows.head_stride = x.cache.stride(3 - slot_axis) * to_bytes;
  rows.heads = x.rows.dims[1];
  rows.dims = x.rows.dims[2];
  return rows;
}

const char* rejects(const PagedRows& x) {
  if (x.rows_dtype == x.cache_dtype) return nullptr;
  return is_float(x.rows_dtype) && is_float(x.cache_dtype)
             ? nullptr
             : "rows and pages must be of one dtype, or of floats";
}

std::string dtypes(const PagedRows& x) {
  return std::string(name(x.rows_dtype)).append(" to ").append(name(x.cache_dtype));
}

}  // namespace

std::string describe(const AppendPagesProblem& problem) {
  return "[append_pages]" + field("rows", problem.num_rows) + field("heads", problem.keys.heads) +
         field("head_dim", problem.keys.dims) + " keys=" + dtypes(problem.keys) +
         " values=" + dtypes(problem.values);
}

const char* rejects(const AppendPagesProblem& problem) {
  const char* reason = rejects(problem.keys);
  return reason != nullptr ? reason : rejects(problem.values);
}

Cost cost(const AppendPagesProblem& problem) {
  const auto bytes = [](const PagedRows& x) {
    return x.heads * x.dims *
           (dtype_info(x.rows_dtype).block_bytes + dtype_info(x.cache_dtype).block_bytes);
  };
  const int64_t sizes =
      static_cast<int64_t>(sizeof(PagePlace)) + bytes(problem.keys) + bytes(problem.values);
  return {problem.num_rows * sizes, 0};
}

void append_paged_kv_cache(const AppendTensors& keys, const AppendTensors& values,
                           const AppendPlaces& places, KvOrder order, const Executor& executor,
                           const AppendNames& names) {
  const Validator check(names.op, executor.device());
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
  AppendPagesProblem problem;
  std::vector<PagePlace> targets;
  if (executor.queue() != nullptr) {
    check_lists(check, places, rows);
    problem.lists = {ints(places.batch_indices), ints(places.positions), ints(places.kv_indices),
                     ints(places.kv_indptr), keys.cache.dims[slot_axis]};
  } else {
    targets = places_of(check, places, rows, keys.cache.dims[0], keys.cache.dims[slot_axis]);
    problem.places = targets.data();
  }
  if (rows == 0) return;
  problem.keys = rows_of(keys, slot_axis);
  problem.values = rows_of(values, slot_axis);
  problem.num_rows = rows;
  run_alone(problem, executor);
}

}  // namespace effinfer::ops
