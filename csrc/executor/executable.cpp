#include <algorithm>
#include <limits>
#include <memory>
#include <string>

#include "executor/executable_impl.h"
#include "kv/kv_access.h"

namespace effinfer {

using executor::Call;
using executor::Program;

namespace {

// Weights that are kept in a step, 16 MB; steps that need more make them apart. Each member has
// room for all, of which it touches what it makes.
constexpr int64_t kMostKept = int64_t{1} << 22;

// The lists that members kept of each row, [members][rows], as one; member 0's are changed.
void merge_top(ops::TopList* lists, int members, size_t rows, const TopLogits& out) {
  const auto k = static_cast<size_t>(out.k);
  for (size_t row = 0; row < rows; ++row) {
    ops::TopList& all = lists[row];
    for (int member = 1; member < members; ++member) {
      const ops::TopList& list = lists[static_cast<size_t>(member) * rows + row];
      all.nans |= list.nans;
      for (int32_t i = 0; i < list.count; ++i) all.add(list.entries[i], out.k);
    }
    for (size_t i = 0; i < k; ++i) {
      out.values[row * k + i] = all.entries[i].value;
      out.tokens[row * k + i] = all.entries[i].index;
    }
    if (all.nans != 0) out.values[row * k] = std::numeric_limits<float>::quiet_NaN();
  }
}

}  // namespace

Executable::Executable(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Executable::~Executable() = default;

void Executable::Impl::reserve_plans() {
  size_t partial_floats = 0;
  size_t partials = 0;
  size_t arranged_bytes = 0;
  for (const ops::AttentionShape& shape : shared.attention_shapes) {
    executor::AttentionBuffers& buffers = attention.emplace_back();
    const auto count = static_cast<size_t>(
        buffers.work.reserve(shape, limits.max_tokens, limits.max_sequences, limits.max_seq_len));
    buffers.counters.resize(buffers.work.merges.capacity());
    partials = std::max(partials, count);
    partial_floats = std::max(partial_floats, count * static_cast<size_t>(shape.head_dim));
    arranged_bytes = std::max(arranged_bytes, buffers.work.arranged.capacity() *
                                                  ops::arranged_page_bytes(shape.head_dim));
  }
  std::vector<ops::VisitPlan> largest;
  for (const ops::VisitShape& shape : shared.visit_shapes) {
    visit_buffers.emplace_back(shape, limits.max_tokens, limits.max_sequences, limits.max_seq_len);
    largest.push_back(visit_buffers.back().largest());
  }
  visits.resize(visit_buffers.size());
  weighted.reserve(shared.weight_names.size() * static_cast<size_t>(limits.max_sequences));
  layouts.reserve(limits.cache.groups.size());
  if (shared.target.device.kind != DeviceKind::cpu) {
    device = std::make_unique<executor::DeviceStep>(shared, limits, attention, largest, partials,
                                                    partial_floats, arranged_bytes);
    return;
  }
  const bool keeps = std::ranges::any_of(
      programs, [](const executor::Program& program) { return program.kept_heads > 0; });
  if (keeps) {
    // Of a chunk, and its part of what a row has, there are 80 numbers at most beside 272 weights.
    kept_numbers = std::make_unique_for_overwrite<float[]>(kMostKept * 80 / 272);
    kept_weights = std::make_unique_for_overwrite<float[]>(kMostKept * pool->size());
  }
  partial_out = std::make_unique_for_overwrite<float[]>(partial_floats);
  partial_ms = std::make_unique_for_overwrite<float[]>(partials * 2);
  for (executor::AttentionBuffers& buffers : attention) {
    buffers.done = buffers.counters.data();
    buffers.partial_out = partial_out.get();
    buffers.partial_ms = partial_ms.get();
  }
  if (shared.max_top > 0) {
    const auto count = static_cast<size_t>(pool->size() * limits.max_rows);
    top_lists = std::make_unique_for_overwrite<std::byte[]>(count * sizeof(ops::TopList));
  }
}

void Executable::Impl::plan_step(const executor::Step& step, Phase phase) {
  bool has_lists = false;
  for (size_t slot = 0; slot < visits.size(); ++slot) {
    visits[slot] = visit_buffers[slot].plan(step.layout_of(shared.visit_layers[slot]));
    has_lists |= visits[slot].has_lists();
  }
  for (size_t slot = 0; slot < attention.size(); ++slot) {
    const ops::AttentionShape& shape = shared.attention_shapes[slot];
    attention[slot].work.clear();
    if (const executor::AttentionBuffers* same = planned(step, slot)) {
      attention[slot].view = same->view;
      continue;
    }
    // Those of prompts alone are of no call of the other phase.
    if (!shape.only_long || phase == Phase::prefill) {
      const ops::BatchLayout& layout = step.layout_of(shared.attention_layers[slot]);
      ops::plan_attention(shape, layout, attention[slot].work);
    }
    // What chooses or scores keys reads those of the step: they are appended before it, not within
    // attention, but where that scores them itself.
    const bool scores_apart = !step.batch->scored.empty() && !step.kept.is_kept();
    if ((has_lists && shape.visits) || scores_apart) {
      attention[slot].work.one_tile = false;
    }
    attention[slot].view = attention[slot].work;
  }
}

// The plan of an earlier slot of the same shape whose tables are as long; null: there is none.
const executor::AttentionBuffers* Executable::Impl::planned(const executor::Step& step,
                                                            size_t slot) const {
  const std::vector<ops::AttentionShape>& shapes = shared.attention_shapes;
  const auto layout_of = [&](size_t of) -> const ops::BatchLayout& {
    return step.layout_of(shared.attention_layers[of]);
  };
  const auto lengths = [](const ops::BatchLayout& layout) {
    return std::span(layout.kv_len, static_cast<size_t>(layout.num_sequences));
  };
  const ops::BatchLayout& wanted = layout_of(slot);
  for (size_t other = 0; other < slot; ++other) {
    if (!(shapes[other] == shapes[slot])) continue;
    const ops::BatchLayout& layout = layout_of(other);
    if (layout.tree_start != wanted.tree_start) continue;
    if (std::ranges::equal(lengths(layout), lengths(wanted))) return &attention[other];
  }
  return nullptr;
}

// Only generated tokens that stand alone in their sequence, as nearly all do that are scored. The
// sums' bits are those of calls.
void Executable::Impl::keep_weights(const executor::Program& program, executor::Step& step) {
  const Batch& batch = *step.batch;
  if (program.kept_heads == 0 || batch.scored.empty()) return;
  int64_t longest = 0;
  for (const ScoredRows& scored : batch.scored) {
    const auto s = static_cast<size_t>(scored.sequence);
    if (batch.qo_indptr[s + 1] - batch.qo_indptr[s] != 1) return;
    longest = std::max(longest, scored.plane.num_slots);
  }
  const int64_t pages = ops::KeptWeights::rounded((longest + ops::kPageSize - 1) / ops::kPageSize);
  const auto rows = static_cast<int64_t>(batch.scored.size());
  if (rows * program.kept_heads * pages * ops::KeptWeights::page_weights(1) > kMostKept) return;
  step.kept = {kept_numbers.get(), pages, kept_weights.get(), kMostKept};
}

void Executable::run(const Batch& batch, KvCache& cache, std::span<float> logits,
                     const CancelToken* cancel) {
  const size_t rows = batch.logit_rows.size();
  executor::check_size_of("logits", logits.size(), rows * static_cast<size_t>(vocab_size()));
  if (cancel != nullptr) cancel->check();
  const Batch behind = impl_->after_front(batch, cache, cancel);
  if (impl_->device) {
    impl_->launch_step(behind, cache, 0, {});
    return impl_->device->read(logits);
  }
  executor::Step step;
  step.logits = logits.data();
  impl_->run_step(behind, cache, step, cancel);
}

void Executable::run_top(const Batch& batch, KvCache& cache, const TopLogits& top,
                         const CancelToken* cancel) {
  Impl& impl = *impl_;
  const size_t rows = batch.logit_rows.size();
  if (top.k < 1 || top.k > max_top()) {
    throw InvalidArgument("[run_top] k: expected 1.." + std::to_string(max_top()) + ", got " +
                          std::to_string(top.k));
  }
  executor::check_size_of("values", top.values.size(), rows * static_cast<size_t>(top.k));
  executor::check_size_of("tokens", top.tokens.size(), rows * static_cast<size_t>(top.k));
  if (cancel != nullptr) cancel->check();
  const Batch behind = impl.after_front(batch, cache, cancel);
  if (impl.device) {
    impl.launch_step(behind, cache, top.k, {});
    return impl.device->read_top(top);
  }
  executor::Step step;
  // More rows than there is room for are refused by the step.
  const auto members = static_cast<size_t>(impl.pool->size());
  const size_t lists = members * std::min(rows, static_cast<size_t>(impl.limits.max_rows));
  step.top = reinterpret_cast<ops::TopList*>(impl.top_lists.get());
  std::uninitialized_default_construct_n(step.top, lists);
  step.top_k = top.k;
  impl.run_step(behind, cache, step, cancel);
  merge_top(step.top, impl.pool->size(), rows, top);
}

int32_t Executable::max_top() const {
  return impl_->shared.max_top;
}

bool Executable::draws_tokens() const {
  return impl_->device && impl_->device->draws();
}

void Executable::run_drawn(const Batch& batch, KvCache& cache, const DrawnTokens& drawn) {
  const size_t rows = batch.logit_rows.size();
  executor::check_size_of("draws", drawn.draws.size(), rows);
  executor::check_size_of("tokens", drawn.tokens.size(), rows);
  executor::check_size_of("decided", drawn.decided.size(), rows);
  if (!draws_tokens()) throw Unsupported("[run_drawn] not on " + name(target().device));
  impl_->launch_step(impl_->after_front(batch, cache, nullptr), cache, 0, drawn.draws);
  impl_->device->read_drawn(drawn);
}

void Executable::read_row(int64_t row, std::span<float> logits) {
  if (!draws_tokens()) throw Unsupported("[read_row] not on " + name(target().device));
  executor::check_size_of("logits", logits.size(), static_cast<size_t>(vocab_size()));
  impl_->device->read_row(row, logits);
}

// Those of the batch's float inputs go on to the half that has them, unknown ones to the others,
// which refuse them.
Batch Executable::Impl::after_front(const Batch& batch, KvCache& cache, const CancelToken* cancel) {
  if (!front) return batch;
  executor::check_batch(batch, cache.config(), limits);
  const auto has = [](const executor::Shared& half, const FloatInput& input) {
    return std::any_of(
        half.inputs.begin(), half.inputs.end(),
        [&](const executor::InputBuffer& buffer) { return buffer.name == input.name; });
  };
  front_inputs.clear();
  own_inputs.clear();
  const executor::Shared& first = front->impl_->shared;
  for (const FloatInput& input : batch.float_inputs) {
    const bool of_front = has(first, input);
    if (of_front) front_inputs.push_back(input);
    if (!of_front || has(shared, input)) own_inputs.push_back(input);
  }
  Batch before = batch;
  before.logit_rows = {};
  before.float_inputs = front_inputs;
  front->run(before, cache, {}, cancel);
  for (const executor::OutputBuffer& output : first.outputs) {
    const FloatInput handed_on{output.name, front->output(output.name).values};
    if (has(shared, handed_on)) own_inputs.push_back(handed_on);
  }
  Batch behind = batch;
  behind.float_inputs = own_inputs;
  return behind;
}

Program& Executable::Impl::begin_step(const Batch& batch, KvCache& cache, executor::Step& step) {
  executor::check_batch(batch, cache.config(), limits);
  executor::copy_inputs(batch, shared.inputs);
  step.batch = &batch;
  last_tokens = static_cast<int64_t>(batch.token_ids.size());
  last_rows = static_cast<int64_t>(batch.logit_rows.size());
  step.layout = {static_cast<int64_t>(batch.token_ids.size()),
                 static_cast<int64_t>(batch.kv_len.size()),
                 batch.qo_indptr.data(),
                 batch.kv_indptr.data(),
                 batch.kv_indices.data(),
                 batch.kv_len.data(),
                 batch.positions.data(),
                 batch.ancestors.empty() ? nullptr : batch.ancestors.data(),
                 batch.tree_start.empty() ? nullptr : batch.tree_start.data(),
                 batch.dense.empty() ? nullptr : batch.dense.data(),
                 batch.unchunked.empty() ? nullptr : batch.unchunked.data()};
  step.kv_layers = KvCacheAccess::layers(cache);
  lay_out(batch, cache, step);
  Program& program = programs[program_of_phase[static_cast<size_t>(batch.phase)]];
  keep_weights(program, step);
  set_weighted(step);
  plan_step(step, batch.phase);
  step.attention = attention;
  step.visits = visits;
  return program;
}

void Executable::Impl::lay_out(const Batch& batch, const KvCache& cache, executor::Step& step) {
  step.group_of_layer = KvCacheAccess::group_of_layer(cache);
  if (step.group_of_layer.empty()) return;
  step.num_whole_groups = static_cast<size_t>(cache.num_whole_groups());
  layouts.assign(1, step.layout);
  for (const KvTables& tables : batch.more_groups) {
    ops::BatchLayout& layout = layouts.emplace_back(step.layout);
    layout.kv_indptr = tables.kv_indptr.data();
    layout.kv_indices = tables.kv_indices.data();
    layout.kv_len = tables.kv_len.data();
    layout.tree_start = tables.tree_start.empty() ? nullptr : tables.tree_start.data();
  }
  step.groups = layouts;
}

void Executable::Impl::set_weighted(executor::Step& step) {
  if (shared.weight_names.empty()) return;
  const auto sequences = static_cast<size_t>(step.layout.num_sequences);
  weighted.assign(shared.weight_names.size() * sequences, {});
  for (const WeightedSlots& each : step.batch->weighted) {
    const auto name = std::ranges::find(shared.weight_names, each.name);
    if (name == shared.weight_names.end()) continue;
    const auto slot = static_cast<size_t>(name - shared.weight_names.begin());
    weighted[slot * sequences + static_cast<size_t>(each.sequence)] = {each.plane.values,
                                                                       each.plane.stride};
  }
  step.weighted = weighted.data();
}

void Executable::Impl::launch_step(const Batch& batch, KvCache& cache, int32_t top_k,
                                   std::span<const RowDraw> draws) {
  const int64_t begin_ns = recorder ? executor::Recorder::now_ns() : 0;
  executor::Step step;
  const Program& program = begin_step(batch, cache, step);
  if (recorder && recorder->has_room()) {
    const auto index = static_cast<size_t>(&program - programs.data());
    device->launch_timed(program, step, attention, top_k, draws, {*recorder, index, begin_ns});
  } else {
    device->launch(program, step, attention, top_k, draws);
  }
}

void Executable::Impl::run_step(const Batch& batch, KvCache& cache, executor::Step& step,
                                const CancelToken* cancel) {
  const int64_t begin_ns = recorder ? executor::Recorder::now_ns() : 0;
  Program& program = begin_step(batch, cache, step);
  active.clear();
  for (const std::unique_ptr<Call>& call : program.calls) {
    if (call->prepare(step)) active.push_back(call.get());
  }
  executor::Region region{step, active};
  if (own && step.layout.num_tokens <= executor::kOwnRows) {
    region.own = static_cast<std::byte*>(own.get());
    region.own_bytes = own_bytes;
  }
  region.cancel = cancel;
  if (recorder && recorder->has_room()) {
    const auto index = static_cast<size_t>(&program - programs.data());
    recorder->run(region, index, *pool, begin_ns);
  } else {
    pool->parallel([&region](Team& team) { region.run(team, executor::NoTimer()); });
  }
  if (region.num_run() < active.size()) cancel->check();
}

void Executable::start_profile(int64_t max_steps) {
  if (max_steps < 1) {
    throw InvalidArgument("[profile] max_steps: expected at least 1, got " +
                          std::to_string(max_steps));
  }
  Impl& impl = *impl_;
  if (impl.front) impl.front->start_profile(max_steps);
  const std::vector<CallInfo> more =
      impl.device ? impl.device->prepare_timing(impl.programs) : std::vector<CallInfo>();
  impl.recorder = std::make_unique<executor::Recorder>(
      name(target().device), impl.device ? 1 : impl.pool->size(), impl.limits.cache.num_layers,
      impl.programs, more, max_steps);
}

Profile Executable::take_profile() {
  const std::unique_ptr<executor::Recorder> recorder = std::move(impl_->recorder);
  return recorder ? recorder->take() : Profile{};
}

const std::vector<std::string>& Executable::output_names() const {
  return impl_->output_names;
}

NamedRows Executable::output(std::string_view name) const {
  const Impl& impl = *impl_;
  const auto found = std::find(impl.output_names.begin(), impl.output_names.end(), name);
  if (found == impl.output_names.end()) {
    std::string known;
    for (const std::string& other : impl.output_names) known += (known.empty() ? "" : ", ") + other;
    throw InvalidArgument("[run] output: expected " + (known.empty() ? "none" : known) +
                          ", got \"" + std::string(name) + "\"");
  }
  const auto named = [&](const executor::OutputBuffer& buffer) { return buffer.name == name; };
  const auto own = std::find_if(impl.shared.outputs.begin(), impl.shared.outputs.end(), named);
  if (own == impl.shared.outputs.end()) return impl.front->output(name);
  const executor::OutputBuffer& output = *own;
  const int64_t rows = output.rows.kind == Dim::Kind::rows ? impl.last_rows : impl.last_tokens;
  return {{output.host_values(), static_cast<size_t>(rows * output.cols)}, output.cols};
}

int64_t Executable::vocab_size() const {
  return impl_->limits.vocab_size;
}

bool Executable::has_attention() const {
  return impl_->limits.cache.num_layers > 0;
}

KvCacheConfig Executable::kv_config(DType dtype, int32_t num_pages, bool by_window) const {
  KvCacheConfig config = impl_->limits.cache;
  if (impl_->front) impl_->add_front_layers(config);
  config.dtype = dtype;
  config.num_pages = num_pages;
  if (config.num_layers == 0) config.num_layers = config.num_kv_heads = 1;
  if (config.head_dim == 0) config.head_dim = 16;
  // A GPU's pages take their memory at once, so that nothing is gained there by freeing those that
  // windows have left.
  const bool is_divided = config.on_host() || impl_->shared.layer_tables;
  if (!by_window || !is_divided) config.groups.clear();
  return config;
}

const std::shared_ptr<Executable>& Executable::front() const {
  return impl_->front;
}

const CompileOptions& Executable::options() const {
  return impl_->shared.options;
}

const Target& Executable::target() const {
  return impl_->shared.target;
}

const std::shared_ptr<ThreadPool>& Executable::pool() const {
  return impl_->pool;
}

const Graph& Executable::graph() const {
  return impl_->shared.graph;
}

size_t Executable::arena_bytes() const {
  return impl_->arena_bytes + (impl_->front ? impl_->front->arena_bytes() : 0);
}

size_t Executable::packed_bytes() const {
  const size_t own = impl_->shared.weights->packed_bytes();
  return own + (impl_->front ? impl_->front->packed_bytes() : 0);
}

}  // namespace effinfer
