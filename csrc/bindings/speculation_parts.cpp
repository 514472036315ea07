#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/held.h"
#include "bindings/module.h"
#include "bindings/speculation.h"
#include "effinfer/error.h"

namespace effinfer::bindings {
namespace {

// Throws InvalidArgument for a value of another type.
template <class T>
T attribute(const py::object& part, const char* name, T fallback) {
  if (!py::hasattr(part, name)) return fallback;
  const py::object value = part.attr(name);
  try {
    return value.cast<T>();
  } catch (const py::cast_error&) {
    constexpr const char* kind = std::is_same_v<T, bool>      ? "a bool"
                                 : std::is_same_v<T, int32_t> ? "an integer"
                                                              : "a list of strings";
    throw InvalidArgument(std::string("[speculation] ") + name + ": expected " + kind + ", got " +
                          py::repr(value).cast<std::string>());
  }
}

py::array_t<int32_t> array_of(std::span<const int32_t> values) {
  return py::array_t<int32_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::object draft_or_none(const Draft* draft) {
  return draft == nullptr ? py::object(py::none()) : py::cast(Draft(*draft));
}

py::dict view_dict(const DraftView& view) {
  py::dict dict;
  dict["request"] = view.request;
  dict["tokens"] = array_of(view.tokens);
  dict["prompt_size"] = view.prompt_size;
  dict["params"] = SamplingParams(*view.params);
  dict["max_nodes"] = view.max_nodes;
  dict["max_depth"] = view.max_depth;
  dict["draws"] = view.draws;
  dict["same_text"] = view.same_text;
  return dict;
}

py::dict facts_dict(const StepFacts& facts) {
  py::dict dict;
  dict["request"] = facts.request;
  dict["tokens"] = array_of(facts.tokens);
  dict["prompt_size"] = facts.prompt_size;
  dict["num_emitted"] = facts.num_emitted;
  dict["proposed"] = draft_or_none(facts.proposed);
  dict["verified"] = draft_or_none(facts.verified);
  dict["accepted"] = array_of(facts.accepted);
  const py::ssize_t k = facts.top.k;
  const auto shape = [&](size_t size) {
    return std::vector<py::ssize_t>{k == 0 ? 0 : static_cast<py::ssize_t>(size) / k, k};
  };
  dict["top_values"] = py::array_t<float>(shape(facts.top.values.size()), facts.top.values.data());
  dict["top_tokens"] =
      py::array_t<int32_t>(shape(facts.top.tokens.size()), facts.top.tokens.data());
  py::dict outputs;
  for (const OutputRows& output : facts.outputs) {
    const NamedRows rows = facts.output(output.name);
    const auto cols = static_cast<py::ssize_t>(rows.cols);
    outputs[py::str(std::string(output.name))] = py::array_t<float>(
        {static_cast<py::ssize_t>(rows.values.size()) / cols, cols}, rows.values.data());
  }
  dict["outputs"] = outputs;
  return dict;
}

template <class Items, class ToPython>
py::list list_of(const Items& items, const ToPython& to_python) {
  py::list list;
  for (const auto& item : items) list.append(to_python(item));
  return list;
}

class PythonProposer final : public Proposer {
 public:
  explicit PythonProposer(const py::object& part) : part_(part) {
    top_k_ = attribute<int32_t>(part, "top_k", 0);
    outputs_ = attribute<std::vector<std::string>>(part, "outputs", {});
  }
  std::string_view name() const override { return part_.name(); }
  int32_t top_k() const override { return top_k_; }
  std::vector<std::string> outputs() const override { return outputs_; }
  void propose(std::span<const DraftView> views, std::span<Draft> drafts) override {
    part_.with("propose", [&](const py::object& method) {
      const auto answers = method(list_of(views, view_dict)).cast<std::vector<py::object>>();
      if (answers.size() != drafts.size()) {
        throw Error("expected " + std::to_string(drafts.size()) + " drafts, got " +
                    std::to_string(answers.size()));
      }
      for (size_t i = 0; i < drafts.size(); ++i) {
        if (answers[i].is_none()) continue;
        const auto& draft = answers[i].cast<const Draft&>();
        drafts[i].tokens = draft.tokens;
        drafts[i].parents = draft.parents;
        drafts[i].scores = draft.scores;
        drafts[i].draw = draft.draw;
        drafts[i].candidates = draft.candidates;
        drafts[i].ranges = draft.ranges;
      }
    });
  }
  void observe(std::span<const StepFacts> facts) override {
    part_.with("observe", [&](const py::object& method) { method(list_of(facts, facts_dict)); });
  }
  void forget(RequestId request) override {
    part_.with("forget", [&](const py::object& method) { method(request); });
  }

 private:
  Held part_;
  int32_t top_k_ = 0;
  std::vector<std::string> outputs_;
};

// TokenRows while verify() runs.
struct RowsOfCall {
  TokenRows* rows = nullptr;
  TokenRows& get() const {
    if (rows == nullptr) throw InvalidArgument("[speculation] rows: expected a call of verify()");
    return *rows;
  }
};

class PythonVerifier final : public Verifier {
 public:
  explicit PythonVerifier(const py::object& part) : part_(part) {
    const auto text = py::str(py::getattr(part, "guarantee", py::str("lossy"))).cast<std::string>();
    for (const Guarantee known :
         {Guarantee::same_text, Guarantee::same_distribution, Guarantee::lossy}) {
      if (effinfer::name(known) == text) guarantee_ = known;
    }
    if (effinfer::name(guarantee_) != text) {
      throw InvalidArgument(
          "[speculation] guarantee: expected \"same_text\", \"same_distribution\" or \"lossy\", "
          "got \"" +
          text + "\"");
    }
    needs_ = attribute<bool>(part, "needs_distributions", false);
    probabilities_ = attribute<bool>(part, "needs_probabilities", false);
  }
  std::string_view name() const override { return part_.name(); }
  Guarantee guarantee() const override { return guarantee_; }
  bool needs_distributions() const override { return needs_; }
  bool needs_probabilities() const override { return probabilities_; }
  void verify(const Draft& draft, TokenRows& rows) override {
    part_.with("verify", [&](const py::object& method) {
      const py::object handle = py::cast(RowsOfCall{&rows});
      const auto end = [&] { handle.cast<RowsOfCall&>().rows = nullptr; };
      try {
        method(Draft(draft), handle);
      } catch (...) {
        end();
        throw;
      }
      end();
    });
  }
  void forget(RequestId request) override {
    part_.with("forget", [&](const py::object& method) { method(request); });
  }

 private:
  Held part_;
  Guarantee guarantee_ = Guarantee::lossy;
  bool needs_ = false;
  bool probabilities_ = false;
};

class PythonController final : public DraftController {
 public:
  explicit PythonController(const py::object& part) : part_(part) {}
  std::string_view name() const override { return part_.name(); }
  int32_t budget(const DraftView& view) override {
    int32_t nodes = 0;
    part_.with("budget",
               [&](const py::object& method) { nodes = method(view_dict(view)).cast<int32_t>(); });
    return nodes;
  }
  void choose(std::span<const DraftView> views, std::span<const Draft> drafts,
              const StepBudget& budget, std::span<uint64_t> keep) override {
    part_.with("choose", [&](const py::object& method) {
      py::dict step;
      step["plain_rows"] = budget.plain_rows;
      step["draft_rows"] = budget.draft_rows;
      step["kv_tokens"] = budget.kv_tokens;
      step["requests"] = budget.requests;
      const auto copies = list_of(drafts, [](const Draft& draft) { return Draft(draft); });
      const auto chosen =
          method(list_of(views, view_dict), copies, step).cast<std::vector<std::vector<int32_t>>>();
      if (chosen.size() != keep.size()) {
        throw Error("expected the nodes of " + std::to_string(keep.size()) + " drafts, got " +
                    std::to_string(chosen.size()));
      }
      for (size_t i = 0; i < keep.size(); ++i) {
        for (const int32_t node : chosen[i]) {
          if (node < 0 || node >= drafts[i].size()) throw Error("expected nodes of the draft");
          keep[i] |= uint64_t{1} << node;
        }
      }
    });
  }
  void observe(const StepCost& cost, std::span<const StepFacts> facts) override {
    part_.with("observe", [&](const py::object& method) {
      py::dict step;
      step["rows"] = cost.rows;
      step["draft_rows"] = cost.draft_rows;
      step["kv_tokens"] = cost.kv_tokens;
      step["seconds"] = cost.seconds;
      step["propose_seconds"] = cost.propose_seconds;
      step["decoding"] = cost.decoding;
      method(step, list_of(facts, facts_dict));
    });
  }
  void forget(RequestId request) override {
    part_.with("forget", [&](const py::object& method) { method(request); });
  }

 private:
  Held part_;
};

template <class Native, class Wrapper>
std::shared_ptr<Native> to_part(const py::object& part, const char* what, const char* method) {
  if (py::isinstance<Native>(part)) return part.cast<std::shared_ptr<Native>>();
  if (py::hasattr(part, method)) return std::make_shared<Wrapper>(part);
  throw InvalidArgument(std::string("[speculation] ") + what + ": expected one of " +
                        "effinfer.speculation or an object with " + method + "(), got " +
                        py::repr(part).cast<std::string>());
}

void register_rows(py::module_& m) {
  py::class_<RowsOfCall>(m, "TokenRows",
                         "The rows of a request in a step, while verify() runs: row 0 is of its\n"
                         "last token, row i + 1 of the draft's node i.")
      .def_property_readonly("request", [](const RowsOfCall& r) { return r.get().request(); })
      .def(
          "sample", [](const RowsOfCall& r, int32_t row) { return r.get().sample(row).token; },
          py::arg("row"), "The token that plain decoding would draw.")
      .def(
          "distribution",
          [](const RowsOfCall& r, int32_t row, int64_t vocab_size) {
            py::array_t<float> out(vocab_size);
            r.get().distribution(row, {out.mutable_data(), static_cast<size_t>(out.size())});
            return out;
          },
          py::arg("row"), py::arg("vocab_size"), "float32 [vocab_size] that sample() draws from.")
      .def(
          "uniform", [](const RowsOfCall& r, uint32_t draw) { return r.get().uniform(draw); },
          py::arg("draw"), "In [0, 1), of the token that is emitted next; draw 0 is sample()'s.")
      .def(
          "emit",
          [](const RowsOfCall& r, int32_t row, int32_t token) {
            return r.get().emit(row, r.get().scored(row, token));
          },
          py::arg("row"), py::arg("token"),
          "The token that follows a row: row 0 first, then that of a node whose token was\n"
          "emitted last. False: the request has ended.");
}

}  // namespace

std::shared_ptr<Proposer> to_proposer(const py::object& part) {
  return to_part<Proposer, PythonProposer>(part, "proposers", "propose");
}
std::shared_ptr<Verifier> to_verifier(const py::object& part) {
  return to_part<Verifier, PythonVerifier>(part, "verifier", "verify");
}
std::shared_ptr<DraftController> to_controller(const py::object& part) {
  return to_part<DraftController, PythonController>(part, "controller", "choose");
}

void register_speculation_parts(py::module_& m) {
  register_rows(m);
}

}  // namespace effinfer::bindings
