#include "executor/device_lists.h"

#include "ops/bucket_index.h"
#include "ops/column_scratch.h"
#include "ops/row_scores.h"

namespace effinfer::executor {

template <class T>
T* DeviceLists::take(int64_t count, const char* what) {
  memory_.push_back(allocate_(static_cast<size_t>(count) * sizeof(T), what));
  return static_cast<T*>(memory_.back().get());
}

ops::VisitPlan DeviceLists::add(const ops::VisitPlan& largest, const ops::VisitShape& shape) {
  ops::VisitPlan plan = largest;
  const int64_t heads = plan.num_kv_heads;
  const int64_t blocks = plan.num_blocks + plan.num_rows;
  plan.words = take<uint64_t>(blocks * heads * plan.list_words, "lists of what is visited");
  if (shape.weights()) {
    // Those of prompts come first.
    const int64_t lists = (shape.row_weights ? blocks : plan.num_blocks) * heads;
    plan.log_weights = take<float>(lists * plan.list_words * ops::kPageSize, "weights of keys");
    plan.weighted = take<uint8_t>(lists, "weights of keys");
  }
  if (shape.columns) {
    plan.score_sequences =
        ops::column_sequences(plan.list_words, plan.num_qo_heads, plan.num_sequences);
    const int64_t each = plan.num_qo_heads * ops::ColumnScratch::of(plan.list_words).bytes();
    plan.scores = take<std::byte>(plan.score_sequences * each, "scores of keys");
  }
  if (shape.buckets) {
    const int64_t each = heads * ops::bucket_bytes(plan.list_words);
    plan.buckets = take<std::byte>(plan.num_sequences * each, "buckets of keys");
  }
  if (shape.page_scores > 0) {
    const int64_t stride = ops::row_score_stride(plan.list_words, shape.page_scores);
    const int64_t scored = ops::row_score_heads(plan.num_qo_heads, heads);
    plan.score_rows = ops::scored_rows(plan.list_words, shape.page_scores, scored, plan.num_rows);
    plan.row_scores = take<float>(plan.score_rows * scored * stride, "scores of units of keys");
  }
  return plan;
}

}  // namespace effinfer::executor
