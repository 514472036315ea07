// Windows of rows for top-k, and where what it chose lies: on GPUs.
#pragma once

#include <cstdint>
#include <string>

#include "effinfer/dtype.h"
#include "ops/cost.h"

namespace effinfer::ops {

// Of `width` numbers; lengths and starts may be anything, windows lie within their rows.
struct WindowSpans {
  const int32_t* lengths = nullptr;  // [rows]; null: all
  const int32_t* starts = nullptr;   // [rows]; null: 0
  int64_t width = 0;
  bool mirrored = false;

  constexpr int64_t start(int64_t row) const {
    const int64_t given = starts == nullptr ? 0 : starts[row];
    return given < 0 ? 0 : given > width ? width : given;
  }
  constexpr int64_t length(int64_t row) const {
    const int64_t room = width - start(row);
    const int64_t given = lengths == nullptr ? room : lengths[row];
    return given < 0 ? 0 : given > room ? room : given;
  }
};

struct WindowRowsProblem {
  const void* x = nullptr;  // [rows, width], `stride` elements apart
  DType dtype = DType::f32;
  int64_t stride = 0;
  int64_t rows = 0;
  WindowSpans windows;
  float* out = nullptr;  // [rows, width]
};

struct PlaceChosenProblem {
  const int64_t* ids = nullptr;  // [rows, chosen], ascending
  int64_t rows = 0;
  int64_t chosen = 0;
  int64_t k = 0;  // of the outputs' rows
  WindowSpans windows;
  const int32_t* offsets = nullptr;  // [rows]; null: 0
  const int32_t* table = nullptr;    // [*, table_cols]; null: ids and offsets
  int64_t table_cols = 0;
  int32_t page_size = 1;
  const int32_t* row_to_batch = nullptr;  // [rows]; null: their own numbers
  const int32_t* first = nullptr;         // [rows]; null: 0
  int32_t* out = nullptr;                 // [rows, k]
  int32_t* raw = nullptr;                 // [rows, k], or null
};

// Pairs of a row's first and last ids, turned round unless they are sorted.
struct UnmirrorProblem {
  int64_t* ids = nullptr;     // [rows, k]
  void* values = nullptr;     // [rows, k]
  const void* x = nullptr;    // [rows, width]
  int32_t element_bytes = 4;  // or 2
  int64_t rows = 0;
  int64_t k = 0;
  int64_t width = 0;
  bool sorted = false;
};

std::string describe(const WindowRowsProblem& problem);
std::string describe(const PlaceChosenProblem& problem);
std::string describe(const UnmirrorProblem& problem);

}  // namespace effinfer::ops
