// The sequences of a call on the engine's pages.
#pragma once

#include <string>

#include "bindings/arrays.h"
#include "effinfer/ops/paged_kv.h"

namespace effinfer::bindings {

inline ops::PagedBatch batch_of(const std::string& op, const pybind11::array& qo_indptr,
                                const pybind11::array& kv_indptr, const pybind11::array& kv_indices,
                                const pybind11::array& kv_len) {
  const std::string prefix = "[" + op + "] ";
  return {view_of(qo_indptr, prefix + "qo_indptr"), view_of(kv_indptr, prefix + "kv_indptr"),
          view_of(kv_indices, prefix + "kv_indices"), view_of(kv_len, prefix + "kv_len")};
}

}  // namespace effinfer::bindings
