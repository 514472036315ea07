#include "ops/attention_tensors.h"

#include <string>

namespace effinfer::ops {

void AttentionTensors::check_rows(std::string_view argument, const StridedView& view) const {
  check_.data(argument, view.data, view.dims);
  check_.expect(view.contiguous_rows(), argument, "a contiguous last dimension",
                "stride " + std::to_string(view.stride(view.dims.rank() - 1)));
}

// The first dimension may be larger than the plan needs.
void AttentionTensors::check_dims(std::string_view argument, const StridedView& x,
                                  const Dims& last) const {
  const AttentionGeometry& g = plan_.geometry;
  Dims expected = {x.dims.rank() > 0 && x.dims[0] > plan_.num_kv_rows ? x.dims[0]
                                                                      : plan_.num_kv_rows};
  if (plan_.paged && order_ == KvOrder::nhd) expected.push_back(g.page_size);
  expected.push_back(g.num_kv_heads);
  if (plan_.paged && order_ == KvOrder::hnd) expected.push_back(g.page_size);
  if (last.rank() > 0) expected.push_back(last[0]);
  check_.expect(x.dims == expected, argument,
                "shape " + expected.to_string() + " (or more " + (plan_.paged ? "pages)" : "rows)"),
                x.dims.to_string());
}

QueryRows AttentionTensors::query_rows(std::string_view argument, const StridedView& q,
                                       int32_t dims) const {
  const bool floats = q.dtype == DType::f32 || q.dtype == DType::f16 || q.dtype == DType::bf16;
  check_.expect(floats, argument, "dtype f32, f16 or bf16", name(q.dtype));
  const Dims expected = {plan_.num_rows(), plan_.geometry.num_qo_heads, dims};
  check_.expect(q.dims == expected, argument, "shape " + expected.to_string(), q.dims.to_string());
  check_rows(argument, q);
  return {static_cast<const uint8_t*>(q.data), q.dtype, dims, q.stride(0), q.stride(1)};
}

KvRows AttentionTensors::kv_rows(std::string_view argument, const StridedView& x,
                                 int32_t dims) const {
  const bool known = x.dtype == DType::f32 || x.dtype == DType::f16 || x.dtype == DType::bf16 ||
                     x.dtype == DType::i8 || x.dtype == DType::f8_e4m3 || x.dtype == DType::f8_e5m2;
  check_.expect(known, argument, "dtype f32, f16, bf16, i8, f8_e4m3 or f8_e5m2", name(x.dtype));
  check_dims(argument, x, {dims});
  check_rows(argument, x);
  KvRows rows;
  rows.data = static_cast<const uint8_t*>(x.data);
  rows.dtype = x.dtype;
  rows.dims = dims;
  const int64_t size = dtype_info(x.dtype).block_bytes;
  rows.page_stride = plan_.paged ? x.stride(0) * size : 0;
  rows.token_stride = x.stride(token_axis()) * size;
  rows.head_stride = x.stride(head_axis()) * size;
  return rows;
}

void AttentionTensors::add_scales(std::string_view argument, const StridedView& x,
                                  KvRows& rows) const {
  if (x.dims.rank() == 0) return;
  check_.expect(x.dtype == DType::f32, argument, "dtype f32", name(x.dtype));
  check_dims(argument, x, {});
  rows.scales = static_cast<const float*>(x.data);
  rows.scale_page_stride = plan_.paged ? x.stride(0) : 0;
  rows.scale_token_stride = x.stride(token_axis());
  rows.scale_head_stride = x.stride(head_axis());
}

}  // namespace effinfer::ops
