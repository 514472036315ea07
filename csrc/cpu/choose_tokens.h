// From scores to the tokens that a block of query rows visits: the methods of sparse attention,
// each once, for the engine's index kernels (cpu/prefill_index.cpp) and for operators over callers'
// arrays (cpu/token_lists.cpp). Nothing here allocates: sets and orders are the caller's memory.
#pragma once

#include <cstdint>

#include "cpu/token_set.h"
#include "effinfer/top_scores.h"
#include "ops/visits.h"

namespace effinfer::cpu {

// What a block visits whatever is chosen, with the keys at its rows' own positions; alone it is the
// A-shape (MInference, arXiv:2407.02490, section 3; StreamingLLM, arXiv:2309.17453).
struct AlwaysVisited {
  int32_t sink_tokens;   // the first keys
  int32_t local_tokens;  // the last ones up to each row
};
void add_always(const AlwaysVisited& always, const ops::VisitBlock& block, TokenSet to);

// Columns and slashes: keys that all blocks visit, and distances behind each row (MInference's
// vertical-slash, arXiv:2407.02490, section 3.2; without distances SampleAttention's columns,
// arXiv:2406.15486, section 4.2).
struct ChosenColumns {
  TokenSet keys;
  TokenSet distances;
};
// Add what one query head chooses of `count` scores; `order` has room for as many. The scores of
// distances are those of 0, 1, ... or of count - 1, count - 2, ..., which decides among equals.
enum class DistanceOrder { nearest_first, farthest_first };
void choose_keys(const float* scores, int64_t count, const TopScores& top, int32_t* order,
                 TokenSet to);
void choose_distances(const float* scores, int64_t count, DistanceOrder first, const TopScores& top,
                      int32_t* order, TokenSet to);
// Adds the keys, and those at a chosen distance of any of the block's rows.
void add_columns(const ChosenColumns& chosen, const ops::VisitBlock& block, TokenSet to);

// Adds the blocks of `size` keys (or pages) with the highest of `count` scores: MInference's
// block-sparse pattern, XAttention (arXiv:2503.16428), Quest (arXiv:2406.10774), by what the scores
// are. `order` has room for `count`.
void add_blocks(const float* scores, int64_t count, const TopScores& top, int64_t size,
                int32_t* order, TokenSet to);

}  // namespace effinfer::cpu
