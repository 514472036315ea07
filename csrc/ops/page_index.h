// Choosing the keys that generated rows visit (ops/visits.h): page_index, units of 16, 32 or 64
// keys by what bounds these (Quest, Tang et al., arXiv:2406.10774, section 3.3), or pages or units
// of 16 by means of their keys (InfLLM v2, of MiniCPM4, arXiv:2506.07900, and Squeezed Attention,
// Hooper et al., arXiv:2411.09688); and key_index, single keys by their own
// products with the queries, of all channels or of some (TokenSelect, Wu et al., arXiv:2411.02886;
// Double Sparsity, Yang et al., arXiv:2408.07092). effinfer/ops/visits.h has the rules.
//
// A row at a position of page o:
//
//   page     0 ... sinks     ...              o - 2    o - 1     o
//            visited         chosen from               visited   visited, up to the row
//
// Pages that lie within the local tokens are visited and not chosen from, either. With a window
// it is chosen from pages that the row's window holds whole; of the page that the window cuts its
// keys are visited. Pages before that may be freed: nothing reads them.
//
// Tokens of one step are 64 at most, so what is chosen from was there before the step, whichever
// of its rows asks: a row chooses alike alone, as a draft, and fed again behind others. A row of a
// tree visits all pages that the tree lies in, as its path's products are summed in an order of
// their own.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "effinfer/ops/visits.h"
#include "effinfer/slot_plane.h"
#include "ops/attention_mass.h"
#include "ops/cost.h"
#include "ops/kv_layout.h"
#include "ops/prefill_index.h"
#include "ops/visits.h"

namespace effinfer::ops {

// Keys that have a mean: two neighbours' is that of a window of 32, every 16 keys.
inline constexpr int64_t kMeanUnit = 16;

// The first key that a row's window shows; window_left -1: there is none.
constexpr int64_t first_shown(int32_t window_left, const VisitBlock& row) {
  const int64_t first = window_left < 0 ? 0 : int64_t{row.position} - window_left;
  return first > 0 ? first : 0;
}
constexpr PageCandidates candidates_of(int32_t sink_tokens, int32_t local_tokens,
                                       const VisitBlock& row, int32_t window_left = -1) {
  const int64_t sinks = sink_tokens / kPageSize;
  const int64_t shown = (first_shown(window_left, row) + kPageSize - 1) / kPageSize;
  const int64_t first = sinks > shown ? sinks : shown;
  const int64_t local = local_tokens > 0 ? row.position + 1 - local_tokens : row.position;
  const int64_t behind = local > 0 ? (local + kPageSize - 1) / kPageSize : 0;
  const int64_t newest = row.position / kPageSize - 1;
  const int64_t end = behind < newest ? behind : newest;
  return {first, end > first ? end : first};
}

// Planes of sequences of a step in which an index keeps what later rows want.
struct SequencePlanes {
  std::string_view name;
  const ScoredRows* scored = nullptr;
  int64_t num_scored = 0;
  int32_t first_head = 0;  // of a plane, for KV head 0 of this layer
  // On a GPU: those of this name in its memory, planes in memory that it shares with the host.
  const MassRows* rows = nullptr;
  int32_t num_rows = 0;

  // The numbers of a KV head; null: the sequence has no such plane.
  float* of(int64_t sequence, int64_t kv_head) const {
    for (int64_t i = 0; i < num_scored; ++i) {
      const ScoredRows& each = scored[i];
      if (each.sequence != sequence || each.name != name) continue;
      return each.plane.values + (first_head + kv_head) * each.plane.stride;
    }
    return nullptr;
  }
};

struct PageIndexProblem {
  const float* q = nullptr;  // [T, num_qo_heads, head_dim], roped
  int64_t q_stride = 0;      // floats between rows
  int32_t num_qo_heads = 0;
  KvLayer kv;  // without bounds of its pages they are made each time
  BatchLayout batch;
  VisitPlan visits;
  float sm_scale = 1.0f;
  int32_t sink_tokens = 0;
  int32_t local_tokens = 0;
  int32_t min_tokens = 0;    // of those that the row's window shows
  int32_t window_left = -1;  // as attention's
  int32_t unit = kPageSize;  // keys that are chosen together, by bounds; 1: by their own products
  int32_t keys = 0;          // how many are chosen, in whole units,
  float share = 0.0f;        // or which share of the units, whichever is more
  HeadVote vote = HeadVote::highest;
  bool means = false;                  // of unit 16 or 64: by means, in place of bounds
  const int32_t* channels = nullptr;   // [num_kv_heads][num_channels], ascending; of unit 1
  int32_t num_channels = 0;            // 0: all
  const IndexedHead* heads = nullptr;  // [num_kv_heads]
  int32_t max_kv_len = 0;              // of any step, for the scratch
  // Above 0 a row visits what one before it has chosen, while the cosine of their queries is more:
  float reuse = 0.0f;
  SequencePlanes planes = {};  // of sequences without one every row chooses

  constexpr int32_t group() const { return num_qo_heads / kv.num_kv_heads; }
  constexpr bool has_bounds() const { return unit > 1; }  // or means
  // Whether pages are chosen by windows of neighbours, rather than units by their own means.
  constexpr bool has_windows() const { return means && unit == kPageSize; }
  // Keys of which there are bounds, or a mean.
  constexpr int64_t summary_unit() const { return means ? kMeanUnit : unit; }
  constexpr int64_t summary_vectors() const { return means ? 1 : 2; }
};

constexpr PageCandidates candidates_of(const PageIndexProblem& p, const VisitBlock& row) {
  return candidates_of(p.sink_tokens, p.local_tokens, row, p.window_left);
}
// Of `units` of them, how many it visits.
constexpr int64_t chosen_units(const PageIndexProblem& p, int64_t units) {
  return units_within(p.keys, p.share, p.unit, units);
}
constexpr bool visits_all(const PageIndexProblem& p, const VisitBlock& row) {
  const int64_t units = candidates_of(p, row).count() * (kPageSize / p.unit);
  const int64_t shown = row.position + 1 - first_shown(p.window_left, row);
  return shown < p.min_tokens || chosen_units(p, units) == units;
}

std::string describe(const PageIndexProblem& problem);
Cost cost(const PageIndexProblem& problem);

}  // namespace effinfer::ops
