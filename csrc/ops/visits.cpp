#include "ops/visits.h"

#include <algorithm>
#include <bit>
#include <string>

#include "core/memory.h"
#include "effinfer/error.h"
#include "ops/paged_batch.h"

namespace effinfer::ops {

VisitBuffers::VisitBuffers(const VisitShape& shape, int64_t max_tokens, int64_t max_sequences,
                           int64_t max_kv_len)
    : shape_(shape), list_words_((max_kv_len + kPageSize - 1) / kPageSize) {
  const int64_t sequences =
      shape.blocks ? std::min(max_tokens / kSparseRows, max_sequences) : int64_t{0};
  // A last one of each is short.
  max_blocks_ = shape.blocks ? max_tokens / kVisitBlockRows + sequences : 0;
  const int64_t rows = shape.rows ? std::min(max_tokens, max_sequences * kSparseRows) : 0;
  const int64_t blocks = max_blocks_ + rows;
  blocks_.resize(static_cast<size_t>(blocks));
  sequences_.resize(static_cast<size_t>(sequences));
  first_block_.resize(static_cast<size_t>(max_sequences));
  words_.resize(static_cast<size_t>(blocks * shape.num_kv_heads * list_words_));
  chosen_.resize(static_cast<size_t>(sequences * shape.num_qo_heads * 2 * list_words_));
  done_.resize(static_cast<size_t>(sequences * shape.num_kv_heads));
  if (shape.weights()) reserve_weights(blocks * shape.num_kv_heads);
}

void VisitBuffers::reserve_weights(int64_t lists) {
  weighted_.resize(static_cast<size_t>(lists));
  const int64_t slots = lists * list_words_ * kPageSize;
  if (slots == 0) return;
  const size_t bytes = static_cast<size_t>(slots) * sizeof(float);
  log_weights_ = std::static_pointer_cast<float>(memory_of(Device{}).allocate(bytes, Pages::lazy));
  if (log_weights_ == nullptr) {
    throw OutOfMemory("[visits] no memory for " + std::to_string(bytes) + " bytes of weights");
  }
}

VisitPlan VisitBuffers::largest() const {
  VisitPlan plan;
  plan.num_blocks = max_blocks_;
  plan.num_rows = static_cast<int64_t>(blocks_.size()) - max_blocks_;
  plan.num_sequences = static_cast<int64_t>(sequences_.size());
  plan.num_kv_heads = shape_.num_kv_heads;
  plan.num_qo_heads = shape_.num_qo_heads;
  plan.list_words = list_words_;
  plan.weighs_blocks = shape_.block_weights;
  plan.weighs_rows = shape_.row_weights;
  return plan;
}

void VisitBuffers::add_blocks(const BatchLayout& batch, VisitPlan& plan) {
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const int32_t begin = batch.qo_indptr[s];
    const int32_t end = batch.qo_indptr[s + 1];
    if (has_row_lists(batch, s) || batch.is_dense(s)) continue;
    first_block_[static_cast<size_t>(s)] = static_cast<int32_t>(plan.num_blocks);
    VisitSequence& sequence = sequences_[static_cast<size_t>(plan.num_sequences++)];
    sequence = {static_cast<int32_t>(s), static_cast<int32_t>(plan.num_blocks), 0};
    for (int32_t row = begin; row < end; row += kVisitBlockRows) {
      blocks_[static_cast<size_t>(plan.num_blocks++)] = {static_cast<int32_t>(s), row,
                                                         std::min(kVisitBlockRows, end - row),
                                                         batch.kv_len[s] - (end - row)};
      ++sequence.num_blocks;
    }
  }
}

void VisitBuffers::add_rows(const BatchLayout& batch, VisitPlan& plan) {
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const int32_t begin = batch.qo_indptr[s];
    if (!has_row_lists(batch, s) || batch.is_dense(s)) continue;
    first_block_[static_cast<size_t>(s)] = static_cast<int32_t>(plan.num_blocks + plan.num_rows);
    const bool tree = batch.is_tree(s);
    for (int32_t row = begin; row < batch.qo_indptr[s + 1]; ++row) {
      const int32_t position = tree ? batch.tree_begin(s) + std::popcount(batch.ancestors[row]) - 1
                                    : batch.step_begin(s) + row - begin;
      blocks_[static_cast<size_t>(plan.num_blocks + plan.num_rows++)] = {static_cast<int32_t>(s),
                                                                         row, 1, position};
    }
  }
}

