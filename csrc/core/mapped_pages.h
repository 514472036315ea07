// Giving back the memory of a read-only file mapping.
#pragma once

#include <cstdint>
#include <span>

namespace effinfer {

// Drops the pages that hold `bytes`, which lie in a read-only mapping of a file: they come back
// from the file when they are read again. Neighbours on the same pages, read by other threads or
// not, are only slowed down. Never call this on memory without a file: its contents would be lost.
void drop_mapped_pages(std::span<const uint8_t> bytes);

}  // namespace effinfer
