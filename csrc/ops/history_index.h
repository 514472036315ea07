// Choosing the pages that a generated row visits by what earlier rows gave them
// (AttentionPredictor, Yang et al., arXiv:2502.04077): of each page the highest probability that a
// row gave any of its keys, in logarithms, over the last rows, is what a small network makes the
// next row's of. Every so many rows one visits all keys, so that all pages are known again; between
// them a page that is not visited keeps what it had.
//
// A sequence's history is a plane of it (effinfer/slot_plane.h), in which a page has as many
// numbers as slots. Of a page whose keys are all there:
//
//   number   0 ... 31                          32 ... 34, of page 0
//            scores; that of the row at        the place behind the last row of the history; that
//            place p is number p % 32          of the last one that visited all; its whole pages
//
// A score is 14 + log2(probability), 0 of what is below: the highest over the page's keys and the
// KV head's query heads, each head's softmax over the whole pages that the row visited. What a page
// has for rows before it was whole is 0. A row whose predecessor is not the history's last visits
// all keys, and its scores are those of all rows before it, too: what a history holds is thus of
// its sequence's own rows, whoever shares their steps and however many are fed at once.
#pragma once

#include <cstdint>
#include <string>

#include "ops/cost.h"
#include "ops/page_index.h"

namespace effinfer::ops {

inline constexpr int32_t kHistoryRows = 32;
inline constexpr int32_t kHistoryChannels = 16;
inline constexpr int32_t kHistoryPages = 3;  // a page and its neighbours
inline constexpr float kLeastLog = 14.0f;    // probabilities of 2^-14 and less are 0
// The numbers of page 0 behind its scores.
inline constexpr int64_t kHistoryNext = kHistoryRows;
inline constexpr int64_t kHistoryAll = kHistoryRows + 1;
inline constexpr int64_t kHistoryWhole = kHistoryRows + 2;

// The network: hidden[c] = relu(bias[c] + sum of filter[n][a][c] * score(page + n - 1, a rows
// ago)), a page's score = sum of out[c] * hidden[c] + sum of direct[a] * score(page, a rows ago),
// where 0 rows ago is the row before.
//
//   filter [3][32][16]   bias [16]   out [16]   direct [32]
inline constexpr int64_t kHistoryFilter = int64_t{kHistoryPages} * kHistoryRows * kHistoryChannels;
inline constexpr int64_t kHistoryWeights = kHistoryFilter + 2 * kHistoryChannels + kHistoryRows;

// On a GPU, between the threads of a block, of a page and query head: its keys' highest logit, and
// the sum of their exponentials.
inline constexpr int32_t kHistoryPageScores = 2;

struct HistoryIndexProblem {
  // What it has in common with page_index, of unit 64; no bounds and no votes.
  // Rows of sequences without a plane visit all keys.
  PageIndexProblem pages;
  const float* network = nullptr;  // [kHistoryWeights]
  int32_t every = 1;               // one of so many rows visits all keys
};

std::string describe(const HistoryIndexProblem& problem);
Cost cost(const HistoryIndexProblem& problem);

}  // namespace effinfer::ops
