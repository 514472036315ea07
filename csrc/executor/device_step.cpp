#include "executor/device_step.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/memory.h"
#include "effinfer/error.h"
#include "ops/top_list.h"

namespace effinfer::executor {
namespace {

constexpr size_t kAlignment = 16;  // of arrays in the block

size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

template <class T>
size_t bytes_of(size_t count) {
  return aligned(count * sizeof(T));
}

// Of the largest step.
size_t image_bytes(const BatchLimits& limits, std::span<const AttentionBuffers> attention) {
  const auto tokens = static_cast<size_t>(limits.max_tokens);
  const auto sequences = static_cast<size_t>(limits.max_sequences);
  const size_t pages = KvCache::pages_for(static_cast<size_t>(limits.max_seq_len));
  size_t bytes = 2 * bytes_of<int32_t>(tokens) + bytes_of<uint64_t>(tokens) +
                 bytes_of<int32_t>(static_cast<size_t>(limits.max_rows)) +
                 4 * bytes_of<int32_t>(sequences + 1) + bytes_of<int32_t>(sequences * pages);
  for (const AttentionBuffers& buffers : attention) {
    bytes += bytes_of<ops::AttentionTile>(buffers.work.tiles.capacity()) +
             bytes_of<ops::AttentionItem>(buffers.work.items.capacity()) +
             bytes_of<ops::AttentionMerge>(buffers.work.merges.capacity());
  }
  return bytes;
}

// What is asked for most; run_top() refuses more.
ops::TopRowsProblem largest_top(const BatchLimits& limits) {
  ops::TopRowsProblem problem;
  problem.rows = limits.max_rows;
  problem.cols = limits.vocab_size;
  problem.k = static_cast<int32_t>(std::min<int64_t>(limits.vocab_size, ops::kMaxTop));
  return problem;
}

}  // namespace

class DeviceStep::Packer {
 public:
  Packer(std::vector<std::byte>& image, std::byte* block) : image_(image), block_(block) {}

  template <class T>
  std::span<const T> add(std::span<const T> values) {
    std::byte* there = block_ + used_;
    if (used_ + aligned(values.size_bytes()) > image_.size()) {
      throw InternalError("[run] the step's arrays are larger than their block");
    }
    if (!values.empty()) std::memcpy(image_.data() + used_, values.data(), values.size_bytes());
    used_ += aligned(values.size_bytes());
    return {reinterpret_cast<const T*>(there), values.size()};
  }
  template <class T>
  const T* add(const std::vector<T>& values) {
    return add(std::span<const T>(values)).data();
  }
  size_t used() const { return used_; }

 private:
  std::vector<std::byte>& image_;
  std::byte* const block_;
  size_t used_ = 0;
};

DeviceStep::DeviceStep(const Shared& shared, const BatchLimits& limits,
                       std::span<const AttentionBuffers> attention, size_t partials,
                       size_t partial_floats)
    : queue_(make_queue(shared.target.device)),
      top_rows_(ops::table<ops::TopRowsProblem>().select(largest_top(limits), shared.target)),
      image_(image_bytes(limits, attention)),
      max_rows_(limits.max_rows),
      vocab_size_(limits.vocab_size) {
  const auto allocate = [&](size_t bytes, Pages pages, const char* what) {
    std::shared_ptr<void> memory = shared.memory->allocate(bytes, pages);
    if (memory) return memory;
    throw OutOfMemory("[compile] no memory on " + name(shared.target.device) + " for " + what +
                      " of " + std::to_string(bytes) + " bytes");
  };
  size_t merges = 0;
  for (const AttentionBuffers& buffers : attention) {
    merges = std::max(merges, buffers.counters.size());
  }
  block_ = allocate(image_.size(), Pages::heap, "a step's arrays");
  logits_ = allocate(static_cast<size_t>(limits.max_rows * limits.vocab_size) * sizeof(float),
                     Pages::heap, "logits");
  const auto most_top = static_cast<size_t>(max_rows_) * ops::kMaxTop;
  top_ = allocate(most_top * (sizeof(float) + sizeof(int32_t)), Pages::heap, "highest logits");
  partial_out_ = allocate(partial_floats * sizeof(float), Pages::heap, "partial results");
  partial_ms_ = allocate(partials * 2 * sizeof(float), Pages::heap, "partial results");
  done_ = allocate(merges * sizeof(int32_t), Pages::huge, "counters");
  attention_.resize(attention.size());
}

void DeviceStep::pack(const Step& step, std::span<const AttentionBuffers> attention) {
  Packer packer(image_, static_cast<std::byte*>(block_.get()));
  const Batch& batch = *step.batch;
  batch_ = batch;
  batch_.token_ids = packer.add(batch.token_ids);
  batch_.positions = packer.add(batch.positions);
  batch_.logit_rows = packer.add(batch.logit_rows);
  step_ = step;
  step_.batch = &batch_;
  step_.logits = static_cast<float*>(logits_.get());
  ops::BatchLayout& layout = step_.layout;
  layout.qo_indptr = packer.add(batch.qo_indptr).data();
  layout.kv_indptr = packer.add(batch.kv_indptr).data();
  layout.kv_indices = packer.add(batch.kv_indices).data();
  layout.kv_len = packer.add(batch.kv_len).data();
  layout.positions = batch_.positions.data();
  if (!batch.ancestors.empty()) layout.ancestors = packer.add(batch.ancestors).data();
  if (!batch.tree_start.empty()) layout.tree_start = packer.add(batch.tree_start).data();
  for (size_t slot = 0; slot < attention.size(); ++slot) {
    const ops::AttentionWork& work = attention[slot].work;
    AttentionBuffers& there = attention_[slot];
    there.view = work;
    there.view.spans = nullptr;
    there.view.tiles = packer.add(work.tiles);
    there.view.items = packer.add(work.items);
    there.view.merges = packer.add(work.merges);
    there.done = static_cast<int32_t*>(done_.get());
    there.partial_out = static_cast<float*>(partial_out_.get());
    there.partial_ms = static_cast<float*>(partial_ms_.get());
  }
  step_.attention = attention_;
  queue_->upload(block_.get(), image_.data(), packer.used());
}

void DeviceStep::launch(const Program& program, const Step& step,
                        std::span<const AttentionBuffers> attention) {
  pack(step, attention);
  for (const std::unique_ptr<Call>& call : program.calls) {
    if (call->prepare(step_)) call->launch(*queue_);
  }
}

void DeviceStep::read(std::span<float> logits) {
  queue_->download(logits.data(), logits_.get(), logits.size_bytes());
  queue_->wait();
}

void DeviceStep::read_top(int64_t rows, const TopLogits& top) {
  auto* values = static_cast<float*>(top_.get());
  ops::TopRowsProblem problem;
  problem.x = static_cast<const float*>(logits_.get());
  problem.rows = rows;
  problem.cols = vocab_size_;
  problem.k = top.k;
  problem.values = values;
  problem.indices = reinterpret_cast<int32_t*>(values + max_rows_ * ops::kMaxTop);
  top_rows_.launch(problem, *queue_);
  queue_->download(top.values.data(), problem.values, top.values.size_bytes());
  queue_->download(top.tokens.data(), problem.indices, top.tokens.size_bytes());
  queue_->wait();
}

}  // namespace effinfer::executor
