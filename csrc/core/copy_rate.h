// How fast a GPU's memory is.
#pragma once

namespace effinfer {

// Bytes a second at which the GPU of this index copies within its memory, each read and written:
// measured, in a few milliseconds. Throws OutOfMemory. As cuda_backend(), which is not null where
// this is called, it is csrc/cuda's.
double cuda_copy_rate(int index);

}  // namespace effinfer
