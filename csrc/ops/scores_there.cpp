// Scores of keys on GPUs: lists are uploaded, and rows whose sums nobody has told are asked of the
// attention of a GPU first.
#include "ops/scores_there.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "ops/attention.h"
#include "ops/device_plans.h"
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

std::vector<ScoreItem> items_of(const AttentionScoresProblem& p) {
  std::vector<ScoreItem> items;
  for (int32_t s = 0; s < p.batch.num_sequences; ++s) {
    if (p.batch.qo_indptr[s] == p.batch.qo_indptr[s + 1]) continue;
    const int32_t units = (p.batch.kv_len[s] + kUnitTokens - 1) / kUnitTokens;
    for (int32_t head = 0; head < p.num_kv_heads; ++head) {
      for (int32_t unit = 0; unit < units; unit += kChunkUnits) {
        items.push_back({s, head, unit, std::min(unit + kChunkUnits, units), 0});
      }
    }
  }
  return items;
}

// Natural logarithms of the rows' sums, in the queue's order: attention without values.
std::shared_ptr<void> sums_of(const AttentionScoresProblem& given, int64_t num_listed,
                              Queue& queue) {
  const auto numbers = static_cast<size_t>(given.batch.num_tokens * given.num_qo_heads);
  std::shared_ptr<void> sums = queue.allocate(std::max<size_t>(1, numbers * sizeof(float)));
  AttentionProblem p;
  static_cast<AttentionLogits&>(p) = given;
  p.v = given.k;
  p.v.dims = 0;
  p.v.scales = nullptr;
  p.out = static_cast<uint8_t*>(sums.get());  // of no dims
  p.lse = static_cast<float*>(sums.get());
  // Nobody knows here what rows at positions of their own see.
  const bool follow = given.positions == nullptr;
  const AttentionShape shape = {KeySource::rows,        given.num_qo_heads,
                                given.num_kv_heads,     p.v.dims,
                                follow && given.causal, follow ? given.window_left : -1};
  const std::vector<uint8_t> no_mask;
  const std::vector<int64_t> no_bits;
  DevicePlans plans;
  plans.place(p, shape, {given.batch, num_listed, &no_mask, &no_bits, &no_bits}, queue);
  run_alone(p, queue);
  return sums;
}

}  // namespace

void score_there(AttentionScoresProblem problem, int64_t num_listed,
                 const std::vector<ScoreRows>& rows, Queue& queue) {
  const std::vector<ScoreItem> items = items_of(problem);
  if (items.empty()) return;
  problem.num_items = static_cast<int64_t>(items.size());
  // Before anything is put into the queue for a problem that no kernel takes.
  table<AttentionScoresProblem>().select(problem, current_target(queue.device()));
  std::shared_ptr<void> sums;
  if (problem.lse == nullptr) {
    sums = sums_of(problem, num_listed, queue);
    problem.lse = static_cast<const float*>(sums.get());
    problem.lse_factor = 1.0f;
  }
  const BatchLayout batch = problem.batch;
  const auto count = static_cast<size_t>(batch.num_sequences);
  const auto listed = static_cast<size_t>(num_listed);
  UploadBlock block;
  const size_t item_list = block.add(items);
  const size_t row_list = block.add(rows);
  const size_t qo_indptr = block.add(batch.qo_indptr, count + 1, count + 1);
  const size_t kv_indptr = block.add(batch.kv_indptr, count + 1, count + 1);
  const size_t kv_len = block.add(batch.kv_len, count, count);
  const size_t kv_indices = block.add(batch.kv_indices, listed, listed);
  const Uploaded lists(queue, block);
  problem.items = lists.at<ScoreItem>(item_list);
  problem.rows = lists.at<ScoreRows>(row_list);
  problem.batch.qo_indptr = lists.at<int32_t>(qo_indptr);
  problem.batch.kv_indptr = lists.at<int32_t>(kv_indptr);
  problem.batch.kv_len = lists.at<int32_t>(kv_len);
  if (batch.kv_indices != nullptr) problem.batch.kv_indices = lists.at<int32_t>(kv_indices);
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
