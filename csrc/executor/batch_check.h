// Everything that a step's input must be, checked before anything runs: kernels trust it.
#pragma once

#include <cstddef>

#include "effinfer/compiler.h"

namespace effinfer::executor {

struct BatchLimits {
  int64_t max_tokens = 0;
  int64_t max_sequences = 0;
  int64_t max_rows = 0;
  int64_t max_seq_len = 0;
  int64_t vocab_size = 0;  // of the logits
  int64_t num_ids = 0;     // rows of the smallest embedding table
  KvCacheConfig cache;     // what the graph needs; any number of pages
};

// Throws InvalidArgument naming the field.
void check_batch(const Batch& batch, const KvCacheConfig& cache, const BatchLimits& limits);
void check_size_of(const char* argument, size_t size, size_t expected);

}  // namespace effinfer::executor
