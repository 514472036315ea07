#include "effinfer/sampling.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings/module.h"
#include "bindings/tokens.h"

namespace effinfer::bindings {
namespace {

using FloatArray = py::array_t<float, py::array::c_style | py::array::forcecast>;

std::span<const float> logits_span(const FloatArray& logits) {
  if (logits.ndim() != 1 || logits.size() == 0) {
    throw InvalidArgument("[sampling] logits: expected one row of at least one value");
  }
  return {logits.data(), static_cast<size_t>(logits.size())};
}

SamplingParams make_params(float temperature, int32_t top_k, float top_p, float min_p,
                           float typical_p, float repetition_penalty, float frequency_penalty,
                           float presence_penalty, const std::map<int32_t, float>& logit_bias,
                           uint64_t seed, int32_t max_tokens, std::vector<int32_t> stop_token_ids,
                           bool ignore_eos, int32_t logprobs, bool speculation) {
  SamplingParams params;
  params.temperature = temperature;
  params.top_k = top_k;
  params.top_p = top_p;
  params.min_p = min_p;
  params.typical_p = typical_p;
  params.repetition_penalty = repetition_penalty;
  params.frequency_penalty = frequency_penalty;
  params.presence_penalty = presence_penalty;
  params.logit_bias.assign(logit_bias.begin(), logit_bias.end());
  params.seed = seed;
  params.max_tokens = max_tokens;
  params.stop_token_ids = std::move(stop_token_ids);
  params.ignore_eos = ignore_eos;
  params.logprobs = logprobs;
  params.speculation = speculation;
  params.validate();
  return params;
}

std::string repr(const py::object& self) {
  std::string text;
  for (const char* field :
       {"temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty",
        "frequency_penalty", "presence_penalty", "logit_bias", "seed", "max_tokens",
        "stop_token_ids", "ignore_eos", "logprobs", "speculation"}) {
    if (!text.empty()) text.append(", ");
    text.append(field).append("=").append(py::repr(self.attr(field)).cast<std::string>());
  }
  return text.insert(0, "SamplingParams(").append(")");
}

void register_params(py::module_& m) {
  using P = SamplingParams;
  const P none;
  py::class_<P>(m, "SamplingParams",
                "How tokens are chosen. Filters run in the order: logit_bias, penalties,\n"
                "temperature, top_k, typical_p, top_p, min_p, draw.")
      .def(py::init(&make_params), py::kw_only(), py::arg("temperature") = none.temperature,
           py::arg("top_k") = none.top_k, py::arg("top_p") = none.top_p,
           py::arg("min_p") = none.min_p, py::arg("typical_p") = none.typical_p,
           py::arg("repetition_penalty") = none.repetition_penalty,
           py::arg("frequency_penalty") = none.frequency_penalty,
           py::arg("presence_penalty") = none.presence_penalty,
           py::arg("logit_bias") = std::map<int32_t, float>{}, py::arg("seed") = none.seed,
           py::arg("max_tokens") = none.max_tokens,
           py::arg("stop_token_ids") = std::vector<int32_t>{},
           py::arg("ignore_eos") = none.ignore_eos, py::arg("logprobs") = none.logprobs,
           py::arg("speculation") = none.speculation)
      .def_readwrite("temperature", &P::temperature)
      .def_readwrite("top_k", &P::top_k)
      .def_readwrite("top_p", &P::top_p)
      .def_readwrite("min_p", &P::min_p)
      .def_readwrite("typical_p", &P::typical_p)
      .def_readwrite("repetition_penalty", &P::repetition_penalty)
      .def_readwrite("frequency_penalty", &P::frequency_penalty)
      .def_readwrite("presence_penalty", &P::presence_penalty)
      .def_property(
          "logit_bias",
          [](const P& p) {
            return std::map<int32_t, float>(p.logit_bias.begin(), p.logit_bias.end());
          },
          [](P& p, const std::map<int32_t, float>& bias) {
            p.logit_bias.assign(bias.begin(), bias.end());
          })
      .def_readwrite("seed", &P::seed)
      .def_readwrite("max_tokens", &P::max_tokens)
      .def_readwrite("stop_token_ids", &P::stop_token_ids)
      .def_readwrite("ignore_eos", &P::ignore_eos)
      .def_readwrite("logprobs", &P::logprobs, "-1: none; n: of the token and the n likeliest")
      .def_readwrite("speculation", &P::speculation, "whether the engine may draft")
      .def("validate", &P::validate, py::arg("vocab_size") = 0)
      .def("__repr__", &repr)
      .def("__copy__", [](const P& p) { return P(p); })
      .def("__deepcopy__", [](const P& p, const py::dict&) { return P(p); });
}

}  // namespace

void register_sampling(py::module_& m) {
  register_params(m);
  py::class_<SampledToken>(m, "SampledToken")
      .def_readonly("token", &SampledToken::token)
      .def_readonly("logprob", &SampledToken::logprob)
      .def_property_readonly("top", [](const SampledToken& s) {
        py::list top;
        for (const TokenLogprob& entry : s.top)
          top.append(py::make_tuple(entry.token, entry.logprob));
        return top;
      });
  py::class_<Sampler>(m, "Sampler", "From one row of logits to a token.")
      .def(py::init<>())
      .def(
          "sample",
          [](Sampler& sampler, const FloatArray& logits, const SamplingParams& params,
             const py::object& prompt, const py::object& output, uint64_t index) {
            return sampler.sample(logits_span(logits), params, to_tokens(prompt, "prompt"),
                                  to_tokens(output, "output"), index);
          },
          py::arg("logits"), py::arg("params"), py::arg("prompt") = py::tuple(),
          py::arg("output") = py::tuple(), py::arg("index") = 0)
      .def(
          "distribution",
          [](Sampler& sampler, const FloatArray& logits, const SamplingParams& params,
             const py::object& prompt, const py::object& output) {
            py::array_t<float> out(logits.size());
            sampler.distribution(logits_span(logits), params, to_tokens(prompt, "prompt"),
                                 to_tokens(output, "output"),
                                 {out.mutable_data(), static_cast<size_t>(out.size())});
            return out;
          },
          py::arg("logits"), py::arg("params"), py::arg("prompt") = py::tuple(),
          py::arg("output") = py::tuple(),
          "float32 [vocab]: the probabilities that sample() draws from.");
}

}  // namespace effinfer::bindings
