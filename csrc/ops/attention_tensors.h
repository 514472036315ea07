// The queries, keys and values of an attention call, checked against its plan.
#pragma once

#include <string_view>

#include "effinfer/threads.h"
#include "ops/attention_plan.h"
#include "ops/validate.h"

namespace effinfer::ops {

class AttentionTensors {
 public:
  AttentionTensors(const Validator& check, const AttentionPlan::Impl& plan, KvOrder order)
      : check_(check), plan_(plan), order_(order) {}

  // All but the arithmetic; queries and keys have `dims` dimensions.
  AttentionLogits logits(const LogitInputs& inputs, int32_t dims) const;
  // f32, f16 or bf16.
  QueryRows query_rows(std::string_view argument, const StridedView& q, int32_t dims) const;
  // f32, f16, bf16, i8, f8_e4m3 or f8_e5m2.
  KvRows kv_rows(std::string_view argument, const StridedView& x, int32_t dims) const;
  // The engine's pages in place of keys and values.
  const KvLayer& pages(const PagedKv& kv) const;
  // Scales of rank 0 are none.
  void add_scales(std::string_view argument, const StridedView& x, KvRows& rows) const;

 private:
  int token_axis() const { return !plan_.paged ? 0 : order_ == KvOrder::nhd ? 1 : 2; }
  int head_axis() const { return !plan_.paged ? 1 : order_ == KvOrder::nhd ? 2 : 1; }
  void check_rows(std::string_view argument, const StridedView& view) const;
  void check_dims(std::string_view argument, const StridedView& x, const Dims& last) const;

  const Validator& check_;
  const AttentionPlan::Impl& plan_;
  KvOrder order_;
};

void check_logits(const Validator& check, float sm_scale, float logits_soft_cap);
// On GPUs, whose kernels copy 16 bytes at once.
void check_aligned(const Validator& check, std::string_view argument, const StridedView& view);
// float32 [num_qo_heads]; null for a view of rank 0 or without data.
const float* per_head(const Validator& check, std::string_view argument, const TensorView& view,
                      int64_t num_qo_heads);
// bf16 where that pays for the problem's keys and shape and queries are bfloat16 anyway, which lose
// nothing; probabilities are rounded to it.
Arithmetic arithmetic_of_products(AttentionProblem problem);

// Runs a problem with memory for its partial results.
void run_work(AttentionProblem& problem, const AttentionWork& work, ThreadPool& pool);
// Plans a problem without lists of spans, and runs it.
void plan_and_run(AttentionProblem& problem, ThreadPool& pool);

}  // namespace effinfer::ops
