#include "compiler/executable_impl.h"
#include "compiler/region.h"

namespace effinfer {

using compiler::Call;
using compiler::Program;

Executable::Executable(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Executable::~Executable() = default;

void Executable::Impl::reserve_plans() {
  size_t partial_floats = 0;
  size_t partials = 0;
  for (const kernels::AttentionShape& shape : shared.attention_shapes) {
    const kernels::AttentionPlanSize size = kernels::attention_plan_size(
        shape, limits.max_tokens, limits.max_sequences, limits.max_seq_len);
    PlanBuffers& buffers = plan_buffers.emplace_back();
    buffers.items.resize(static_cast<size_t>(size.items));
    buffers.merges.resize(static_cast<size_t>(size.merges));
    buffers.done.resize(static_cast<size_t>(size.merges));
    const auto count = static_cast<size_t>(size.partials);
    partials = std::max(partials, count);
    partial_floats = std::max(partial_floats, count * static_cast<size_t>(shape.head_dim));
  }
  partial_out.resize(partial_floats);
  partial_ms.resize(partials * 2);
  plans.resize(shared.attention_shapes.size());
}

void Executable::Impl::plan_step(const kernels::BatchLayout& layout) {
  for (size_t slot = 0; slot < plans.size(); ++slot) {
    const kernels::AttentionPlanBuffers buffers{
        plan_buffers[slot].items.data(), plan_buffers[slot].merges.data(), partial_out.data(),
        partial_ms.data(), plan_buffers[slot].done.data()};
    plans[slot] = kernels::plan_attention(shared.attention_shapes[slot], layout, buffers);
  }
}

void Executable::run(const Batch& batch, KvCache& cache, std::span<float> logits) {
  Impl& impl = *impl_;
  const int64_t begin_ns = impl.recorder ? compiler::Recorder::now_ns() : 0;
  compiler::check_batch(batch, cache.config(), logits.size(), impl.limits);
  compiler::Step step;
  step.batch = &batch;
  step.cache = &cache;
  step.logits = logits.data();
  step.layout = {static_cast<int64_t>(batch.token_ids.size()),
                 static_cast<int64_t>(batch.kv_len.size()),
                 batch.qo_indptr.data(),
                 batch.kv_indptr.data(),
                 batch.kv_indices.data(),
                 batch.kv_len.data(),
                 batch.positions.data()};
  impl.plan_step(step.layout);
  step.plans = impl.plans;

  const size_t index = impl.program_of_phase[static_cast<size_t>(batch.phase)];
  Program& program = impl.programs[index];
  impl.active.clear();
  for (const std::unique_ptr<Call>& call : program.calls) {
    if (call->prepare(step)) impl.active.push_back(call.get());
  }
  compiler::Region region{step, impl.active};
  if (impl.own && step.layout.num_tokens <= compiler::kOwnRows) {
    region.own = static_cast<std::byte*>(impl.own.get());
    region.own_bytes = impl.own_bytes;
  }
  if (impl.recorder && impl.recorder->has_room()) {
    impl.recorder->run(region, index, *impl.pool, begin_ns);
    return;
  }
  impl.pool->parallel([&region](Team& team) { region.run(team, compiler::NoTimer()); });
}

void Executable::start_profile(int64_t max_steps) {
  if (max_steps < 1) {
    throw InvalidArgument("[profile] max_steps: expected at least 1, got " +
                          std::to_string(max_steps));
  }
  Impl& impl = *impl_;
  impl.recorder = std::make_unique<compiler::Recorder>(
      impl.pool->size(), impl.limits.cache.num_layers, impl.programs, max_steps);
}

Profile Executable::take_profile() {
  const std::unique_ptr<compiler::Recorder> recorder = std::move(impl_->recorder);
  return recorder ? recorder->take() : Profile{};
}

int64_t Executable::vocab_size() const {
  return impl_->limits.vocab_size;
}

KvCacheConfig Executable::kv_config(DType dtype, int32_t num_pages) const {
  KvCacheConfig config = impl_->limits.cache;
  config.dtype = dtype;
  config.num_pages = num_pages;
  return config;
}

const CompileOptions& Executable::options() const {
  return impl_->shared.options;
}

const Graph& Executable::graph() const {
  return impl_->shared.graph;
}

size_t Executable::arena_bytes() const {
  return impl_->arena_bytes;
}

size_t Executable::packed_bytes() const {
  return impl_->shared.weights->packed_bytes();
}

}  // namespace effinfer
