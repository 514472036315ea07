// Everything that a step's input must be, checked before anything runs: kernels trust it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "effinfer/compiler.h"
#include "executor/program.h"

namespace effinfer::executor {

struct BatchLimits {
  int64_t max_tokens = 0;
  int64_t max_sequences = 0;
  int64_t max_rows = 0;
  int64_t max_seq_len = 0;
  int64_t vocab_size = 0;       // of the logits
  int64_t num_ids = 0;          // rows of the smallest embedding table
  KvCacheConfig cache;          // what the graph needs; any number of pages
  std::vector<int32_t> layers;  // of the cache, that the graph reads and writes
  bool chooses_keys = false;    // whether the graph has nodes that read pages to choose some
};

// Throws InvalidArgument naming the field.
void check_batch(const Batch& batch, const KvCacheConfig& cache, const BatchLimits& limits);
// The batch's float inputs into their buffers. Throws InvalidArgument for one that is missing,
// unknown or given twice, of another size, or not finite.
void copy_inputs(const Batch& batch, std::span<const InputBuffer> buffers);
void check_size_of(const char* argument, size_t size, size_t expected);

}  // namespace effinfer::executor
