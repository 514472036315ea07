// What happens to drafts between proposers and a step: they are checked, merged and planted.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "effinfer/speculative.h"

namespace effinfer::runtime {

// Memory for all nodes that a draft may have.
void reserve(Draft& draft);

// Ids of a draft's nodes: tokens below `vocab`; probes may have those up to `all`, rows of the
// model's embedding that no token has.
struct DraftIds {
  int64_t vocab = 0;
  int64_t all = 0;
};

// What is wrong with a proposer's draft; empty: nothing.
std::string trouble_of(const Draft& draft, int32_t max_nodes, const DraftIds& ids);

// Adds the nodes of a checked draft that `to` does not have, as far as the view has room for all.
void merge(const Draft& from, uint8_t source, const DraftView& view, Draft& to);

// A draft whose nodes were drawn, for a verifier that needs to know what from: with its candidates,
// its nodes in their order, and scores that say nothing of the tokens. `to` is empty.
void take_drawn(const Draft& from, uint8_t source, const DraftView& view, Draft& to);

// Of the kept nodes of a drawn draft those whose earlier siblings are kept too: a verifier has to
// know of all that were drawn before. Others are kept as they are.
uint64_t with_earlier_siblings(const Draft& draft, uint64_t keep);

// A draft in a step: a row for the request's last token, then one for each node, in preorder with
// the likeliest child first, so that the likeliest path lies in the cache as plain decoding's
// tokens would.
struct DraftTree {
  Draft draft;
  std::vector<uint64_t> words;  // [1 + nodes] Batch::ancestors
  std::vector<int32_t> depths;  // [1 + nodes] of the rows

  void reserve();
  void clear();            // leaves the root
  void cut(size_t nodes);  // leaves that many at most
  // Whether each node is the child of the one before it.
  bool is_chain() const;
};

struct TreePlace {
  int64_t root = 0;       // place of the request's last token in its sequence
  int64_t page_size = 0;  // of the cache
};

// The kept nodes of a draft. Those whose row would not lie on the page of plain decoding's row of
// that depth are left out with what descends from them: attention sums by the places in a page.
void plant(const Draft& draft, uint64_t keep, const TreePlace& place, DraftTree& tree);

}  // namespace effinfer::runtime
