#include "ops/activation.h"

#include "cpu/level.h"
#include "cpu/vectors/activation.h"
#include "cpu/vectors/row_pieces.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class T, class Function>
void gate(const ops::GatedProblem& p, Team& team, Function function) {
  if (p.cols == 0) return;
  const int64_t count = p.rows * p.groups;
  for_pieces(count, p.cols, team, [&](int64_t i, int64_t begin, int64_t length) {
    const T* x = p.x.template at<const T>(i / p.groups, i % p.groups) + begin;
    const T* gated = x + p.cols;
    T* out = p.out.template at<T>(i / p.groups, i % p.groups) + begin;
    for_vectors(length, [&](int64_t j, auto load, auto store) {
      store(out + j, function(load(x + j)) * load(gated + j));
    });
  });
}

void gated(const ops::GatedProblem& p, Team& team) {
  with_float_type(p.dtype, [&]<class T>() {
    with_activation(p.op, [&](auto function) { gate<T>(p, team, function); });
  });
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
void run<Level::EFFINFER_LEVEL>(const ops::GatedProblem& p, Team& team) {
  EFFINFER_LEVEL::gated(p, team);
}

}  // namespace effinfer::cpu
