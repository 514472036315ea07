// Pages of keys and values to 4 or 2 bits (ops/coded_pages.h).
#pragma once

#include <cstdint>
#include <string>

#include "ops/cost.h"
#include "ops/kv_layout.h"

namespace effinfer::ops {

struct PageCoding {
  int32_t from;       // a page of bf16 or f32
  int32_t to;         // a coded one
  int32_t place = 0;  // in its sequence, by which keys are turned that features are made of
};

// Each page in every layer, all of one shape. The same bits for any team.
struct EncodePagesProblem {
  const KvLayer* layers = nullptr;
  int64_t num_layers = 0;
  const PageCoding* pages = nullptr;
  int64_t num_pages = 0;
};

std::string describe(const EncodePagesProblem& problem);
const char* rejects(const EncodePagesProblem& problem);
Cost cost(const EncodePagesProblem& problem);

}  // namespace effinfer::ops
