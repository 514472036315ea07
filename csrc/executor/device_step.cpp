#include "executor/device_step.h"

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "core/memory.h"
#include "effinfer/error.h"
#include "ops/sampling_scratch.h"
#include "ops/top_list.h"

namespace effinfer::executor {
namespace {

// Steps of more tokens are not recorded: they take longer than launching them.
constexpr int64_t kMostShared = 256;

// In place of a number of logits in the key of a recording that draws tokens.
constexpr int32_t kDraws = -1;

// What a number of rows is rounded up to: products of matrices take eight at a time.
size_t shared_rows(size_t count) {
  return count <= 8 ? std::bit_ceil(count) : (count + 7) / 8 * 8;
}

template <class T>
size_t bytes_of(size_t count) {
  return packed_bytes(count * sizeof(T));
}

size_t draw_bytes(size_t rows) {
  return 3 * bytes_of<float>(rows) + 3 * bytes_of<uint64_t>(rows);
}

// Of the largest step.
size_t image_bytes(const Shared& shared, const BatchLimits& limits,
                   std::span<const AttentionBuffers> attention,
                   std::span<const ops::VisitPlan> visits) {
  const auto tokens = static_cast<size_t>(limits.max_tokens);
  const auto sequences = static_cast<size_t>(limits.max_sequences);
  const size_t pages = KvCache::pages_for(static_cast<size_t>(limits.max_seq_len));
  size_t bytes = 2 * bytes_of<int32_t>(tokens) + bytes_of<uint64_t>(tokens) +
                 bytes_of<int32_t>(static_cast<size_t>(limits.max_rows)) +
                 4 * bytes_of<int32_t>(sequences + 1) + bytes_of<int32_t>(sequences * pages) +
                 bytes_of<uint8_t>(sequences) + bytes_of<int32_t>(StepCoding::most_pages(limits)) +
                 draw_bytes(static_cast<size_t>(limits.max_rows)) +
                 bytes_of<ops::SlotWeights>(shared.weight_names.size() * sequences);
  for (size_t group = 1; group < limits.cache.groups.size(); ++group) {
    bytes += 3 * bytes_of<int32_t>(sequences + 1) + bytes_of<int32_t>(sequences * pages);
  }
  for (const ops::VisitPlan& plan : visits) {
    const int64_t blocks = plan.num_blocks + (plan.num_rows > 0 ? limits.max_tokens : 0);
    bytes += bytes_of<ops::VisitBlock>(static_cast<size_t>(blocks)) +
             bytes_of<ops::VisitSequence>(static_cast<size_t>(plan.num_sequences)) +
             bytes_of<int32_t>(sequences);
  }
  for (const AttentionBuffers& buffers : attention) {
    bytes += bytes_of<ops::AttentionTile>(buffers.work.tiles.capacity()) +
             bytes_of<ops::AttentionItem>(buffers.work.items.capacity()) +
             bytes_of<ops::AttentionMerge>(buffers.work.merges.capacity()) +
             bytes_of<ops::ArrangedPage>(buffers.work.arranged.capacity());
  }
  return bytes;
}

ops::RowSamplingProblem largest_draw(const BatchLimits& limits) {
  ops::RowSamplingProblem problem;
  problem.rows = limits.max_rows;
  problem.vocab = limits.vocab_size;
  return problem;
}

size_t draw_scratch_bytes(const BatchLimits& limits) {
  const auto scratch = ops::SamplingScratch::of(limits.vocab_size);
  return static_cast<size_t>(limits.max_rows * scratch.bytes());
}

// Throws OutOfMemory.
std::shared_ptr<void> take(const Shared& shared, size_t bytes, Pages pages, const char* what,
                           const char* while_in = "[compile]") {
  std::shared_ptr<void> memory = shared.memory->allocate(bytes, pages);
  if (memory) return memory;
  throw OutOfMemory(std::string(while_in) + " no memory on " + name(shared.target.device) +
                    " for " + what + " of " + std::to_string(bytes) + " bytes");
}

// What is asked for most; run_top() refuses more.
ops::TopRowsProblem largest_top(const BatchLimits& limits) {
  ops::TopRowsProblem problem;
  problem.rows = limits.max_rows;
  problem.cols = std::max<int64_t>(limits.vocab_size, 1);  // 0: there are no logits
  problem.k = static_cast<int32_t>(std::min<int64_t>(problem.cols, ops::kMaxTop));
  return problem;
}

}  // namespace

DeviceStep::DeviceStep(const Shared& shared, const BatchLimits& limits,
                       std::span<const AttentionBuffers> attention,
                       std::span<const ops::VisitPlan> visits, size_t partials,
                       size_t partial_floats, size_t arranged_bytes)
    : shared_(shared),
      limits_(limits),
      queue_(make_queue(shared.target.device)),
      top_rows_(ops::table<ops::TopRowsProblem>().select(largest_top(limits), shared.target)),
      draw_rows_(limits.vocab_size == 0 ? nullptr
                                        : ops::table<ops::RowSamplingProblem>().find(
                                              largest_draw(limits), shared.target)),
      image_bytes_(image_bytes(shared, limits, attention, visits)),
      lists_([&shared](size_t bytes, const char* what) {
        return take(shared, bytes, Pages::heap, what);
      }),
      weights_(shared.weight_names.size(),
               [&shared](size_t bytes, const char* what) {
                 return take(shared, bytes, Pages::heap, what, "[run]");
               }),
      coding_([&shared](size_t bytes, const char* what) {
        return take(shared, bytes, Pages::heap, what, "[run]");
      }) {
  const Device device = shared.target.device;
  const auto allocate = [&](size_t bytes, Pages pages, const char* what) {
    return take(shared, bytes, pages, what);
  };
  size_t merges = 1;  // or what items of prompts are shared by
  for (const AttentionBuffers& buffers : attention) {
    merges = std::max(merges, buffers.counters.size());
  }
  const Backend& backend = *cuda_backend();
  const size_t top_bytes =
      static_cast<size_t>(limits.max_rows) * ops::kMaxTop * (sizeof(float) + sizeof(int32_t));
  image_ = backend.pinned(device.index, image_bytes_);
  top_image_ = backend.pinned(device.index, top_bytes);
  block_ = allocate(image_bytes_, Pages::heap, "a step's arrays");
  logits_ = allocate(static_cast<size_t>(limits.max_rows * limits.vocab_size) * sizeof(float),
                     Pages::heap, "logits");
  top_ = allocate(top_bytes, Pages::heap, "highest logits");
  partial_out_ = allocate(partial_floats * sizeof(float), Pages::heap, "partial results");
  partial_ms_ = allocate(partials * 2 * sizeof(float), Pages::heap, "partial results");
  if (draw_rows_ != nullptr) {
    draw_scratch_ = allocate(draw_scratch_bytes(limits), Pages::heap, "draws");
  }
  arranged_ = allocate(arranged_bytes, Pages::heap, "re-arranged pages");
  done_ = allocate(merges * sizeof(int32_t), Pages::huge, "counters");
  attention_.resize(attention.size());
  for (size_t slot = 0; slot < visits.size(); ++slot) {
    visits_.push_back(lists_.add(visits[slot], shared.visit_shapes[slot]));
  }
}

// The arrays that differ in length between steps of one recording come last.
void DeviceStep::pack(const Step& step, std::span<const AttentionBuffers> attention,
                      std::span<const RowDraw> draws, bool shared) {
  StepPacker packer(image_.get(), image_bytes_, static_cast<std::byte*>(block_.get()));
  const Batch& batch = *step.batch;
  const auto rounded = [&](size_t count, int64_t most) {
    return shared ? std::min(shared_rows(count), static_cast<size_t>(most)) : count;
  };
  const size_t tokens = rounded(batch.token_ids.size(), limits_.max_tokens);
  const size_t rows = rounded(batch.logit_rows.size(), limits_.max_rows);
  const size_t sequences = rounded(batch.kv_len.size(), limits_.max_sequences);
  batch_ = batch;
  batch_.token_ids = packer.add(batch.token_ids, tokens, 0);
  batch_.positions = packer.add(batch.positions, tokens, 0);
  batch_.logit_rows = packer.add(batch.logit_rows, rows, 0);
  step_ = step;
  step_.batch = &batch_;
  step_.logits = static_cast<float*>(logits_.get());
  ops::BatchLayout& layout = step_.layout;
  layout.num_tokens = static_cast<int64_t>(tokens);
  layout.num_sequences = static_cast<int64_t>(sequences);
  layout.qo_indptr = packer.add(batch.qo_indptr, sequences + 1, batch.qo_indptr.back()).data();
  layout.kv_indptr = packer.add(batch.kv_indptr, sequences + 1, batch.kv_indptr.back()).data();
  layout.kv_len = packer.add(batch.kv_len, sequences, 0).data();
  layout.positions = batch_.positions.data();
  if (!batch.ancestors.empty()) {
    layout.ancestors = packer.add(batch.ancestors, tokens, uint64_t{0}).data();
  }
  if (!batch.tree_start.empty()) {
    layout.tree_start = packer.add(batch.tree_start, sequences, 0).data();
  }
  layout.dense = nullptr;  // the plans know
  if (!batch.unchunked.empty()) {
    layout.unchunked = packer.add(batch.unchunked, sequences, uint8_t{0}).data();
  }
  const std::span<const ops::SlotWeights> weighted = weights_.upload(step, sequences, *queue_);
  step_.weighted = packer.add(weighted, weighted.size(), {}).data();
  pack_groups(packer, batch, sequences);
  for (size_t slot = 0; slot < attention.size(); ++slot) {
    pack_attention(packer, attention, slot, shared);
  }
  step_.attention = attention_;
  for (size_t slot = 0; slot < visits_.size(); ++slot) {
    pack_visits(packer, step.visits[slot], visits_[slot], shared);
  }
  step_.visits = visits_;
  if (!draws.empty()) pack_draws(packer, draws, rows);
  pack_pages(packer, batch, shared);
  queue_->upload(block_.get(), image_.get(), packer.used());
  upload_inputs(batch);
  upload_scored(batch.scored);
}

void DeviceStep::pack_groups(StepPacker& packer, const Batch& batch, size_t sequences) {
  groups_.clear();
  if (step_.groups.empty()) return;
  groups_.assign(step_.groups.size(), step_.layout);
  for (size_t group = 1; group < groups_.size(); ++group) {
    const KvTables& tables = batch.more_groups[group - 1];
    ops::BatchLayout& layout = groups_[group];
    layout.kv_indptr = packer.add(tables.kv_indptr, sequences + 1, tables.kv_indptr.back()).data();
    layout.kv_len = packer.add(tables.kv_len, sequences, 0).data();
    layout.tree_start = nullptr;
    if (!tables.tree_start.empty()) {
      layout.tree_start = packer.add(tables.tree_start, sequences, 0).data();
    }
  }
  step_.groups = groups_;
}

// Those of groups all of whose layers are on another device are left out.
void DeviceStep::pack_pages(StepPacker& packer, const Batch& batch, bool shared) {
  const size_t most = KvCache::pages_for(static_cast<size_t>(limits_.max_seq_len)) *
                      static_cast<size_t>(limits_.max_sequences);
  const auto add = [&](std::span<const int32_t> pages, bool is_last) {
    const size_t rounded = std::max(pages.size(), std::min(std::bit_ceil(pages.size()), most));
    return packer.add(pages, shared && !is_last ? rounded : pages.size(), 0).data();
  };
  const auto of_group = [&](size_t group, std::span<const int32_t> pages) {
    const auto has = [&](int32_t layer) {
      return groups_.empty() || step_.group_of_layer[static_cast<size_t>(layer)] == group;
    };
    return std::ranges::any_of(limits_.layers, has) ? pages : std::span<const int32_t>();
  };
  step_.layout.kv_indices =
      add(pack_coded(packer, of_group(0, batch.kv_indices), shared), groups_.empty());
  for (size_t group = 0; group < groups_.size(); ++group) {
    const bool is_last = group + 1 == groups_.size();
    groups_[group].kv_indices =
        group == 0 ? step_.layout.kv_indices
                   : add(of_group(group, batch.more_groups[group - 1].kv_indices), is_last);
  }
}

// Rows that rounding adds keep what they had.
void DeviceStep::upload_inputs(const Batch& batch) {
  num_tokens_ = static_cast<int64_t>(batch.token_ids.size());
  num_rows_ = static_cast<int64_t>(batch.logit_rows.size());
  for (const InputBuffer& input : shared_.inputs) {
    const auto bytes = static_cast<size_t>(num_tokens_ * input.cols) * sizeof(float);
    queue_->upload(input.memory.get(), input.staged.get(), bytes);
  }
}

void DeviceStep::download_outputs() {
  for (const OutputBuffer& output : shared_.outputs) {
    const int64_t rows = output.rows.kind == Dim::Kind::rows ? num_rows_ : num_tokens_;
    const auto bytes = static_cast<size_t>(rows * output.cols) * sizeof(float);
    if (bytes > 0) queue_->download(output.staged.get(), output.values, bytes);
  }
}

// In a block of their own, which grows when more requests are scored than ever before.
void DeviceStep::upload_scored(std::span<const ScoredRows> scored) {
  step_.mass_rows = nullptr;
  if (scored.empty()) return;
  if (scored.size() > most_scored_) reserve_scored(2 * scored.size());
  scored_.assign(scored.begin(), scored.end());
  std::ranges::sort(scored_, {}, [](const ScoredRows& s) { return std::pair(s.name, s.sequence); });
  batch_.scored = scored_;
  auto* rows = reinterpret_cast<ops::MassRows*>(scored_image_.get());
  for (const ScoredRows& s : scored_) {
    *rows++ = {s.plane.values, s.plane.stride, s.noise.values, s.noise.stride, s.sequence, s.rows};
  }
  queue_->upload(scored_block_.get(), scored_image_.get(), scored_.size() * sizeof(ops::MassRows));
  step_.mass_rows = static_cast<const ops::MassRows*>(scored_block_.get());
  step_.mass_sums = static_cast<float*>(mass_sums_.get());
}

// The step before has ended, so that nobody reads the old ones.
void DeviceStep::reserve_scored(size_t most) {
  const auto allocate = [&](size_t bytes) {
    return take(shared_, bytes, Pages::heap, "scored rows", "[run]");
  };
  most_scored_ = 0;
  const size_t bytes = most * sizeof(ops::MassRows);
  const int64_t sums = ops::mass_sums(static_cast<int64_t>(most), step_.kv_layers[0].num_kv_heads,
                                      limits_.max_seq_len);
  scored_image_ = cuda_backend()->pinned(shared_.target.device.index, bytes);
  scored_block_ = allocate(bytes);
  mass_sums_ = allocate(static_cast<size_t>(sums) * sizeof(float));
  most_scored_ = most;
}

std::span<const int32_t> DeviceStep::pack_coded(StepPacker& packer, std::span<const int32_t> pages,
                                                bool shared) {
  step_.decoded = {};
  const auto has_codes = [&](int32_t layer) {
    return step_.kv_layers[static_cast<size_t>(layer)].coded.bits != 0;
  };
  const auto coded = std::ranges::find_if(limits_.layers, has_codes);
  if (coded == limits_.layers.end()) return pages;
  coding_.reserve(step_.kv_layers[static_cast<size_t>(*coded)], limits_);
  const std::span<const int32_t> found = coding_.find(pages);
  const std::span<const int32_t> numbers = coding_.numbers();
  if (numbers.empty()) return found;
  const size_t count =
      shared ? std::min(std::bit_ceil(numbers.size()), coding_.room()) : numbers.size();
  step_.decoded = {packer.add(numbers, count, -1).data(), static_cast<int32_t>(count),
                   coding_.keys(), coding_.values()};
  return found;
}

// The greedy token is the highest one.
void DeviceStep::pack_draws(StepPacker& packer, std::span<const RowDraw> draws, size_t rows) {
  drawn_ = largest_draw(limits_);
  drawn_.x = logits_.get();
  drawn_.rows = static_cast<int64_t>(rows);
  const auto set = [&]<class T>(ops::PerRow<T>& to, const auto& element) {
    to.values = packer.add_each<T>(draws, rows, RowDraw{}, element);
  };
  set(drawn_.temperature,
      [](const RowDraw& d) { return d.temperature == 0.0f ? 1.0f : d.temperature; });
  set(drawn_.top_k, [](const RowDraw& d) { return int64_t{d.temperature == 0.0f ? 1 : d.top_k}; });
  set(drawn_.top_p, [](const RowDraw& d) { return d.temperature == 0.0f ? 1.0f : d.top_p; });
  set(drawn_.min_p, [](const RowDraw& d) { return d.temperature == 0.0f ? 0.0f : d.min_p; });
  set(drawn_.random.seed, [](const RowDraw& d) { return d.seed; });
  set(drawn_.random.offset, [](const RowDraw& d) { return d.index; });
  drawn_.scratch = draw_scratch_.get();
  drawn_.samples = static_cast<int32_t*>(top_.get());
  drawn_.statuses = reinterpret_cast<ops::RowStatus*>(drawn_.samples + rows);
  drawn_.undecided = reinterpret_cast<uint8_t*>(drawn_.statuses + rows);
}

// A slot may have the plan of an earlier one (Executable::Impl::planned()).
void DeviceStep::pack_attention(StepPacker& packer, std::span<const AttentionBuffers> all,
                                size_t slot, bool shared) {
  const ops::AttentionWork& work = all[slot].work;
  AttentionBuffers& to = attention_[slot];
  for (size_t other = 0; other < slot && all[slot].view.num_items > 0; ++other) {
    if (all[slot].view.items != all[other].work.items.data()) continue;
    to = attention_[other];
    return;
  }
  const auto rounded = [&](const auto& list) {
    return shared ? std::min(std::bit_ceil(list.size()), list.capacity()) : list.size();
  };
  to.view = work;
  to.view.spans = nullptr;
  to.view.tiles = packer.add(work.tiles, rounded(work.tiles), {});
  const size_t merges = work.merges.empty() ? 0 : rounded(work.merges);
  to.view.merges = packer.add(work.merges, merges, {});
  to.view.num_merges = static_cast<int64_t>(merges);
  const size_t items = rounded(work.items);
  to.view.items = packer.add(work.items, items, {-1, 0, 0, -1, -1});
  to.view.num_items = static_cast<int64_t>(items);
  to.view.arranged = packer.add(work.arranged, work.arranged.size(), {});
  to.arranged = static_cast<uint8_t*>(arranged_.get());
  to.done = static_cast<int32_t*>(done_.get());
  to.partial_out = static_cast<float*>(partial_out_.get());
  to.partial_ms = static_cast<float*>(partial_ms_.get());
}

// Without lists nobody looks at the rest. Rows that the rounding adds are of no sequence; steps
// that are rounded have no blocks.
void DeviceStep::pack_visits(StepPacker& packer, const ops::VisitPlan& from, ops::VisitPlan& to,
                             bool shared) const {
  const auto list_rows = static_cast<size_t>(from.num_rows);
  const size_t rows =
      shared ? std::min(shared_rows(list_rows), static_cast<size_t>(limits_.max_tokens))
             : list_rows;
  to.num_blocks = from.num_blocks;
  to.num_rows = static_cast<int64_t>(from.num_rows == 0 ? 0 : rows);
  to.num_sequences = from.num_sequences;
  if (!from.has_lists()) return;
  const auto add = [&](const auto* values, int64_t count, int64_t padded, const auto& rest) {
    const std::span all(values, static_cast<size_t>(count));
    return packer.add(all, static_cast<size_t>(padded), rest).data();
  };
  const int64_t sequences = step_.layout.num_sequences;
  to.blocks = add(from.blocks, from.num_blocks + from.num_rows, to.num_blocks + to.num_rows,
                  ops::VisitBlock{-1, 0, 0, 0});
  to.sequences = add(from.sequences, from.num_sequences, from.num_sequences, ops::VisitSequence{});
  to.first_block = add(from.first_block, static_cast<int64_t>(batch_.kv_len.size()), sequences, -1);
}

// What problems hold of a step beside addresses that are always the same. Those of the arrays
// follow from each other.
Recordings::Key DeviceStep::key_of(const Program& program, int32_t top_k) const {
  const auto address = [](const void* pointer) { return reinterpret_cast<intptr_t>(pointer); };
  const ops::BatchLayout& layout = step_.layout;
  Recordings::Key key = {address(&program),          top_k,
                         layout.num_tokens,          static_cast<int64_t>(batch_.logit_rows.size()),
                         layout.num_sequences,       address(layout.ancestors),
                         address(layout.tree_start), address(layout.unchunked),
                         address(layout.kv_indices)};
  for (const ops::BatchLayout& group : groups_) {
    key.insert(key.end(), {address(group.tree_start), address(group.kv_indices)});
  }
  for (const AttentionBuffers& buffers : attention_) {
    const ops::AttentionWorkView& view = buffers.view;
    key.insert(key.end(), {address(view.tiles), address(view.merges), address(view.items),
                           view.num_items, view.num_merges, view.tile_rows, view.one_tile ? 1 : 0});
  }
  for (const ops::VisitPlan& plan : visits_) {
    key.push_back(plan.num_rows);
    if (plan.num_rows > 0) key.insert(key.end(), {address(plan.blocks), address(plan.first_block)});
  }
  const ops::DecodedPages& decoded = step_.decoded;
  key.insert(key.end(), {decoded.count, address(decoded.numbers), address(decoded.k)});
  for (const ops::KvLayer& layer : step_.kv_layers) {
    key.insert(key.end(), {address(layer.k), address(layer.v), address(layer.k_scale),
                           address(layer.v_scale), address(layer.bounds.values),
                           address(layer.coded.features), address(layer.coded.codebooks)});
  }
  return key;
}

ops::TopRowsProblem DeviceStep::top_of(int32_t k) const {
  ops::TopRowsProblem problem;
  problem.x = static_cast<const float*>(logits_.get());
  problem.rows = static_cast<int64_t>(batch_.logit_rows.size());
  problem.cols = limits_.vocab_size;
  problem.k = k;
  problem.values = static_cast<float*>(top_.get());
  problem.indices = reinterpret_cast<int32_t*>(problem.values + problem.rows * k);
  return problem;
}

bool DeviceStep::pack_step(const Step& step, std::span<const AttentionBuffers> attention,
                           std::span<const RowDraw> draws) {
  // Steps with lists of blocks are prompts, or have some in them.
  const bool has_lists = std::ranges::any_of(
      step.visits, [](const ops::VisitPlan& plan) { return plan.num_blocks > 0; });
  const bool shared = step.batch->phase == Phase::decode && step.layout.num_tokens <= kMostShared &&
                      !has_lists && step.batch->scored.empty();
  pack(step, attention, draws, shared);
  return shared;
}

void DeviceStep::launch(const Program& program, const Step& step,
                        std::span<const AttentionBuffers> attention, int32_t top_k,
                        std::span<const RowDraw> draws) {
  const bool shared = pack_step(step, attention, draws);
  const auto put = [&] {
    for (const std::unique_ptr<Call>& call : program.calls) {
      if (call->prepare(step_)) call->launch(*queue_);
    }
    if (top_k > 0) top_rows_.launch(top_of(top_k), *queue_);
    if (!draws.empty()) draw_rows_->launch(drawn_, *queue_);
  };
  if (!shared) return put();
  recordings_.run(key_of(program, draws.empty() ? top_k : kDraws), *queue_, put);
}

void DeviceStep::read(std::span<float> logits) {
  download_outputs();
  if (!logits.empty()) queue_->download(logits.data(), logits_.get(), logits.size_bytes());
  queue_->wait();
}

void DeviceStep::read_drawn(const DrawnTokens& drawn) {
  const auto rows = static_cast<size_t>(drawn_.rows);
  queue_->download(top_image_.get(), top_.get(), rows * (sizeof(int32_t) + 2));
  download_outputs();
  queue_->wait();
  const auto* tokens = reinterpret_cast<const int32_t*>(top_image_.get());
  const auto* statuses = reinterpret_cast<const ops::RowStatus*>(tokens + rows);
  const auto* undecided = reinterpret_cast<const uint8_t*>(statuses + rows);
  for (size_t row = 0; row < drawn.tokens.size(); ++row) {
    drawn.tokens[row] = tokens[row];
    drawn.decided[row] = statuses[row] == ops::RowStatus::ok && undecided[row] == 0 ? 1 : 0;
  }
}

void DeviceStep::read_row(int64_t row, std::span<float> logits) {
  const auto* all = static_cast<const float*>(logits_.get());
  queue_->download(logits.data(), all + row * limits_.vocab_size, logits.size_bytes());
  queue_->wait();
}

void DeviceStep::read_top(const TopLogits& top) {
  const ops::TopRowsProblem problem = top_of(top.k);
  const auto count = static_cast<size_t>(problem.rows * problem.k);
  queue_->download(top_image_.get(), top_.get(), count * (sizeof(float) + sizeof(int32_t)));
  download_outputs();
  queue_->wait();
  const auto* values = reinterpret_cast<const float*>(top_image_.get());
  std::copy_n(values, top.values.size(), top.values.begin());
  std::copy_n(reinterpret_cast<const int32_t*>(values + count), top.tokens.size(),
              top.tokens.begin());
}

}  // namespace effinfer::executor
