// The distribution over one row's tokens, and the filters that narrow it.
//
// Top-k, top-p and min-p each keep a head of the row in the order (value descending, id ascending).
// None of them sorts: the last kept element is found by histograms of the values' bits
// (order_key()), each of which narrows the range by 2^kRowBucketBits and leaves the elements of one
// bucket, at most four times. Flat rows cost as much as peaked ones, but for the elements that a
// bound excludes beforehand.
//
// Every result depends on the row and the filters alone: sums have one order, and every ISA level
// gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/row_math.h"
#include "ops/row_sampling.h"

namespace effinfer::cpu {

class RowDistribution {
 public:
  // A row of up to `vocab` values needs so many bytes, 64-byte aligned.
  static size_t scratch_bytes(int64_t vocab);
  RowDistribution(const RowMath& math, void* scratch, int64_t vocab);

  // Starts with a row of f32, f16 or bf16, which must outlive its use; the filters that follow work
  // on logits until to_weights(), on weights from there on. `top_k`, when positive, is the k of the
  // filter to come. from_logits() refuses NaNs alone, see check_logits().
  ops::RowStatus from_logits(const void* x, DType dtype, int64_t n, int64_t top_k = 0);
  ops::RowStatus from_weights(const void* x, DType dtype, int64_t n);
  // Starts with max(target - draft, 0), or with the target where that is nothing.
  ops::RowStatus from_excess(const float* target, const float* draft, int64_t n);
  ops::RowStatus check_logits() const;  // that the highest is finite

  void to_weights(float temperature);  // exp((logit - highest) / temperature)
  void keep_top_k(int64_t k);
  void keep_top_p(float p);  // the smallest head with that share of the weight
  void keep_min_p(float p);  // what weighs at least p times the heaviest

  // Keeps the weights at places that ascend, of those that are left.
  template <class Place>
  void keep_places(size_t count, Place&& place) {
    for (size_t i = 0; i < count; ++i) {
      const auto from = static_cast<size_t>(place(i));
      kept_[i] = values_[from];
      kept_ids_[i] = ids_ == nullptr ? static_cast<int32_t>(from) : ids_[from];
    }
    replace(static_cast<int64_t>(count));
    sum_weights();
  }

  double total();
  // Writes the whole row: what is left as probabilities, 0 elsewhere.
  void write_probabilities(float* out);
  // The token at `uniform` in [0, 1) of the weights in the order of ids.
  int32_t draw(double uniform);

  // What is left, in the order of ids. Null ids: all of the row.
  int64_t size() const { return size_; }
  const float* values() const { return values_; }
  const int32_t* ids() const { return ids_; }
  // The row as float32.
  const float* row() const { return row_; }
  float max() const { return max_; }

 private:
  struct Found {
    float least;
    int64_t needed;  // how many of those equal to it
    int64_t equal;
  };
  const float* widen(const void* x, DType dtype, int64_t n);
  void start(const float* row, int64_t n);
  ops::RowStatus sum_weights();
  void scan(int64_t k);
  void narrow_to_top(int64_t k);
  template <bool kWeights>
  Found select(double goal, float low);
  void cut_at(const Found& found);
  void apply(RowCut cut);
  void replace(int64_t size);  // by as many kept values

  const RowMath& math_;
  // The scratch holds the row as float32, kept values and ids, elements of a bucket, sums of
  // blocks, maxima of groups, a histogram.
  float* wide_;
  float* kept_;
  int32_t* kept_ids_;
  float* bucket_;
  double* sums_;
  float* maxima_;
  void* histogram_;

  const float* row_ = nullptr;
  const float* values_ = nullptr;
  const int32_t* ids_ = nullptr;
  int64_t size_ = 0;
  int64_t row_size_ = 0;
  int64_t groups_ = 0;  // valid maxima, of the row
  float max_ = 0.0f;
  float min_ = 0.0f;  // no value is below
  double total_ = 0.0;
  bool summed_ = false;  // sums_ and total_ are of what is left
};

}  // namespace effinfer::cpu
