#include "effinfer/ops/matmul.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "core/memory.h"
#include "effinfer/error.h"
#include "ops/matmul.h"
#include "ops/registry.h"
#include "ops/validate.h"

namespace effinfer::ops {

std::string describe(const MatmulProblem& problem) {
  std::string text = "[matmul] rows=" + std::to_string(problem.x.rows) +
                     " cols=" + std::to_string(problem.x.cols) +
                     " arithmetic=" + std::string(name(problem.x.arithmetic)) + " weights=";
  for (int i = 0; i < problem.num_parts; ++i) {
    const PackedWeight& weight = problem.parts[i].weight;
    if (i > 0) text += "+";
    text += std::string(name(weight.source)) + "[" + std::to_string(weight.rows) + "," +
            std::to_string(weight.cols) + "]";
  }
  if (problem.glu != UnaryOp::none) text.append(" glu=").append(name(problem.glu));
  if (problem.out_operand.data != nullptr) {
    text += " out=" + std::string(name(problem.out_operand.arithmetic)) + " operand";
  }
  return text;
}

Cost cost(const MatmulProblem& problem) {
  const int64_t rows = problem.x.rows;
  const bool gated = problem.glu != UnaryOp::none;
  Cost cost{rows * problem.x.row_bytes(), 0};
  for (int i = 0; i < problem.num_parts; ++i) {
    const MatmulPart& part = problem.parts[i];
    const int64_t outputs = part.weight.rows;
    const bool writes = i == 0 || !gated;
    cost.bytes += static_cast<int64_t>(part.weight.num_bytes());
    if (part.bias != nullptr) cost.bytes += outputs * 4;
    if (part.residual != nullptr) cost.bytes += rows * outputs * 4;
    if (writes && problem.out_operand.data == nullptr) cost.bytes += rows * outputs * 4;
    cost.ops += 2 * rows * outputs * part.weight.cols;
  }
  if (problem.out_operand.data != nullptr) cost.bytes += rows * problem.out_operand.row_bytes();
  return cost;
}

struct PackedMatrix::Impl {
  PackedBuffer buffer;
  Device device = {};
};

MatmulArithmetic parse_matmul_arithmetic(std::string_view text) {
  if (text == "int8") return MatmulArithmetic::int8;
  if (text == "bf16") return MatmulArithmetic::bf16;
  if (text == "f32") return MatmulArithmetic::f32;
  if (text == "int8_token") return MatmulArithmetic::int8_token;
  throw InvalidArgument("[matmul] arithmetic: expected int8, bf16, f32 or int8_token, got \"" +
                        std::string(text) + "\"");
}

TernaryPacking parse_ternary_packing(std::string_view text) {
  if (text == "t2") return TernaryPacking::t2;
  if (text == "t1_6") return TernaryPacking::t1_6;
  throw InvalidArgument("[pack] ternary: expected t2 or t1_6, got \"" + std::string(text) + "\"");
}

TernaryMethod parse_ternary_method(std::string_view text) {
  if (text == "auto") return TernaryMethod::automatic;
  if (text == "integer") return TernaryMethod::integer;
  if (text == "lookup") return TernaryMethod::lookup;
  throw InvalidArgument("[matmul] method: expected auto, integer or lookup, got \"" +
                        std::string(text) + "\"");
}

PackedMatrix::PackedMatrix(const TensorView& weight, ThreadPool& pool, TernaryPacking ternary) {
  if (weight.data == nullptr) throw InvalidArgument("[matmul] weight: expected data, got null");
  Validator("matmul").device("weight", weight);
  impl_ = std::make_shared<const Impl>(Impl{pack(weight, pool, static_cast<TernaryForm>(ternary))});
}

int64_t PackedMatrix::rows() const {
  return impl_->buffer.view.rows;
}

int64_t PackedMatrix::cols() const {
  return impl_->buffer.view.cols;
}

DType PackedMatrix::dtype() const {
  return impl_->buffer.view.source;
}

std::string PackedMatrix::format() const {
  return to_string(impl_->buffer.view.format);
}

size_t PackedMatrix::num_bytes() const {
  return impl_->buffer.view.num_bytes();
}

Device PackedMatrix::device() const {
  return impl_->device;
}

PackedMatrix PackedMatrix::to(Device device) const {
  if (device == impl_->device) return *this;
  Validator("matmul").expect(impl_->device == Device{}, "weight", "a matrix on cpu",
                             "one on " + name(impl_->device));
  Impl copy = *impl_;
  copy.device = device;
  copy.buffer.storage = allocate_memory(device, num_bytes());
  memory_of(device).copy(copy.buffer.storage.get(), impl_->buffer.view.data, num_bytes());
  copy.buffer.view.data = static_cast<const uint8_t*>(copy.buffer.storage.get());
  PackedMatrix there = *this;
  there.impl_ = std::make_shared<const Impl>(std::move(copy));
  return there;
}

void PackedMatrix::unpack(float* out) const {
  Validator("matmul").expect(impl_->device == Device{}, "weight", "a matrix on cpu",
                             "one on " + name(impl_->device));
  const PackedWeight& view = impl_->buffer.view;
  std::vector<float> group(static_cast<size_t>(kGroupRows * view.cols));
  for (int64_t g = 0; g < view.groups(); ++g) {
    unpack_group(view, g, group.data());
    const int64_t first = g * kGroupRows;
    const int64_t rows = std::min(kGroupRows, view.rows - first);
    std::copy_n(group.data(), rows * view.cols, out + first * view.cols);
  }
}

MatmulProblem smallest_matmul(Arithmetic arithmetic) {
  MatmulProblem problem;
  problem.x = {arithmetic, 1, kSuperblock, nullptr};
  problem.num_parts = 1;
  PackedWeight& weight = problem.parts[0].weight;
  const bool ternary = arithmetic == Arithmetic::int8_token;
  weight.source = ternary ? DType::tq2_0 : DType::q8_0;
  weight.format = packed_format(weight.source, ternary ? TernaryForm::t2 : TernaryForm::u4);
  weight.rows = kGroupRows;
  weight.cols = problem.x.cols;
  return problem;
}

std::string matmul_kernel(MatmulArithmetic arithmetic) {
  const MatmulProblem problem = smallest_matmul(static_cast<Arithmetic>(arithmetic));
  return table<MatmulProblem>().select(problem, current_target()).name;
}

namespace {

using MatmulVariant = Variant<MatmulProblem>;

// The best variant of a method at the level in use.
const MatmulVariant& select_variant(const MatmulProblem& problem, TernaryMethod method) {
  const auto& variants = table<MatmulProblem>();
  if (method == TernaryMethod::automatic) return variants.select(problem, current_target());
  const std::string_view suffix = method == TernaryMethod::lookup ? ".lookup" : ".ternary";
  const MatmulVariant* best = nullptr;
  for (const MatmulVariant& variant : variants.variants()) {
    if (!std::string_view(variant.name).ends_with(suffix)) continue;
    if (refusal(variant, problem, current_target()) != nullptr) continue;
    if (best == nullptr || variant.isa >= best->isa) best = &variant;
  }
  if (best != nullptr) return *best;
  throw Unsupported("[matmul] method: no kernel named *" + std::string(suffix) + " at " +
                    std::string(name(current_isa())) + " for " + describe(problem));
}

// Rows x become the operand, which lives as long as the queue's work.
void multiply_there(MatmulProblem& problem, const float* x, size_t bytes, Queue& queue) {
  const Target target = current_target(queue.device());
  const auto& multiply = table<MatmulProblem>().select(problem, target);
  const std::shared_ptr<void> operand = queue.allocate(bytes);
  problem.x.data = operand.get();
  run_alone(ToOperandProblem{x, problem.x.cols, problem.x}, queue);
  multiply.launch(problem, queue);
}

}  // namespace

void matmul(const float* x, int64_t n, const PackedMatrix& weight, MatmulArithmetic arithmetic,
            const float* bias, const float* residual, float* out, const Executor& executor,
            TernaryMethod method) {
  if (method != TernaryMethod::automatic && arithmetic != MatmulArithmetic::int8_token) {
    throw InvalidArgument("[matmul] method: expected auto where arithmetic is not int8_token");
  }
  if (n < 0) throw InvalidArgument("[matmul] n: expected at least 0, got " + std::to_string(n));
  if (n == 0) return;
  if (x == nullptr) throw InvalidArgument("[matmul] x: expected data, got null");
  if (out == nullptr) throw InvalidArgument("[matmul] out: expected data, got null");
  Validator("matmul").expect(weight.device() == executor.device(), "weight",
                             "a matrix on " + name(executor.device()),
                             "one on " + name(weight.device()));
  const PackedWeight& packed = weight.impl().buffer.view;

  MatmulProblem problem;
  problem.x.arithmetic = static_cast<Arithmetic>(arithmetic);
  problem.x.rows = n;
  problem.x.cols = packed.cols;
  problem.num_parts = 1;
  problem.parts[0] = {packed, bias, residual, out, packed.rows};
  const auto bytes = static_cast<size_t>(n * problem.x.row_bytes());
  if (Queue* const queue = executor.queue()) return multiply_there(problem, x, bytes, *queue);
  const MatmulVariant& variant = select_variant(problem, method);
  const std::unique_ptr<void, decltype(&std::free)> operand(std::aligned_alloc(64, bytes),
                                                            std::free);
  if (!operand) {
    throw OutOfMemory("[matmul] no memory for an operand of " + std::to_string(bytes) + " bytes");
  }
  problem.x.data = operand.get();
  const ToOperandProblem conversion{x, packed.cols, problem.x};
  const auto& convert = table<ToOperandProblem>().select(conversion, current_target());
  ThreadPool& pool = *executor.pool();
  if (variant.scratch_bytes != nullptr) pool.reserve_scratch(variant.scratch_bytes(problem));
  pool.parallel([&](Team& team) {
    convert.run(conversion, team);
    team.barrier();
    variant.run(problem, team);
  });
}

namespace {

// Rows x [n, cols] as an operand in `record`.
Operand quantized(const Validator& check, Arithmetic arithmetic, const float* x, int64_t n,
                  int64_t cols, std::vector<uint8_t>& record) {
  check.expect(n >= 0 && cols >= 1, "x", "a shape [n, cols]", Dims{n, cols}.to_string());
  Operand operand{arithmetic, n, cols, nullptr};
  record.resize(static_cast<size_t>(n * operand.row_bytes()));
  operand.data = record.data();
  ThreadPool alone(1);
  run_alone(ToOperandProblem{x, cols, operand}, alone);
  return operand;
}

}  // namespace

void quantize_activation(const float* x, int64_t n, int64_t cols, int8_t* q, float* scales) {
  std::vector<uint8_t> record;
  const Operand operand =
      quantized(Validator("quantize_activation"), Arithmetic::int8, x, n, cols, record);
  const int64_t blocks = (cols + kScaleBlock - 1) / kScaleBlock;
  for (int64_t i = 0; i < n; ++i) {
    const Int8Row row = int8_row(operand, i);
    std::copy_n(row.q, cols, q + i * cols);
    std::copy_n(row.scales, blocks, scales + i * blocks);
  }
}

void quantize_tokens(const float* x, int64_t n, int64_t cols, int8_t* q, float* scales) {
  std::vector<uint8_t> record;
  const Operand operand =
      quantized(Validator("quantize_tokens"), Arithmetic::int8_token, x, n, cols, record);
  for (int64_t i = 0; i < n; ++i) {
    const TokenRow row = token_row(operand, i);
    std::copy_n(row.q, cols, q + i * cols);
    scales[i] = row.scale;
  }
}

}  // namespace effinfer::ops
