// Packed weights kept on disk, so that later loads map them instead of packing.
//
//   CompileOptions::pack_cache = "folder"     one file a model and layout version in the folder
//
// What names a cached file is the contents of the model's files: a 128-bit fingerprint of every
// byte, and where each weight lies. A fingerprint is computed once a file and remembered with the
// file's inode, size and times; it is trusted while these are the same and were two seconds old
// when it was computed, since any write changes them. A cached file is checked in full when it is
// opened, at the speed of memory (of the disk, when it is not in memory yet); one that is damaged
// or of another layout is built anew. Storing one removes the files of older layout versions that
// hold the same weights, and nothing else. A folder that cannot be written costs the cache, not the
// load. The fingerprints guard against damage, not against someone who can write to the folder.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "effinfer/export.h"
#include "effinfer/graph.h"
#include "effinfer/threads.h"
#include "effinfer/weights.h"

namespace effinfer {

enum class PackCacheState : uint8_t {
  off,     // not asked for
  absent,  // not there: only of find_pack_cache()
  hit,     // the weights are mapped from it
  stored,  // the weights were packed, and the file was written
  failed   // the weights were packed, and the file could not be written or named: see `reason`
};
EFFINFER_API std::string_view name(PackCacheState state);

struct PackCacheReport {
  PackCacheState state = PackCacheState::off;
  std::string path;    // of the cached file; empty when it has no name
  std::string reason;  // why it is not a hit: "no such file", "damaged table", ...
};

// What compile() with this folder would find.
EFFINFER_API PackCacheReport find_pack_cache(const Graph& graph, const WeightSource& weights,
                                             const std::string& folder, ThreadPool& pool);

}  // namespace effinfer
