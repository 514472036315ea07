#include "effinfer/ops/embedding.h"

#include "ops/elementwise.h"
#include "ops/run_rows.h"
#include "ops/validate.h"

namespace effinfer::ops {

void embedding(const TensorView& ids, const TensorView& table, float scale, float* out,
               ThreadPool& pool) {
  const Validator check("embedding");
  check.rank("table", table, 2);
  check.data("table", table.data, table.dims);
  check.indices("ids", ids, table.dims[0]);
  check.data("out", out, {ids.dims[0], table.dims[1]});
  EmbeddingProblem problem;
  problem.ids = static_cast<const int32_t*>(ids.data);
  problem.rows = ids.dims[0];
  problem.table = static_cast<const uint8_t*>(table.data);
  problem.dtype = table.dtype;
  problem.vocab_size = table.dims[0];
  problem.cols = table.dims[1];
  problem.scale = scale;
  problem.out = out;
  const DTypeInfo& info = dtype_info(table.dtype);
  const bool weight = info.quantized || table.dtype == DType::f32 || table.dtype == DType::f16 ||
                      table.dtype == DType::bf16;
  check.expect(weight, "table", "dtype f32, f16, bf16 or a quantised one", info.name);
  check.expect(problem.cols % info.block_size == 0, "table",
               "rows of whole blocks of " + std::to_string(info.block_size),
               "shape " + table.dims.to_string());
  run_rows(problem, pool);
}

void select_rows(const TensorView& x, const TensorView& rows, float* out, ThreadPool& pool) {
  const Validator check("select_rows");
  check.dtype("x", x, DType::f32);
  check.rank("x", x, 2);
  check.indices("rows", rows, x.dims[0]);
  check.data("out", out, {rows.dims[0], x.dims[1]});
  SelectRowsProblem problem;
  problem.x = static_cast<const float*>(x.data);
  problem.rows = static_cast<const int32_t*>(rows.data);
  problem.num_rows = rows.dims[0];
  problem.cols = x.dims[1];
  problem.out = out;
  run_rows(problem, pool);
}

}  // namespace effinfer::ops
