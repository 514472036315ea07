#include "effinfer/sampling.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <string>

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

// The fields, in the order of their signature, with the types that stubs give them and the words of
// errors.
struct Field {
  const char* name;
  const char* type;
  const char* expected;
};
constexpr const char* kInts = "collections.abc.Sequence[int]";
constexpr Field kFields[] = {
    {"temperature", "float", "a number"},
    {"top_k", "int", "an integer"},
    {"top_p", "float", "a number"},
    {"min_p", "float", "a number"},
    {"typical_p", "float", "a number"},
    {"repetition_penalty", "float", "a number"},
    {"frequency_penalty", "float", "a number"},
    {"presence_penalty", "float", "a number"},
    {"logit_bias", "collections.abc.Mapping[int, float]", "numbers by token id"},
    {"bad_words", "collections.abc.Sequence[collections.abc.Sequence[int]]", "lists of token ids"},
    {"dry_multiplier", "float", "a number"},
    {"dry_base", "float", "a number"},
    {"dry_allowed_length", "int", "an integer"},
    {"dry_penalty_last_n", "int", "an integer"},
    {"dry_sequence_breakers", kInts, "token ids"},
    {"top_n_sigma", "float", "a number"},
    {"xtc_probability", "float", "a number"},
    {"xtc_threshold", "float", "a number"},
    {"mirostat", "int", "an integer"},
    {"mirostat_tau", "float", "a number"},
    {"mirostat_eta", "float", "a number"},
    {"seed", "int", "an integer from 0 to 2^64 - 1"},
    {"max_tokens", "int", "an integer"},
    {"stop_token_ids", kInts, "token ids"},
    {"ignore_eos", "bool", "True or False"},
    {"logprobs", "int", "an integer"},
    {"prompt_logprobs", "int", "an integer"},
    {"speculation", "bool", "True or False"},
    {"techniques", "collections.abc.Sequence[str] | None", "names of techniques"},
};

SamplingParams make_params(const py::kwargs& keywords) {
  SamplingParams params;
  const py::object self = py::cast(&params, py::return_value_policy::reference);
  for (const auto& [key, value] : keywords) {
    const auto name = key.cast<std::string>();
    const auto* field = std::find_if(std::begin(kFields), std::end(kFields),
                                     [&](const Field& known) { return name == known.name; });
    if (field == std::end(kFields)) {
      throw py::type_error("SamplingParams: unexpected keyword argument '" + name + "'");
    }
    try {
      py::setattr(self, field->name, value);
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      throw InvalidArgument("[sampling] " + name + ": expected " + field->expected + ", got " +
                            py::repr(value).cast<std::string>());
    }
  }
  params.validate();
  return params;
}

std::string repr(const py::object& self) {
  std::string text;
  for (const Field& field : kFields) {
    if (!text.empty()) text.append(", ");
    text.append(field.name).append("=");
    text.append(py::repr(self.attr(field.name)).cast<std::string>());
  }
  return text.insert(0, "SamplingParams(").append(")");
}

template <class Class>
void register_fields(Class& params) {
  using P = SamplingParams;
  params.def_readwrite("temperature", &P::temperature)
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
      .def_readwrite("bad_words", &P::bad_words, "as tokens")
      .def_readwrite("dry_multiplier", &P::dry_multiplier)
      .def_readwrite("dry_base", &P::dry_base)
      .def_readwrite("dry_allowed_length", &P::dry_allowed_length)
      .def_readwrite("dry_penalty_last_n", &P::dry_penalty_last_n)
      .def_readwrite("dry_sequence_breakers", &P::dry_sequence_breakers, "token ids, ascending")
      .def_readwrite("top_n_sigma", &P::top_n_sigma)
      .def_readwrite("xtc_probability", &P::xtc_probability)
      .def_readwrite("xtc_threshold", &P::xtc_threshold)
      .def_readwrite("mirostat", &P::mirostat)
      .def_readwrite("mirostat_tau", &P::mirostat_tau)
      .def_readwrite("mirostat_eta", &P::mirostat_eta)
      .def_readwrite("seed", &P::seed)
      .def_readwrite("max_tokens", &P::max_tokens)
      .def_readwrite("stop_token_ids", &P::stop_token_ids)
      .def_readwrite("ignore_eos", &P::ignore_eos)
      .def_readwrite("logprobs", &P::logprobs, "-1: none; n: of the token and the n likeliest")
      .def_readwrite("prompt_logprobs", &P::prompt_logprobs, "the same of the prompt's tokens")
      .def_readwrite("speculation", &P::speculation, "whether the engine may draft")
      .def_readwrite("techniques", &P::techniques, "of the engine's, by name; None: all");
}

void register_params(py::module_& m) {
  using P = SamplingParams;
  py::class_<P> params(m, "SamplingParams",
                       "How tokens are chosen. Filters run in the order: logit_bias, bad_words,\n"
                       "penalties, DRY, top_n_sigma, temperature, top_k, typical_p, top_p, min_p,\n"
                       "XTC, mirostat, draw.");
  register_fields(params);
  std::string signature = "__init__(self: effinfer._core.SamplingParams, *";
  const py::object none = py::cast(P{});
  for (const Field& field : kFields) {
    signature.append(", ").append(field.name).append(": ").append(field.type).append(" = ");
    signature.append(py::repr(none.attr(field.name)).cast<std::string>());
  }
  signature.append(") -> None");
  {
    py::options docstrings;
    docstrings.disable_function_signatures();  // one of keyword arguments would name none of them
    params.def(py::init(&make_params), signature.c_str());
  }
  params.def("validate", &P::validate, py::arg("vocab_size") = 0)
      .def("is_plain", &P::is_plain,
           "Whether temperature, top-k, typical, top-p and min-p alone choose, and no "
           "log-probability\nis told.")
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
  py::class_<Mirostat>(m, "Mirostat", "What mirostat remembers of a text.")
      .def(py::init<>())
      .def_readwrite("most_bits", &Mirostat::most_bits, "of surprise; None: nothing was drawn");
  py::class_<Sampler>(m, "Sampler", "From one row of logits to a token.")
      .def(py::init<>())
      .def(
          "sample",
          [](Sampler& sampler, const FloatArray& logits, const SamplingParams& params,
             const py::object& prompt, const py::object& output, uint64_t index,
             Mirostat* mirostat) {
            return sampler.sample(logits_span(logits), params, to_tokens(prompt, "prompt"),
                                  to_tokens(output, "output"), index, {}, mirostat);
          },
          py::arg("logits"), py::arg("params"), py::arg("prompt") = py::tuple(),
          py::arg("output") = py::tuple(), py::arg("index") = 0, py::arg("mirostat") = nullptr)
      .def(
          "distribution",
          [](Sampler& sampler, const FloatArray& logits, const SamplingParams& params,
             const py::object& prompt, const py::object& output, uint64_t index,
             const Mirostat* mirostat) {
            py::array_t<float> out(logits.size());
            sampler.distribution(logits_span(logits), params, to_tokens(prompt, "prompt"),
                                 to_tokens(output, "output"),
                                 {out.mutable_data(), static_cast<size_t>(out.size())}, {}, index,
                                 mirostat);
            return out;
          },
          py::arg("logits"), py::arg("params"), py::arg("prompt") = py::tuple(),
          py::arg("output") = py::tuple(), py::arg("index") = 0, py::arg("mirostat") = nullptr,
          "float32 [vocab]: the probabilities that sample() draws from.");
}

}  // namespace effinfer::bindings
