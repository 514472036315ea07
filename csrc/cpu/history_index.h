// What the driver of history_index hands to an ISA level, beside what chooses (cpu/page_index.h).
#pragma once

#include <cstdint>

#include "ops/history_index.h"

namespace effinfer::cpu {

struct HistoryTile {
  // ops::HistoryIndexProblem::network, whose filter and direct part are in the order of a page's
  // numbers, not of ages.
  const float* network;
  const float* history;  // of the first page, kPageSize numbers each
  int64_t num_pages;
  int64_t first;  // pages [first, end) get a score; a neighbour outside of num_pages counts nothing
  int64_t end;
  float* scores;  // [padded_scores(end - first)], lowest behind the last
};

struct HistoryKernels {
  void (*predict)(const HistoryTile&);
  // Of logits [group][64 * num_pages] the score of each page.
  void (*score_pages)(const float* logits, int64_t num_pages, int64_t group, float* scores);
};

}  // namespace effinfer::cpu
