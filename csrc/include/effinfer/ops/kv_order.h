// The layouts that FlashInfer's pages have.
#pragma once

#include <cstdint>

namespace effinfer::ops {

// Pages are [P, page_size, H, D] or [P, H, page_size, D].
enum class KvOrder : uint8_t { nhd, hnd };

}  // namespace effinfer::ops
