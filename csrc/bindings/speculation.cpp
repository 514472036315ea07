#include "bindings/speculation.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <vector>

#include "bindings/module.h"
#include "bindings/tokens.h"
#include "effinfer/error.h"

namespace effinfer::bindings {
namespace {

Draft make_draft(const py::object& tokens, const py::object& parents, const py::object& scores) {
  Draft draft;
  draft.tokens = to_tokens(tokens, "draft");
  if (parents.is_none()) {
    for (size_t i = 0; i < draft.tokens.size(); ++i) {
      draft.parents.push_back(static_cast<int32_t>(i) - 1);
    }
  } else {
    draft.parents = to_tokens(parents, "parents");
  }
  if (scores.is_none()) {
    draft.scores.assign(draft.tokens.size(), 0.5f);
    return draft;
  }
  try {
    draft.scores = scores.cast<std::vector<float>>();
  } catch (const py::cast_error&) {
    throw InvalidArgument("[speculation] scores: expected a sequence of numbers");
  }
  return draft;
}

Draft::Draw parse_draw(const std::string& text) {
  if (text == "none") return Draft::Draw::none;
  if (text == "with_replacement") return Draft::Draw::with_replacement;
  if (text == "without_replacement") return Draft::Draw::without_replacement;
  throw InvalidArgument(
      "[speculation] draw: expected \"none\", \"with_replacement\" or "
      "\"without_replacement\", got \"" +
      text + "\"");
}

std::string draw_name(const Draft& draft) {
  if (draft.draw == Draft::Draw::none) return "none";
  return draft.draw == Draft::Draw::with_replacement ? "with_replacement" : "without_replacement";
}

void set_candidates(Draft& draft, int32_t row, const std::map<int32_t, float>& probabilities) {
  if (row < 0 || row > draft.size()) {
    throw InvalidArgument("[speculation] row: expected 0.." + std::to_string(draft.size()) +
                          ", got " + std::to_string(row));
  }
  std::vector<Draft::Candidate> list;
  for (const auto& [token, probability] : probabilities) list.push_back({token, probability});
  draft.set_candidates(row, list);
}

std::map<int32_t, float> candidates_of(const Draft& draft, int32_t row) {
  std::map<int32_t, float> probabilities;
  if (row < 0) return probabilities;
  for (const Draft::Candidate& c : draft.candidates_of(row)) {
    probabilities[c.token] = c.probability;
  }
  return probabilities;
}

void register_draft(py::module_& m) {
  py::class_<Draft>(
      m, "Draft",
      "Tokens guessed to follow a text: a chain, or a tree in which node i follows\n"
      "node parents[i] (an earlier one; -1: the text's last token). scores: believed\n"
      "probability of each token after its parent, in [0, 1].")
      .def(py::init(&make_draft), py::arg("tokens") = py::tuple(), py::arg("parents") = py::none(),
           py::arg("scores") = py::none())
      .def("add", &Draft::add, py::arg("token"), py::arg("parent") = -1, py::arg("score") = 0.5f,
           "Adds a node; returns its number.")
      .def("child", &Draft::child, py::arg("parent"), py::arg("token"),
           "The child of a node with that token, or -1.")
      .def_property(
          "draw", &draw_name,
          [](Draft& draft, const std::string& text) { draft.draw = parse_draw(text); },
          "How children got their tokens: \"none\" (they were chosen), \"with_replacement\" or\n"
          "\"without_replacement\" (drawn, in their order).")
      .def("set_candidates", &set_candidates, py::arg("row"), py::arg("probabilities"),
           "What the children of a row were drawn from, a probability for each token that could\n"
           "have been. Row 0 is the root's, row i + 1 that of node i.")
      .def("candidates_of", &candidates_of, py::arg("row"), "The same; {}: they were chosen.")
      .def("__len__", &Draft::size)
      .def_readonly("tokens", &Draft::tokens)
      .def_readonly("parents", &Draft::parents)
      .def_readonly("scores", &Draft::scores);
}

Speculation make_speculation(const std::vector<py::object>& proposers, const py::object& verifier,
                             const py::object& controller) {
  Speculation speculation;
  for (const py::object& part : proposers) speculation.proposers.push_back(to_proposer(part));
  if (!verifier.is_none()) speculation.verifier = to_verifier(verifier);
  if (!controller.is_none()) speculation.controller = to_controller(controller);
  return speculation;
}

void register_native_parts(py::module_& m) {
  py::class_<Proposer, std::shared_ptr<Proposer>>(m, "Proposer", "A native proposer.")
      .def_property_readonly("name", [](const Proposer& p) { return std::string(p.name()); });
  py::class_<Verifier, std::shared_ptr<Verifier>>(m, "Verifier", "A native verifier.")
      .def_property_readonly("name", [](const Verifier& v) { return std::string(v.name()); })
      .def_property_readonly("guarantee",
                             [](const Verifier& v) { return std::string(name(v.guarantee())); });
  py::class_<DraftController, std::shared_ptr<DraftController>>(m, "DraftController",
                                                                "A native controller.")
      .def_property_readonly("name",
                             [](const DraftController& c) { return std::string(c.name()); });
  py::class_<ReplayVerifier, Verifier, std::shared_ptr<ReplayVerifier>>(
      m, "ReplayVerifier", "Emits given texts, whatever the logits say: for measurements.")
      .def(py::init<>())
      .def(
          "set",
          [](ReplayVerifier& verifier, RequestId request, const py::object& text) {
            verifier.set(request, to_tokens(text, "text"));
          },
          py::arg("request"), py::arg("text"), "The output of a request, as token ids.");
  m.def("match_verifier", &match_verifier);
  m.def("rejection_verifier", &rejection_verifier);
  m.def("traversal_verifier", &traversal_verifier);
  m.def("typical_verifier", &typical_verifier, py::arg("epsilon") = 0.09, py::arg("delta") = 0.3);
  m.def("cost_controller", &cost_controller, py::arg("most_nodes") = 24);
  m.def("fixed_controller", &fixed_controller, py::arg("count"));
  m.def(
      "suffix_proposer",
      [](int64_t shared_tokens, bool beside, const py::object& corpus) {
        return suffix_proposer({shared_tokens, beside, to_tokens(corpus, "corpus")});
      },
      py::arg("shared_tokens") = 0, py::arg("beside") = false, py::arg("corpus") = py::tuple());
  m.def("prompt_lookup_proposer", &prompt_lookup_proposer, py::arg("longest") = 3,
        py::arg("shortest") = 2, py::arg("length") = 8);
  m.def(
      "recycling_proposer",
      [](int32_t width, int32_t pairs, float memory) {
        return recycling_proposer({width, pairs, memory});
      },
      py::arg("width") = 8, py::arg("pairs") = 0, py::arg("memory") = 0.0f);
  m.def(
      "draft_model_proposer",
      [](const Graph& graph, const std::shared_ptr<WeightSource>& weights, bool of_target,
         int32_t length, int32_t width, int32_t num_pages, bool adaptive, const std::string& label,
         const std::string& device, const std::string& hidden, const std::vector<Graph>& deeper) {
        auto model = std::make_shared<Model>(Model{graph, weights});
        std::vector<std::shared_ptr<const Model>> models;
        models.reserve(deeper.size());
        for (const Graph& other : deeper) {
          models.push_back(std::make_shared<Model>(Model{other, weights}));
        }
        return draft_model_proposer({std::move(model), of_target, length, width, num_pages,
                                     adaptive, label, device, hidden, std::move(models)});
      },
      py::arg("graph"), py::arg("weights"), py::kw_only(), py::arg("of_target") = false,
      py::arg("length") = 7, py::arg("width") = 1, py::arg("num_pages") = 0,
      py::arg("adaptive") = true, py::arg("label") = "draft_model", py::arg("device") = "",
      py::arg("hidden") = "", py::arg("deeper") = std::vector<Graph>());
  m.def("lookahead_proposer", &lookahead_proposer, py::arg("width") = 4, py::arg("length") = 3);
}

}  // namespace

void register_speculation(py::module_& m) {
  register_draft(m);
  register_native_parts(m);
  register_speculation_parts(m);
  py::class_<Speculation>(
      m, "Speculation",
      "How an engine speculates: proposers whose drafts are merged, a verifier\n"
      "(None: match) and a controller (None: by cost), native or Python.")
      .def(py::init(&make_speculation), py::arg("proposers"), py::arg("verifier") = py::none(),
           py::arg("controller") = py::none());
}

}  // namespace effinfer::bindings
