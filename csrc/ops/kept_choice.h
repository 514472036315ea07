// What a row of a sequence has chosen, and the queries that chose it, in a plane of the sequence
// (effinfer/slot_plane.h), for rows behind it whose queries are alike (TokenSelect, Wu et al.,
// arXiv:2411.02886, the selection cache of section 3.4). A page has as many numbers as slots:
//
//   number   0, 1                2 ... 5 of page 0                             16 ... 63
//            the bits of its     the place behind the last row; the page of    the queries, 48 of
//            tokens that were    the one that chose; how many rows chose, and  them a page, from
//            chosen              how many visited what another one had chosen  page 0 on
//
// A choice holds while a sequence's rows follow each other and stay on the page of the one that
// chose, so that they choose from the same pages.
#pragma once

#include <cstdint>

#include "ops/kv_layout.h"

namespace effinfer::ops {

// Where these are in a KV head's plane.
struct KeptPlace {
  static constexpr int64_t kNext = 2, kPage = 3, kChosen = 4, kReused = 5;
  static constexpr int64_t kFirst = 16;
  static constexpr int64_t kOfPage = kPageSize - kFirst;

  static constexpr int64_t of_query(int64_t i) {
    return i / kOfPage * kPageSize + kFirst + i % kOfPage;
  }
  // Whether the pages before that of a row at a position have room for so many numbers of queries.
  static constexpr bool fits(int64_t size, int64_t position) {
    return (size + kOfPage - 1) / kOfPage <= position / kPageSize;
  }
};

}  // namespace effinfer::ops
