#include "ops/paged_batch.h"

namespace effinfer::ops {
namespace {

const int32_t* ints(const TensorView& view) {
  return static_cast<const int32_t*>(view.data);
}

}  // namespace

BatchLayout check_sequences(const Validator& check, const PagedBatch& batch) {
  const std::span<const int32_t> kv_len = check.ints("kv_len", batch.kv_len);
  BatchLayout layout;
  layout.num_sequences = static_cast<int64_t>(kv_len.size());
  check.indptr("qo_indptr", batch.qo_indptr, layout.num_sequences);
  layout.qo_indptr = ints(batch.qo_indptr);
  layout.num_tokens = layout.qo_indptr[layout.num_sequences];
  layout.kv_len = kv_len.data();
  for (int64_t s = 0; s < layout.num_sequences; ++s) {
    const int64_t rows = layout.qo_indptr[s + 1] - layout.qo_indptr[s];
    if (layout.kv_len[s] >= rows) continue;
    check.expect(false, indexed("kv_len", s),
                 "at least its " + std::to_string(rows) + " query rows",
                 std::to_string(layout.kv_len[s]));
  }
  return layout;
}

BatchLayout check_batch(const Validator& check, const PagedBatch& batch, int64_t tokens,
                        const PagedKv& kv) {
  BatchLayout layout = check_sequences(check, batch);
  const int64_t sequences = layout.num_sequences;
  check.indptr("kv_indptr", batch.kv_indptr, sequences);
  check.indices("kv_indices", batch.kv_indices, kv.num_pages());
  const int32_t* qo_indptr = layout.qo_indptr;
  const int32_t* kv_indptr = ints(batch.kv_indptr);
  check.expect(qo_indptr[sequences] == tokens, "qo_indptr",
               std::to_string(tokens) + " last, as many as query rows",
               std::to_string(qo_indptr[sequences]));
  check.expect(kv_indptr[sequences] <= batch.kv_indices.dims[0], "kv_indptr",
               "at most " + std::to_string(batch.kv_indices.dims[0]) + ", the size of kv_indices",
               std::to_string(kv_indptr[sequences]));
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t room = static_cast<int64_t>(kv_indptr[s + 1] - kv_indptr[s]) * PagedKv::kPageSize;
    const int32_t length = layout.kv_len[s];
    if (length <= room) continue;
    check.expect(false, indexed("kv_len", s),
                 "at most the " + std::to_string(room) + " tokens of its pages",
                 std::to_string(length));
  }
  layout.kv_indptr = kv_indptr;
  layout.kv_indices = ints(batch.kv_indices);
  return layout;
}

// q, [T, a multiple of num_kv_heads, head_dim]: the number of heads.
int32_t check_queries(const Validator& check, const TensorView& q, const PagedKv& kv) {
  check.dtype("q", q, DType::f32);
  check.rank("q", q, 3);
  check.expect(q.dims[1] > 0 && q.dims[1] % kv.num_kv_heads() == 0 && q.dims[2] == kv.head_dim(),
               "q",
               "shape [T, a multiple of " + std::to_string(kv.num_kv_heads()) + ", " +
                   std::to_string(kv.head_dim()) + "]",
               q.dims.to_string());
  return static_cast<int32_t>(q.dims[1]);
}

}  // namespace effinfer::ops
