// What a step of some rows takes, measured as steps go by.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace effinfer::runtime {

// By rows and by tokens in the cache, in powers of two: a running median of the last steps of each.
// What was not measured is what the nearest measured steps say.
class StepTimes {
 public:
  static constexpr int32_t kMostRows = 160;

  StepTimes();
  void add(int32_t rows, int64_t kv_tokens, double seconds);
  // 0: nothing was measured at all.
  double of(int32_t rows, int64_t kv_tokens) const;
  // Steps of that many rows that were measured, up to kKept: with about so many tokens in the
  // cache, and with the number for which there are most.
  int32_t count(int32_t rows, int64_t kv_tokens) const;
  int32_t most_counted(int32_t rows) const;

  // A step of `rows` against one of a single row before anything is known: where the weights come
  // from memory rows cost little, where they lie in a cache each costs its arithmetic. Between the
  // two, on the side of cost.
  static double prior(int32_t rows) { return 1.0 + 0.1 * (rows - 1); }

 private:
  static constexpr int32_t kKept = 9;
  static constexpr int32_t kContexts = 16;

  struct Bucket {
    std::array<float, kKept> seconds;
    int32_t count = 0;
    int32_t next = 0;
    float median = 0.0f;  // 0: never measured
  };

  static int32_t context_of(int64_t kv_tokens);
  static size_t at(int32_t rows, int32_t context) {
    return static_cast<size_t>(context * (kMostRows + 1) + rows);
  }
  double median(int32_t rows, int32_t context) const {
    return static_cast<double>(buckets_[at(rows, context)].median);
  }
  double in_context(int32_t rows, int32_t context) const;
  double from_other_context(int32_t rows, int32_t context) const;
  double from_other_rows(int32_t rows, int32_t context) const;

  std::vector<Bucket> buckets_;                // [kContexts][kMostRows + 1]
  std::array<int32_t, kContexts> least_ = {};  // rows of the smallest measured step; 0: none
};

}  // namespace effinfer::runtime
