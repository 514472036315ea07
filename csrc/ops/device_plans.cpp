#include "ops/device_plans.h"

#include <cstddef>
#include <cstring>

namespace effinfer::ops {
namespace {

// Arrays one after the other in a block that is uploaded at once.
class Block {
 public:
  template <class T>
  size_t add(const T* values, int64_t count) {
    const size_t place = reserve<T>(count);
    if (count > 0)
      std::memcpy(bytes_.data() + place, values, static_cast<size_t>(count) * sizeof(T));
    return place;
  }
  template <class T>
  size_t add(const std::vector<T>& values) {
    return add(values.data(), static_cast<int64_t>(values.size()));
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  template <class T>
  size_t reserve(int64_t count) {
    constexpr size_t kAlignment = 256;
    const size_t place = (bytes_.size() + kAlignment - 1) / kAlignment * kAlignment;
    bytes_.resize(place + static_cast<size_t>(count) * sizeof(T));
    return place;
  }
  std::vector<std::byte> bytes_;
};

AttentionWork plan_of(const AttentionProblem& p, const BatchLayout& batch) {
  AttentionShape shape;
  shape.source = p.source;
  shape.num_qo_heads = p.num_qo_heads;
  shape.num_kv_heads = p.num_kv_heads;
  shape.head_dim = p.v.dims;
  shape.causal = p.causal;
  shape.window_left = p.window_left;
  shape.sink_tokens = p.sink_tokens;
  shape.most_rows = kGpuTileRows;
  shape.shares = kGpuShares;
  shape.most_partials = kGpuPartials;
  AttentionWork work;
  plan_attention(shape, batch, work);
  return work;
}

}  // namespace

void DevicePlans::place(AttentionProblem& problem, const PlanLists& lists, Queue& queue) {
  const std::lock_guard lock(mutex_);
  const Placed* found = nullptr;
  for (const Placed& each : placed_) {
    if (each.device == queue.device() && each.stream == queue.stream()) found = &each;
  }
  if (found == nullptr) found = &placed_.emplace_back(placed(problem, lists, queue));
  problem.batch = found->problem.batch;
  problem.work = found->problem.work;
  problem.mask = found->problem.mask;
  problem.mask_starts = found->problem.mask_starts;
  problem.mask_row_strides = found->problem.mask_row_strides;
  problem.partial_out = found->problem.partial_out;
  problem.partial_ms = found->problem.partial_ms;
  problem.done = found->problem.done;
}

DevicePlans::Placed DevicePlans::placed(const AttentionProblem& problem, const PlanLists& lists,
                                        Queue& queue) {
  const AttentionWork work = plan_of(problem, lists.batch);
  const BatchLayout& batch = lists.batch;
  Block block;
  const size_t tiles = block.add(work.tiles);
  const size_t items = block.add(work.items);
  const size_t merges = block.add(work.merges);
  const size_t qo_indptr = block.add(batch.qo_indptr, batch.num_sequences + 1);
  const size_t kv_indptr = block.add(batch.kv_indptr, batch.num_sequences + 1);
  const size_t kv_indices = block.add(batch.kv_indices, lists.num_listed);
  const size_t kv_len = block.add(batch.kv_len, batch.num_sequences);
  const size_t mask = block.add(*lists.mask);
  const size_t mask_starts = block.add(*lists.mask_starts);
  const size_t mask_row_strides = block.add(*lists.mask_row_strides);
  const size_t done = block.add(std::vector<int32_t>(work.merges.size()));
  block.add(std::vector<std::byte>(1));
  const size_t uploaded = block.bytes().size();
  const size_t partials = (uploaded + 255) / 256 * 256;
  const auto count = static_cast<size_t>(work.num_partials);
  const size_t width = static_cast<size_t>((problem.v.dims + 15) / 16 * 16);
  Placed out;
  out.device = queue.device();
  out.stream = queue.stream();
  out.memory = queue.allocate(partials + count * (width + 2) * sizeof(float));
  queue.upload(out.memory.get(), block.bytes().data(), uploaded);
  auto* const first = static_cast<std::byte*>(out.memory.get());
  const auto at = [&]<class T>(size_t place, T*) { return reinterpret_cast<T*>(first + place); };
  AttentionProblem& p = out.problem;
  p.work = work;
  p.work.spans = nullptr;
  p.work.tiles = at(tiles, static_cast<AttentionTile*>(nullptr));
  p.work.items = at(items, static_cast<AttentionItem*>(nullptr));
  p.work.merges = at(merges, static_cast<AttentionMerge*>(nullptr));
  constexpr int32_t* kInts = nullptr;
  p.batch = batch;
  p.batch.qo_indptr = at(qo_indptr, kInts);
  p.batch.kv_indptr = at(kv_indptr, kInts);
  if (batch.kv_indices != nullptr) p.batch.kv_indices = at(kv_indices, kInts);
  p.batch.kv_len = at(kv_len, kInts);
  if (!lists.mask_starts->empty()) {
    p.mask = at(mask, static_cast<uint8_t*>(nullptr));
    p.mask_starts = at(mask_starts, static_cast<int64_t*>(nullptr));
    p.mask_row_strides = at(mask_row_strides, static_cast<int64_t*>(nullptr));
  }
  p.done = at(done, kInts);
  p.partial_out = at(partials, static_cast<float*>(nullptr));
  p.partial_ms = p.partial_out + count * width;
  return out;
}

}  // namespace effinfer::ops
