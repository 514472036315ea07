#include "effinfer/ops/block_lists.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "ops/bits.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

const int32_t* ints(const TensorView& view) {
  return static_cast<const int32_t*>(view.data);
}
const uint8_t* bytes(const TensorView& view) {
  return static_cast<const uint8_t*>(view.data);
}

std::string item(std::string_view argument, int64_t i) {
  return std::string(argument).append("[").append(std::to_string(i)).append("]");
}

void check_blocks(const Validator& check, const BlockMatrix& x) {
  const auto whole = [&](std::string_view argument, int64_t size, std::string_view by,
                         int64_t block) {
    check.positive(by, block);
    check.expect(size >= 0 && size <= kMaxInt32 && size % block == 0, argument,
                 "a multiple of " + std::string(by) + " = " + std::to_string(block),
                 std::to_string(size));
  };
  whole("M", x.M, "R", x.R);
  whole("N", x.N, "C", x.C);
  check.indptr("indptr", x.indptr, x.M / x.R);
  check.indices("indices", x.indices, x.N / x.C);
  const int32_t listed = ints(x.indptr)[x.M / x.R];
  check.expect(listed == x.indices.dims[0], "indptr",
               std::to_string(x.indices.dims[0]) + " last, the size of indices",
               std::to_string(listed));
}

int32_t narrow(const Validator& check, int64_t value) {
  check.expect(value <= kMaxInt32, "indices", "fewer than 2^31 spans", std::to_string(value));
  return static_cast<int32_t>(value);
}

// Appends [begin, end) to the list that started at span `first`; joins it to the one before.
void add_span(std::vector<int32_t>& spans, size_t first, int64_t begin, int64_t end) {
  if (begin == end) return;
  if (spans.size() > first && spans.back() == begin) {
    spans.back() = static_cast<int32_t>(end);
    return;
  }
  spans.push_back(static_cast<int32_t>(begin));
  spans.push_back(static_cast<int32_t>(end));
}

void add_list(const Validator& check, BlockLists& out, int64_t kv_head, int64_t first_row,
              int64_t rows) {
  out.lists.insert(out.lists.end(), {0, static_cast<int32_t>(kv_head),
                                     static_cast<int32_t>(first_row), static_cast<int32_t>(rows)});
  out.list_indptr.push_back(narrow(check, static_cast<int64_t>(out.spans.size() / 2)));
}

}  // namespace

BlockLists block_sparse_lists(const BlockMatrix& x, int32_t num_kv_heads, bool masked) {
  const Validator check("block_sparse_attention");
  check_blocks(check, x);
  check.positive("num_kv_heads", num_kv_heads);
  BlockLists out;
  out.list_indptr.push_back(0);
  std::vector<std::pair<int32_t, int32_t>> row;  // block, its place in `indices`
  for (int64_t i = 0; i < x.M / x.R; ++i) {
    row.clear();
    for (int32_t b = ints(x.indptr)[i]; b < ints(x.indptr)[i + 1]; ++b) {
      row.emplace_back(ints(x.indices)[b], b);
    }
    std::sort(row.begin(), row.end());
    for (size_t b = 1; b < row.size(); ++b) {
      if (row[b].first != row[b - 1].first) continue;
      check.expect(false, item("indices", row[b].second), "no block of the row twice",
                   std::to_string(row[b].first) + " again");
    }
    for (int32_t head = 0; head < num_kv_heads; ++head) {
      const size_t first = out.spans.size();
      for (const auto& [block, place] : row) {
        // A span with bits of its own must not be joined.
        const size_t from = masked ? out.spans.size() : first;
        add_span(out.spans, from, block * x.C, (block + 1) * x.C);
        if (masked) out.span_masks.push_back(place * x.R * x.C);
      }
      add_list(check, out, head, i * x.R, x.R);
    }
  }
  return out;
}

std::vector<uint8_t> block_mask(const BlockMatrix& x, const TensorView& packed) {
  const Validator check("block_sparse_attention");
  check_blocks(check, x);
  check.dtype("packed_mask", packed, DType::u8);
  check.rank("packed_mask", packed, 1);
  const int32_t* indptr = ints(x.indptr);
  const int64_t rows = x.M / x.R;
  int64_t needed = 0;
  for (int64_t i = 0; i < rows; ++i) needed += ((indptr[i + 1] - indptr[i]) * x.R * x.C + 7) / 8;
  check.expect(packed.dims[0] == needed, "packed_mask",
               std::to_string(needed) + " bytes, each block row from a new one",
               std::to_string(packed.dims[0]));
  std::vector<uint8_t> out(static_cast<size_t>((indptr[rows] * x.R * x.C + 7) / 8));
  const uint8_t* segment = bytes(packed);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t blocks = indptr[i + 1] - indptr[i];
    int64_t bit = 0;
    for (int64_t r = 0; r < x.R; ++r) {
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t place = ((indptr[i] + b) * x.R + r) * x.C;
        for (int64_t c = 0; c < x.C; ++c, ++bit) {
          const int set = segment[bit / 8] >> (bit % 8) & 1;
          out[static_cast<size_t>((place + c) / 8)] |=
              static_cast<uint8_t>(set << ((place + c) % 8));
        }
      }
    }
    segment += (bit + 7) / 8;
  }
  return out;
}

