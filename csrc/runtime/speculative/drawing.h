// Tokens that are drawn from what a draft model believes, and what they are drawn from.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "effinfer/speculative.h"

namespace effinfer::runtime {

// The distribution that tokens behind a row are drawn from, of its highest logits (highest first):
// temperature, top-k, top-p and min-p as the request's own are narrowed, at most
// Draft::kMostCandidates tokens. Any distribution is right; one near to the target's is accepted.
void find_candidates(std::span<const float> logits, std::span<const int32_t> tokens,
                     const SamplingParams& params, std::vector<Draft::Candidate>& out);

// The next child of a row: `siblings` are the tokens of those before it, `uniform` is in [0, 1).
// -1: nothing is left to draw.
int32_t draw_child(std::span<const Draft::Candidate> candidates, Draft::Draw draw,
                   std::span<const int32_t> siblings, double uniform);

}  // namespace effinfer::runtime
