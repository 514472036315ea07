// Scores of keys on GPUs: lists are uploaded, and rows whose sums nobody has told are asked of the
// attention of a GPU first.
#include "ops/scores_there.h"

#include <algorithm>
#include <vector>

#include "ops/registry.h"
#include "ops/upload_block.h"

namespace effinfer::ops {
namespace {

// What lies in one allocation of a queue.
class Uploaded {
 public:
  Uploaded(Queue& queue, const UploadBlock& block)
      : memory_(queue.allocate(std::max<size_t>(block.bytes().size(), 1))) {
    if (!block.bytes().empty()) {
      queue.upload(memory_.get(), block.bytes().data(), block.bytes().size());
    }
  }
  template <class T>
  const T* at(size_t place) const {
    return reinterpret_cast<const T*>(static_cast<const std::byte*>(memory_.get()) + place);
  }

 private:
  std::shared_ptr<void> memory_;
};

std::vector<ScoreItem> items_of(const AttentionPlan::Impl& plan) {
  std::vector<ScoreItem> items;
  for (size_t s = 0; s < plan.kv_len.size(); ++s) {
    if (plan.qo_indptr[s] == plan.qo_indptr[s + 1]) continue;
    const int32_t units = (plan.kv_len[s] + kUnitTokens - 1) / kUnitTokens;
    for (int32_t head = 0; head < plan.geometry.num_kv_heads; ++head) {
      for (int32_t unit = 0; unit < units; unit += kChunkUnits) {
        items.push_back(
            {static_cast<int32_t>(s), head, unit, std::min(unit + kChunkUnits, units), 0});
      }
    }
  }
  return items;
}

// Natural logarithms of the rows' sums, in the queue's order; what attention gives beside them is
// thrown away.
std::shared_ptr<void> sums_of(const AttentionGeometry& given, const AttentionSequences& sequences,
                              const AttentionScoresInputs& inputs, Queue& queue) {
  AttentionGeometry geometry = given;
  geometry.head_dim_vo = geometry.head_dim_qk;
  const AttentionPlan attention(geometry, sequences);
  AttentionInputs all;
  static_cast<LogitInputs&>(all) = inputs;
  all.v = inputs.k;
  const Dims dims = inputs.q.dims;
  const std::shared_ptr<void> out = queue.allocate(std::max<size_t>(
      1, static_cast<size_t>(dims.num_elements() * dtype_info(inputs.q.dtype).block_bytes)));
  const std::shared_ptr<void> sums =
      queue.allocate(std::max<size_t>(1, static_cast<size_t>(dims[0] * dims[1]) * sizeof(float)));
  StridedView out_view = StridedView::dense(out.get(), inputs.q.dtype, dims);
  StridedView sums_view = StridedView::dense(sums.get(), DType::f32, {dims[0], dims[1]});
  out_view.device = sums_view.device = queue.device();
  attention.run(all, out_view, sums_view, queue);
  return sums;
}

}  // namespace

void score_there(const AttentionGeometry& geometry, const AttentionSequences& sequences,
                 const AttentionScoresInputs& inputs, const AttentionPlan::Impl& plan,
                 const std::vector<ScoreRows>& rows, AttentionScoresProblem problem, Queue& queue) {
  const std::vector<ScoreItem> items = items_of(plan);
  if (items.empty()) return;
  problem.num_items = static_cast<int64_t>(items.size());
  // Before anything is put into the queue for a problem that no kernel takes.
  table<AttentionScoresProblem>().select(problem, current_target(queue.device()));
  UploadBlock block;
  const size_t item_list = block.add(items);
  const size_t row_list = block.add(rows);
  const size_t qo_indptr = block.add(plan.qo_indptr);
  const size_t kv_indptr = block.add(plan.kv_indptr);
  const size_t kv_len = block.add(plan.kv_len);
  const size_t kv_indices = block.add(plan.kv_indices);
  const Uploaded lists(queue, block);
  problem.items = lists.at<ScoreItem>(item_list);
  problem.rows = lists.at<ScoreRows>(row_list);
  problem.batch.qo_indptr = lists.at<int32_t>(qo_indptr);
  problem.batch.kv_indptr = lists.at<int32_t>(kv_indptr);
  problem.batch.kv_len = lists.at<int32_t>(kv_len);
  if (plan.paged) problem.batch.kv_indices = lists.at<int32_t>(kv_indices);
  std::shared_ptr<void> sums;
  if (problem.lse == nullptr) {
    sums = sums_of(geometry, sequences, inputs, queue);
    problem.lse = static_cast<const float*>(sums.get());
    problem.lse_factor = 1.0f;
  }
  run_alone(problem, queue);
}

void pool_there(PoolScoresProblem problem, const std::vector<int64_t>& starts,
                const std::vector<int64_t>& blocks, Queue& queue) {
  UploadBlock block;
  const size_t first_keys = block.add(starts);
  const size_t first_blocks = block.add(blocks);
  const Uploaded lists(queue, block);
  problem.num_blocks = blocks.back();
  problem.num_keys = starts.back();
  problem.starts = lists.at<int64_t>(first_keys);
  problem.blocks = lists.at<int64_t>(first_blocks);
  run_alone(problem, queue);
}

}  // namespace effinfer::ops
