// The middle of a gated MLP: a thread a chunk of the output.
#pragma once

#include "cuda/bodies/activation.h"
#include "cuda/bodies/row_chunks.h"

namespace effinfer::cuda {

struct GatedParams {
  ops::ConstRows x;
  ops::Rows out;
  ops::UnaryOp op = ops::UnaryOp::none;
  int groups = 1;
  int cols = 0;
  int parts = 1;  // blocks of a vector
  bool vectored = false;
};

template <class T>
struct GatedKernel {
  static constexpr const char* kName = "gated";
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 16;
  static constexpr int kNumbers = kChunk<T>;
  using Params = GatedParams;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int vector = unit.block / p.parts;
    const int first = (unit.block % p.parts * kThreads + unit.thread) * kNumbers;
    if (first >= p.cols) return;
    const int row = vector / p.groups;
    const int group = vector % p.groups;
    const T* x = p.x.template at<const T>(row, group);
    const Quad gate = load_chunk(x, first, p.cols, p.vectored);
    const Quad up = load_chunk(x + p.cols, first, p.cols, p.vectored);
    float a[kNumbers];
    float b[kNumbers];
    decode<T>(unit, gate, a);
    decode<T>(unit, up, b);
    apply_each(p.op, a, 0.0f);
    EFFINFER_UNROLL
    for (int e = 0; e < kNumbers; ++e) a[e] *= b[e];
    store_chunk(p.out.template at<T>(row, group), first, p.cols, p.vectored, encode<T>(unit, a));
  }
};

}  // namespace effinfer::cuda
