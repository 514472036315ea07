// How a team shares element-by-element work on rows.
#pragma once

#include "cpu/vectors/row_vectors.h"
#include "effinfer/threads.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// Calls visit(row, begin, count) for pieces of rows; a chunk is several whole rows or part of one.
template <class Visit>
void for_pieces(int64_t rows, int64_t cols, Team& team, Visit&& visit) {
  const int64_t chunk_rows = cols < kRowChunk ? kRowChunk / cols : 1;
  const int64_t parts = (cols + kRowChunk - 1) / kRowChunk;
  const int64_t row_chunks = (rows + chunk_rows - 1) / chunk_rows;
  team.for_chunks(row_chunks * parts, [&](int64_t chunk) {
    const int64_t first = chunk / parts * chunk_rows;
    const int64_t last = first + chunk_rows < rows ? first + chunk_rows : rows;
    const int64_t begin = chunk % parts * kRowChunk;
    const int64_t count = cols - begin < kRowChunk ? cols - begin : kRowChunk;
    for (int64_t row = first; row < last; ++row) visit(row, begin, count);
  });
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
