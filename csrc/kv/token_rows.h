// K and V of one token of one head, in a host's pages: moved as they lie, or as floats.
#pragma once

#include <cstdint>

#include "ops/kv_layers.h"

namespace effinfer::kv {

// A head's row of a token.
struct TokenRow {
  const ops::KvLayer& kv;
  int64_t head;
  ops::TokenPlace place;
};
// Of layers of one type and head_dim. Keeps the bits, and the scales of i8.
void copy_token(const TokenRow& from, const TokenRow& to);

// float[head_dim]. Writing rounds to the type of the cache as appending does: to nearest even, of
// i8 with a scale of the largest magnitude / 127.
void read_key(const ops::KvLayer& kv, int64_t head, ops::TokenPlace from, float* out);
void read_value(const ops::KvLayer& kv, int64_t head, ops::TokenPlace from, float* out);
void write_key(const ops::KvLayer& kv, int64_t head, const float* key, ops::TokenPlace to);
void write_value(const ops::KvLayer& kv, int64_t head, const float* value, ops::TokenPlace to);

}  // namespace effinfer::kv
