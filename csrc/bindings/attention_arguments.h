// Arguments that the attention operators share.
#pragma once

#include <string>

#include "bindings/arguments.h"
#include "bindings/device_array.h"
#include "effinfer/ops/attention.h"

namespace effinfer::bindings {

class AttentionArguments : public Arguments {
 public:
  using Arguments::Arguments;

  ops::KvOrder order(const std::string& layout) const {
    return named<ops::KvOrder>(layout, "kv_layout",
                               {{"NHD", ops::KvOrder::nhd}, {"HND", ops::KvOrder::hnd}});
  }

  // What natural logarithms are multiplied by.
  float lse_factor(const std::string& base) const {
    return named<float>(base, "lse_base", {{"log2", 1.44269504f}, {"ln", 1.0f}});
  }

  // A number for all, or an array with one for each token and head.
  void scale(const Object& given, const char* argument, float& number, StridedView& array) const {
    if (pybind11::isinstance<pybind11::array>(given) || pybind11::isinstance<DeviceArray>(given)) {
      array = strided(given, argument);
    } else {
      number = pybind11::cast<float>(given);
    }
  }

  // `k`: an array, or the engine's pages.
  ops::LogitInputs logits(const Object& q, const Object& k, const std::string& layout,
                          float sm_scale, float logits_soft_cap, const Object& k_scale) const {
    ops::LogitInputs inputs;
    inputs.q = strided(q, "q");
    if (pybind11::isinstance<ops::PagedKv>(k)) {
      inputs.kv = &pybind11::cast<const ops::PagedKv&>(k);
    } else {
      inputs.k = strided(k, "k");
    }
    inputs.order = order(layout);
    inputs.sm_scale = sm_scale;
    inputs.logits_soft_cap = logits_soft_cap;
    scale(k_scale, "k_scale", inputs.k_scale, inputs.k_scales);
    return inputs;
  }

  // The sequences of a call on the engine's pages.
  ops::PagedBatch batch(const pybind11::array& qo_indptr, const pybind11::array& kv_indptr,
                        const pybind11::array& kv_indices, const pybind11::array& kv_len) const {
    return {view(qo_indptr, "qo_indptr"), view(kv_indptr, "kv_indptr"),
            view(kv_indices, "kv_indices"), view(kv_len, "kv_len")};
  }

  // The sequences of a call as AttentionPlan takes them; `kv_indices` may be None.
  ops::AttentionSequences sequences(const pybind11::array& qo_indptr,
                                    const pybind11::array& kv_indptr, const Object& kv_indices,
                                    const pybind11::array& kv_len) const {
    return {view(qo_indptr, "qo_indptr"),
            view(kv_indptr, "kv_indptr"),
            optional(kv_indices, "kv_indices"),
            view(kv_len, "kv_len"),
            {},
            {}};
  }
};

}  // namespace effinfer::bindings
