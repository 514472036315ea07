// The two ways in which a draft model drafts: on the target's threads before its step, and on a
// device of its own beside it.
#pragma once

#include <memory>
#include <string_view>

#include "effinfer/speculative.h"

namespace effinfer::runtime {

inline constexpr std::string_view kInUse =
    "[draft_model] engine: expected one that no other engine has, got one that is in use: its "
    "pages follow requests, make another";

std::shared_ptr<Proposer> draft_ahead_proposer(const DraftModelOptions& options);

}  // namespace effinfer::runtime
