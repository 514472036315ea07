// RMS norm and layer norm over rows of any float type.
#include "ops/norm.h"

#include "cpu/level.h"
#include "cpu/operand.h"
#include "cpu/vectors/norm_rows.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// Weights are float32 or of the rows' own type.
template <class Visit>
void with_types(DType rows, DType weights, Visit&& visit) {
  with_float_type(rows, [&]<class T>() {
    if (weights == rows) {
      visit.template operator()<T, T>();
    } else {
      visit.template operator()<T, float>();
    }
  });
}

template <class Visit>
void for_rows(int64_t rows, int64_t groups, int64_t cols, Team& team, Visit&& visit) {
  const int64_t count = rows * groups;
  const int64_t chunk_rows = cols < kRowChunk ? kRowChunk / cols : 1;
  team.for_chunks((count + chunk_rows - 1) / chunk_rows, [&](int64_t chunk) {
    const int64_t first = chunk * chunk_rows;
    const int64_t last = first + chunk_rows < count ? first + chunk_rows : count;
    for (int64_t i = first; i < last; ++i) visit(i / groups, i % groups);
  });
}

template <class T, class W>
void rms_norm_of(const ops::RmsNormProblem& p, Team& team) {
  const StoreOperandRow store_operand =
      p.out_operand.data != nullptr ? store_operand_row(isa_of(Level::EFFINFER_LEVEL)) : nullptr;
  float* scratch = static_cast<float*>(team.scratch());
  const NormWeight<W> weight{static_cast<const W*>(p.weight), p.weight_offset, p.eps};
  for_rows(p.rows, p.groups, p.cols, team, [&](int64_t row, int64_t group) {
    const T* x = p.x.template at<const T>(row, group);
    const T* add_to = p.add_to.template at<const T>(row, group);
    T* sum_out = p.sum_out.template at<T>(row, group);
    const bool adds = p.add_to.data != nullptr;
    if (store_operand == nullptr) {
      T* out = p.out.template at<T>(row, group);
      const auto run = adds ? rms_norm_row<true, T, W, T> : rms_norm_row<false, T, W, T>;
      return run(x, add_to, sum_out, p.cols, weight, out);
    }
    const auto run = adds ? rms_norm_row<true, T, W, float> : rms_norm_row<false, T, W, float>;
    run(x, add_to, sum_out, p.cols, weight, scratch);
    store_operand(p.out_operand, row, scratch);
  });
}

void rms_norm(const ops::RmsNormProblem& p, Team& team) {
  with_types(p.dtype, p.weight_dtype, [&]<class T, class W>() { rms_norm_of<T, W>(p, team); });
}

template <class T, class W>
void layer_norm_row(const ops::LayerNormProblem& p, const T* x, T* out) {
  F32x16 total = F32x16::set(0.0f);
  for_vectors(p.cols, [&](int64_t i, auto load, auto) { total = total + load(x + i); });
  const auto count = static_cast<float>(p.cols);
  const F32x16 mean = F32x16::set(sum(total) / count);
  F32x16 squares = F32x16::set(0.0f);
  // What a partial load pads with is not part of the row: zeros are counted as the mean.
  const int64_t whole = p.cols - p.cols % 16;
  for_vectors(p.cols, [&](int64_t i, auto load, auto) {
    F32x16 v = load(x + i) - mean;
    if (i == whole) v = keep((1u << (p.cols - whole)) - 1, v, F32x16::set(0.0f));
    squares = squares + v * v;
  });
  const F32x16 scale = F32x16::set(1.0f / __builtin_sqrtf(sum(squares) / count + p.eps));
  const W* weight = static_cast<const W*>(p.weight);
  const W* bias = static_cast<const W*>(p.bias);
  for_vectors(p.cols, [&](int64_t i, auto load, auto store) {
    store(out + i, (load(x + i) - mean) * scale * load(weight + i) + load(bias + i));
  });
}

void layer_norm(const ops::LayerNormProblem& p, Team& team) {
  with_types(p.dtype, p.weight_dtype, [&]<class T, class W>() {
    for_rows(p.rows, p.groups, p.cols, team, [&](int64_t row, int64_t group) {
      layer_norm_row<T, W>(p, p.x.template at<const T>(row, group),
                           p.out.template at<T>(row, group));
    });
  });
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
void run<Level::EFFINFER_LEVEL>(const ops::RmsNormProblem& p, Team& team) {
  EFFINFER_LEVEL::rms_norm(p, team);
}

template <>
void run<Level::EFFINFER_LEVEL>(const ops::LayerNormProblem& p, Team& team) {
  EFFINFER_LEVEL::layer_norm(p, team);
}

}  // namespace effinfer::cpu
