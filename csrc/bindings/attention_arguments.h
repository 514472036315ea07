// Arguments that the attention operators share.
#pragma once

#include <pybind11/numpy.h>

#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "effinfer/error.h"
#include "effinfer/ops/attention.h"
#include "effinfer/ops/block_lists.h"

namespace effinfer::bindings {

inline ops::KvOrder order_of(const std::string& op, const std::string& layout) {
  if (layout == "NHD") return ops::KvOrder::nhd;
  if (layout == "HND") return ops::KvOrder::hnd;
  throw InvalidArgument("[" + op + "] kv_layout: expected NHD or HND, got " + layout);
}

// What natural logarithms are multiplied by.
inline float lse_factor(const std::string& op, const std::string& base) {
  if (base == "log2") return 1.44269504f;
  if (base == "ln") return 1.0f;
  throw InvalidArgument("[" + op + "] lse_base: expected log2 or ln, got " + base);
}

// A view without data for None.
inline StridedView optional_strided(const pybind11::object& array, const std::string& argument) {
  if (array.is_none()) return {};
  return strided_view_of(pybind11::cast<pybind11::array>(array), argument);
}

template <class T>
pybind11::array_t<T> array_of(const std::vector<T>& values,
                              std::vector<pybind11::ssize_t> shape = {}) {
  if (shape.empty()) shape = {static_cast<pybind11::ssize_t>(values.size())};
  return pybind11::array_t<T>(shape, values.data());
}

// The sequences of a call, as AttentionPlan takes them.
inline ops::AttentionSequences sequences_of(const std::string& op, const pybind11::array& qo_indptr,
                                            const pybind11::array& kv_indptr,
                                            const pybind11::object& kv_indices,
                                            const pybind11::array& kv_len) {
  ops::AttentionSequences sequences;
  sequences.qo_indptr = view_of(qo_indptr, "[" + op + "] qo_indptr");
  sequences.kv_indptr = view_of(kv_indptr, "[" + op + "] kv_indptr");
  sequences.kv_indices = optional_view(kv_indices, "[" + op + "] kv_indices");
  sequences.kv_len = view_of(kv_len, "[" + op + "] kv_len");
  return sequences;
}

}  // namespace effinfer::bindings
