// The fingerprint of a file's contents, remembered between processes.
#pragma once

#include <string>

#include "core/digest.h"
#include "effinfer/threads.h"
#include "effinfer/weights.h"

namespace effinfer::weights {

// Digests the file at `path`, which must still be in `state`. Looks in `folder` first, and writes
// what it computed there if it can. Throws FileError when the file is gone, changed or unreadable.
Digest file_digest(const std::string& path, const FileState& state, const std::string& folder,
                   ThreadPool& pool);

}  // namespace effinfer::weights
