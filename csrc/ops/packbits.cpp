#include "effinfer/ops/packbits.h"

#include "ops/describe.h"
#include "ops/packbits.h"
#include "ops/run_rows.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

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

void packbits(const TensorView& x, const TensorView& indptr, const TensorView& out_indptr,
              BitOrder order, const StridedView& out, const Executor& executor) {
  const Validator check("packbits", executor.device());
  check.dtype("x", x, DType::u8);
  check.rank("x", x, 1);
  PackBitsProblem problem;
  with_indptr(check, indptr, [&](const auto* starts) {
    check.at_least("indptr", indptr.dims[0], 1);
    if (executor.queue() != nullptr) return;
    check.indptr_of_rows("indptr", starts, indptr.dims[0], x.dims[0]);
  });
  check.dtype("out_indptr", out_indptr, DType::i64);
  check.shape("out_indptr", out_indptr, indptr.dims);
  check.dtype("out", out, DType::u8);
  check.rank("out", out, 1);
  check.expect(out.contiguous_rows(), "out", "a C-contiguous array", "strides");
  problem.x = static_cast<const uint8_t*>(x.data);
  problem.indptr = indptr.data;
  problem.indptr_dtype = indptr.dtype;
  problem.out_indptr = static_cast<const int64_t*>(out_indptr.data);
  problem.num_segments = indptr.dims[0] - 1;
  problem.bytes = out.dims[0];
  problem.order = order;
  problem.out = static_cast<uint8_t*>(out.data);
  if (executor.queue() != nullptr) return run_alone(problem, executor);
  const int64_t bytes = problem.out_indptr[problem.num_segments];
  check.expect(bytes == problem.bytes, "out", std::to_string(bytes) + " bytes",
               std::to_string(problem.bytes));
  // About a packed byte a nanosecond on one thread.
  run_alone(problem, pool_for(bytes, *executor.pool()));
}

std::string describe(const PackBitsProblem& problem) {
  return "[packbits]" + field("segments", problem.num_segments) + field("bytes", problem.bytes);
}

Cost cost(const PackBitsProblem& problem) {
  return {problem.bytes * 9, problem.bytes * 8};
}

}  // namespace effinfer::ops