namespace {

// The sum of a head's sizes, the same for all heads; each at least 0.
int64_t check_sizes(const Validator& check, std::string_view argument, const TensorView& sizes,
                    int64_t heads, int64_t blocks) {
  check.dtype(argument, sizes, DType::i32);
  check.shape(argument, sizes, {heads, blocks});
  int64_t total = 0;
  for (int64_t head = 0; head < heads; ++head) {
    int64_t sum = 0;
    for (int64_t i = head * blocks; i < (head + 1) * blocks; ++i) {
      check.expect(ints(sizes)[i] >= 0, argument, "no negative size",
                   std::to_string(ints(sizes)[i]));
      sum += ints(sizes)[i];
    }
    if (head == 0) total = sum;
    check.expect(sum == total && sum <= kMaxInt32, argument,
                 "the sum of each head to be that of the first, " + std::to_string(total),
                 std::to_string(sum));
  }
  return total;
}

}  // namespace

VariableBlockLists variable_block_lists(const TensorView& block_mask_map,
                                        const TensorView& block_row_sz,
                                        const TensorView& block_col_sz) {
  const Validator check("variable_block_sparse_attention");
  check.dtype("block_mask_map", block_mask_map, DType::u8);
  check.rank("block_mask_map", block_mask_map, 3);
  const int64_t heads = block_mask_map.dims[0], MB = block_mask_map.dims[1];
  const int64_t NB = block_mask_map.dims[2];
  VariableBlockLists out;
  out.num_rows = check_sizes(check, "block_row_sz", block_row_sz, heads, MB);
  out.num_columns = check_sizes(check, "block_col_sz", block_col_sz, heads, NB);
  out.list_indptr.push_back(0);
  for (int64_t head = 0; head < heads; ++head) {
    const int32_t* columns = ints(block_col_sz) + head * NB;
    int64_t first_row = 0;
    for (int64_t i = 0; i < MB; ++i) {
      const int64_t rows = ints(block_row_sz)[head * MB + i];
      if (rows == 0) continue;
      const uint8_t* visited = bytes(block_mask_map) + (head * MB + i) * NB;
      const size_t first = out.spans.size();
      int64_t begin = 0;
      for (int64_t j = 0; j < NB; begin += columns[j++]) {
        if (visited[j] != 0) add_span(out.spans, first, begin, begin + columns[j]);
      }
      add_list(check, out, head, first_row, rows);
      first_row += rows;
    }
  }
  return out;
}

PackedMask ancestor_mask(const TensorView& parents, const TensorView& qo_indptr,
                         const TensorView& kv_len) {
  const Validator check("tree_attention");
  const auto sequences = static_cast<int64_t>(check.ints("kv_len", kv_len).size());
  check.indptr("qo_indptr", qo_indptr, sequences);
  check.dtype("parents", parents, DType::i32);
  check.shape("parents", parents, {ints(qo_indptr)[sequences]});
  PackedMask out;
  out.indptr.push_back(0);
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t rows = ints(qo_indptr)[s + 1] - ints(qo_indptr)[s];
    const int64_t length = ints(kv_len)[s];
    check.expect(length >= rows, item("kv_len", s),
                 "at least its " + std::to_string(rows) + " query rows", std::to_string(length));
    out.indptr.push_back(out.indptr.back() + (rows * length + 7) / 8);
  }
  out.bits.resize(static_cast<size_t>(out.indptr.back()));
  for (int64_t s = 0; s < sequences; ++s) {
    const int32_t first = ints(qo_indptr)[s];
    const int64_t rows = ints(qo_indptr)[s + 1] - first;
    const int64_t length = ints(kv_len)[s], context = length - rows;
    const int32_t* tree = ints(parents) + first;
    uint8_t* bits = out.bits.data() + out.indptr[static_cast<size_t>(s)];
    for (int64_t i = 0; i < rows; ++i) {
      if (tree[i] < -1 || tree[i] >= i) {
        check.expect(false, item("parents", first + i),
                     std::string("-1 to ").append(std::to_string(i - 1)), std::to_string(tree[i]));
      }
      set_bits(bits, i * length, i * length + context);
      for (int64_t row = i; row >= 0; row = tree[row]) {
        const int64_t bit = i * length + context + row;
        bits[bit / 8] |= static_cast<uint8_t>(1 << bit % 8);
      }
    }
  }
  return out;
}

}  // namespace effinfer::ops
