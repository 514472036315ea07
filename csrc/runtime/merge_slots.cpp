// Slots that become one with others, weighted by how often each counts.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "effinfer/error.h"
#include "effinfer/residency.h"

namespace effinfer {
namespace {

using Slots = std::vector<int32_t>;

[[noreturn]] void fail(const std::string& what) {
  throw InvalidArgument("[merge_slots] " + what);
}

std::string into_of(size_t head) {
  return "into[" + std::to_string(head) + "]";
}

// Those that stay.
Slots kept_of(const Slots& into, size_t head, int64_t num_slots) {
  if (static_cast<int64_t>(into.size()) != num_slots) {
    fail(into_of(head) + ": expected " + std::to_string(num_slots) + " slots, got " +
         std::to_string(into.size()));
  }
  Slots kept;
  for (size_t slot = 0; slot < into.size(); ++slot) {
    const int32_t target = into[slot];
    if (target < 0 || target >= num_slots || into[static_cast<size_t>(target)] != target) {
      fail(into_of(head) + "[" + std::to_string(slot) +
           "]: expected a slot that goes into itself, got " + std::to_string(target));
    }
    if (target == static_cast<int32_t>(slot)) kept.push_back(target);
  }
  return kept;
}

// What goes into each slot that gets more than itself, and the logarithms of how often they count
// together.
void add_merges(const Slots& into, int32_t head, float* weights, std::vector<KvMerge>& merges) {
  std::vector<Slots> members(into.size());
  for (size_t slot = 0; slot < into.size(); ++slot) {
    members[static_cast<size_t>(into[slot])].push_back(static_cast<int32_t>(slot));
  }
  for (size_t slot = 0; slot < into.size(); ++slot) {
    if (members[slot].size() < 2) continue;
    double sum = 0.0;
    for (const int32_t each : members[slot]) sum += std::exp(double{weights[each]});
    KvMerge merge = {head, static_cast<int32_t>(slot), std::move(members[slot]), {}};
    for (const int32_t each : merge.slots) {
      merge.weights.push_back(static_cast<float>(std::exp(double{weights[each]}) / sum));
    }
    weights[slot] = static_cast<float>(std::log(sum));
    merges.push_back(std::move(merge));
  }
}

}  // namespace

void merge_slots(SequenceState& sequence, std::span<const std::vector<int32_t>> into,
                 std::string_view weights) {
  const SlotPlane plane = sequence.plane(weights);
  if (sequence.num_whole_groups() > 1) {
    throw Unsupported("[merge_slots] layers without a window have page tables of their own here " +
                      std::string("(layer_groups): expected one for all"));
  }
  if (static_cast<int64_t>(into.size()) != plane.num_heads) {
    fail("into: expected " + std::to_string(plane.num_heads) + " lists, got " +
         std::to_string(into.size()));
  }
  std::vector<Slots> kept;
  for (size_t head = 0; head < into.size(); ++head) {
    kept.push_back(kept_of(into[head], head, plane.num_slots));
    if (kept[head].size() == kept[0].size()) continue;
    fail(into_of(head) + ": expected " + std::to_string(kept[0].size()) +
         " slots that stay, as of the first head, got " + std::to_string(kept[head].size()));
  }
  std::vector<KvMerge> merges;
  std::vector<float> counts(static_cast<size_t>(plane.num_heads * plane.num_slots));
  for (int64_t head = 0; head < plane.num_heads; ++head) {
    float* row = counts.data() + head * plane.num_slots;
    std::copy_n(plane.values + head * plane.stride, plane.num_slots, row);
    add_merges(into[static_cast<size_t>(head)], static_cast<int32_t>(head), row, merges);
  }
  sequence.merge(0, merges);
  for (int64_t head = 0; head < plane.num_heads; ++head) {
    std::copy_n(counts.data() + head * plane.num_slots, plane.num_slots,
                plane.values + head * plane.stride);
  }
  sequence.retain(0, kept);
}

}  // namespace effinfer