VisitPlan VisitBuffers::plan(const BatchLayout& batch) {
  VisitPlan plan;
  std::fill_n(first_block_.begin(), batch.num_sequences, -1);
  if (shape_.blocks) add_blocks(batch, plan);
  if (shape_.rows) add_rows(batch, plan);
  plan.blocks = blocks_.data();
  plan.sequences = sequences_.data();
  plan.first_block = first_block_.data();
  plan.num_kv_heads = shape_.num_kv_heads;
  plan.num_qo_heads = shape_.num_qo_heads;
  plan.list_words = list_words_;
  plan.words = words_.data();
  plan.chosen = chosen_.data();
  plan.done = done_.data();
  if (shape_.weights()) {
    plan.log_weights = log_weights_.get();
    plan.weighted = weighted_.data();
    plan.weighs_blocks = shape_.block_weights;
    plan.weighs_rows = shape_.row_weights;
    const int64_t lists = (plan.num_blocks + plan.num_rows) * plan.num_kv_heads;
    std::fill_n(weighted_.begin(), lists, uint8_t{0});
  }
  return plan;
}

struct Visits::Impl {
  std::vector<int32_t> qo_indptr;
  std::vector<int32_t> kv_len;
  VisitBuffers buffers;
  VisitPlan plan;
};

Visits::Visits(const PagedBatch& batch, int32_t num_qo_heads, int32_t num_kv_heads, bool generated,
               bool weighted) {
  const Validator check("visits");
  const BatchLayout layout = check_sequences(check, batch);
  check.positive("num_kv_heads", num_kv_heads);
  check.expect(num_qo_heads > 0 && num_qo_heads % num_kv_heads == 0, "num_qo_heads",
               "a multiple of " + std::to_string(num_kv_heads), std::to_string(num_qo_heads));
  const int64_t sequences = layout.num_sequences;
  impl_ = std::make_unique<Impl>();
  impl_->qo_indptr.assign(layout.qo_indptr, layout.qo_indptr + sequences + 1);
  impl_->kv_len.assign(layout.kv_len, layout.kv_len + sequences);
  const int32_t longest =
      sequences == 0 ? 0 : *std::max_element(impl_->kv_len.begin(), impl_->kv_len.end());
  VisitShape shape = {num_qo_heads, num_kv_heads};
  shape.rows = generated;
  shape.block_weights = shape.row_weights = weighted;
  impl_->buffers = VisitBuffers(shape, layout.num_tokens, sequences, longest);
  impl_->plan = impl_->buffers.plan(layout);
  if (weighted) std::fill_n(impl_->plan.weighted, num_blocks() * num_kv_heads, uint8_t{1});
}
Visits::~Visits() = default;
Visits::Visits(Visits&&) noexcept = default;
Visits& Visits::operator=(Visits&&) noexcept = default;

std::vector<int32_t> Visits::blocks() const {
  std::vector<int32_t> out;
  for (int64_t i = 0; i < num_blocks(); ++i) {
    const VisitBlock& block = impl_->plan.blocks[i];
    out.insert(out.end(), {block.sequence, block.first_row, block.num_rows, block.position});
  }
  return out;
}
int64_t Visits::num_blocks() const {
  return impl_->plan.num_blocks + impl_->plan.num_rows;
}
int32_t Visits::num_kv_heads() const {
  return impl_->plan.num_kv_heads;
}
int64_t Visits::list_words() const {
  return impl_->plan.list_words;
}
uint64_t* Visits::words() {
  return impl_->plan.words;
}
float* Visits::log_weights() {
  return impl_->plan.log_weights;
}

void check_counts(const Validator& check, const VisitOptions& options) {
  check.at_least("sink_tokens", options.sink_tokens, 0);
  check.at_least("local_tokens", options.local_tokens, 0);
  check.at_least("min_tokens", options.min_tokens, 0);
}

const VisitPlan& plan_of(const Visits& visits, std::string_view op, const BatchLayout& batch,
                         int32_t num_qo_heads, int32_t num_kv_heads) {
  const Visits::Impl& of = visits.impl();
  const bool same = batch.num_sequences == static_cast<int64_t>(of.kv_len.size()) &&
                    std::equal(of.kv_len.begin(), of.kv_len.end(), batch.kv_len) &&
                    std::equal(of.qo_indptr.begin(), of.qo_indptr.end(), batch.qo_indptr) &&
                    of.plan.num_qo_heads == num_qo_heads && of.plan.num_kv_heads == num_kv_heads;
  Validator(op).expect(same, "visits", "lists of this batch and these heads", "those of another");
  return of.plan;
}

}  // namespace effinfer::ops
