#include "ops/elementwise.h"

#include "cpu/level.h"
#include "cpu/vectors/activation.h"
#include "cpu/vectors/row_pieces.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class Function>
void map(const ops::UnaryProblem& p, Team& team, Function function) {
  for_pieces(p.rows, p.cols, team, [&](int64_t row, int64_t begin, int64_t count) {
    const float* x = p.x + row * p.x_stride + begin;
    float* out = p.out + row * p.out_stride + begin;
    for_vectors(count,
                [&](int64_t i, auto load, auto store) { store(out + i, function(load(x + i))); });
  });
}

void unary(const ops::UnaryProblem& p, Team& team) {
  if (p.cols == 0) return;
  const F32x16 parameter = F32x16::set(p.parameter);
  if (p.op == ops::UnaryOp::scale) {
    map(p, team, [parameter](F32x16 x) { return x * parameter; });
  } else if (p.op == ops::UnaryOp::softcap) {
    map(p, team, [parameter](F32x16 x) { return parameter * simd::tanh(x / parameter); });
  } else {
    with_activation(p.op, [&](auto function) { map(p, team, function); });
  }
}

template <class Function>
void map(const ops::BinaryProblem& p, Team& team, Function function) {
  team.for_chunks((p.size + kRowChunk - 1) / kRowChunk, [&](int64_t chunk) {
    const int64_t begin = chunk * kRowChunk;
    const int64_t count = p.size - begin < kRowChunk ? p.size - begin : kRowChunk;
    const float* a = p.a + begin;
    const float* b = p.b + begin;
    float* out = p.out + begin;
    for_vectors(count, [&](int64_t i, auto load, auto store) {
      store(out + i, function(load(a + i), load(b + i)));
    });
  });
}

void binary(const ops::BinaryProblem& p, Team& team) {
  switch (p.op) {
    case ops::BinaryOp::add:
      return map(p, team, [](F32x16 a, F32x16 b) { return a + b; });
    case ops::BinaryOp::mul:
      return map(p, team, [](F32x16 a, F32x16 b) { return a * b; });
  }
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
void run<Level::EFFINFER_LEVEL>(const ops::UnaryProblem& p, Team& team) {
  EFFINFER_LEVEL::unary(p, team);
}

template <>
void run<Level::EFFINFER_LEVEL>(const ops::BinaryProblem& p, Team& team) {
  EFFINFER_LEVEL::binary(p, team);
}

}  // namespace effinfer::cpu
