#include "effinfer/engine.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "bindings/held.h"
#include "bindings/module.h"
#include "bindings/options.h"
#include "bindings/phase.h"
#include "bindings/strings.h"
#include "bindings/tokens.h"
#include "compiler/compile_halves.h"
#include "effinfer/placement.h"

namespace effinfer::bindings {
namespace {

std::shared_ptr<Engine> make_engine(const Graph& graph, std::shared_ptr<WeightSource> weights,
                                    std::shared_ptr<ThreadPool> pool, const py::kwargs& keywords) {
  const EngineOptions options = to_engine_options(keywords);
  auto model = std::make_shared<Model>(Model{graph, std::move(weights)});
  const py::gil_scoped_release release;
  return std::make_shared<Engine>(std::move(model), options, std::move(pool));
}

// Adds `more` to `outputs`, which hold one entry a request.
void merge(std::vector<StepOutput>& outputs, std::map<RequestId, size_t>& places,
           std::vector<StepOutput> more) {
  for (StepOutput& output : more) {
    const auto [place, is_new] = places.emplace(output.request, outputs.size());
    if (is_new) {
      outputs.push_back(std::move(output));
      continue;
    }
    StepOutput& known = outputs[place->second];
    std::move(output.tokens.begin(), output.tokens.end(), std::back_inserter(known.tokens));
    std::move(output.prompt.begin(), output.prompt.end(), std::back_inserter(known.prompt));
    known.finish = output.finish;
    known.stop_token = output.stop_token;
    known.error = std::move(output.error);
    if (!output.warning.empty()) known.warning = std::move(output.warning);
  }
}

// Several steps in one call from Python. Returns when a request ends or has its first token, after
// `max_steps`, or after `max_seconds`, so that Python sees signals and streams at a steady rate.
std::vector<StepOutput> step_many(Engine& engine, int64_t max_steps, double max_seconds) {
  using Clock = std::chrono::steady_clock;
  const py::gil_scoped_release release;
  const auto end = Clock::now() + std::chrono::duration<double>(max_seconds);
  std::vector<StepOutput> outputs;
  std::map<RequestId, size_t> places;
  for (int64_t i = 0; i < max_steps && engine.has_work(); ++i) {
    std::vector<StepOutput> more = engine.step();
    const bool is_awaited = std::any_of(more.begin(), more.end(), [&](const StepOutput& output) {
      if (output.finish != FinishReason::none) return true;
      const auto tokens = static_cast<int64_t>(output.tokens.size());
      return tokens > 0 && engine.metrics(output.request).output_tokens == tokens;
    });
    merge(outputs, places, std::move(more));
    if (is_awaited || Clock::now() >= end) break;
  }
  return outputs;
}

py::array_t<float> engine_logits(Engine& engine, const py::object& object,
                                 const std::string& phase) {
  const std::vector<int32_t> tokens = to_tokens(object, "tokens");
  const Phase parsed = parse_phase("engine", phase);
  py::array_t<float> out(
      {static_cast<py::ssize_t>(tokens.size()), static_cast<py::ssize_t>(engine.vocab_size())});
  const std::span<float> values(out.mutable_data(), static_cast<size_t>(out.size()));
  const py::gil_scoped_release release;
  engine.logits(tokens, values, parsed);
  return out;
}

py::array_t<double> engine_log_likelihoods(Engine& engine, const py::object& object,
                                           const std::string& phase) {
  const std::vector<int32_t> tokens = to_tokens(object, "tokens");
  const Phase parsed = parse_phase("engine", phase);
  if (tokens.empty()) throw InvalidArgument("[engine] tokens: expected at least one token");
  py::array_t<double> out(static_cast<py::ssize_t>(tokens.size()) - 1);
  const std::span<double> values(out.mutable_data(), static_cast<size_t>(out.size()));
  const py::gil_scoped_release release;
  engine.log_likelihoods(tokens, values, parsed);
  return out;
}

py::dict metrics_dict(const RequestMetrics& metrics) {
  py::dict dict;
  dict["prompt_tokens"] = metrics.prompt_tokens;
  dict["cached_tokens"] = metrics.cached_tokens;
  dict["output_tokens"] = metrics.output_tokens;
  dict["preemptions"] = metrics.preemptions;
  dict["time_to_first_token_s"] = metrics.time_to_first_token_s;
  dict["total_s"] = metrics.total_s;
  const SpeculationMetrics& drafts = metrics.speculation;
  py::dict speculation;
  speculation["steps"] = drafts.steps;
  speculation["drafted"] = drafts.drafted;
  speculation["accepted"] = drafts.accepted;
  speculation["refused_drafts"] = drafts.refused_drafts;
  speculation["guarantee"] = std::string(name(drafts.guarantee));
  speculation["drafted_at"] = drafts.drafted_at;
  speculation["accepted_at"] = drafts.accepted_at;
  dict["speculation"] = speculation;
  return dict;
}

py::dict stats_dict(const EngineStats& stats) {
  py::dict dict;
  dict["steps"] = stats.steps;
  dict["waiting"] = stats.waiting;
  dict["running"] = stats.running;
  dict["free_pages"] = stats.free_pages;
  dict["total_pages"] = stats.total_pages;
  dict["preemptions"] = stats.preemptions;
  dict["drafting_s"] = stats.drafting_s;
  py::list drafters;
  for (const DraftingStats& drafter : stats.drafters) {
    py::dict each;
    each["name"] = drafter.name;
    each["device"] = drafter.device;
    each["levels"] = drafter.levels;
    each["cancelled"] = drafter.cancelled;
    each["asked"] = drafter.asked;
    each["late"] = drafter.late;
    drafters.append(each);
  }
  dict["drafters"] = drafters;
  return dict;
}

void register_step_output(py::module_& m) {
  py::class_<StepOutput>(m, "StepOutput", "What one or more steps did for one request.")
      .def_readonly("request", &StepOutput::request)
      .def_property_readonly(
          "token_ids",
          [](const StepOutput& o) {
            py::list ids;
            for (const SampledToken& sampled : o.tokens) ids.append(sampled.token);
            return ids;
          },
          "New tokens in order; a token that stopped the request is the last one.")
      .def_readonly("tokens", &StepOutput::tokens, "list[SampledToken]: with log-probabilities")
      .def_readonly("prompt", &StepOutput::prompt,
                    "list[SampledToken]: of the prompt's tokens from the second on, each once")
      .def_property_readonly(
          "finish_reason",
          [](const StepOutput& o) -> py::object {
            if (o.finish == FinishReason::none) return py::none();
            return py::str(std::string(name(o.finish)));
          },
          "None, or \"stop\", \"length\", \"cancelled\", \"error\"")
      .def_readonly("stop_token", &StepOutput::stop_token,
                    "whether the last token ends the text without being part of it")
      .def_readonly("error", &StepOutput::error)
      .def_readonly("warning", &StepOutput::warning, "why drafts were refused, the first time");
}

// The constraint of a request in Python.
class PythonConstraint final : public TokenConstraint {
 public:
  explicit PythonConstraint(const py::object& part) : part_(part) {
    for (const char* method : {"fill", "accept", "rollback", "ended"}) {
      if (py::hasattr(part, method)) continue;
      throw InvalidArgument("[engine] constraint: expected methods fill, accept, rollback and " +
                            std::string("ended, got an object without ") + method);
    }
  }
  void fill(std::span<uint32_t> allowed) override {
    // What a Ctrl-C leaves must not be another request's.
    std::fill(allowed.begin(), allowed.end(), 0u);
    part_.with("fill", [&](const py::object& fill) {
      // Memory of its own: a view of the engine's could outlive the call.
      const auto size = static_cast<py::ssize_t>(allowed.size());
      py::array_t<uint32_t> mask(size);
      std::fill_n(mask.mutable_data(), allowed.size(), 0u);
      fill(mask);
      std::copy_n(mask.data(), allowed.size(), allowed.data());
    });
  }
  bool accept(int32_t token) override {
    bool accepted = false;
    part_.with("accept", [&](const py::object& accept) { accepted = accept(token).cast<bool>(); });
    return accepted;
  }
  void rollback(int32_t count) override {
    part_.with("rollback", [&](const py::object& rollback) { rollback(count); });
  }
  bool ended() const override {
    bool ended = false;
    part_.with("ended", [&](const py::object& method) { ended = method().cast<bool>(); });
    return ended;
  }

 private:
  Held part_;
};

std::shared_ptr<TokenConstraint> to_constraint(const py::object& part) {
  return part.is_none() ? nullptr : std::make_shared<PythonConstraint>(part);
}

using EngineClass = py::class_<Engine, std::shared_ptr<Engine>>;

EngineClass register_engine_class(py::module_& m) {
  py::options docstrings;
  docstrings.disable_function_signatures();  // one of keyword arguments would name none of them
  const std::string init =
      "__init__(self: effinfer._core.Engine, graph: effinfer._core.Graph, "
      "weights: effinfer._core.WeightSource, pool: effinfer._core.ThreadPool | None = None, *, " +
      engine_option_signature() + ") -> None";
  EngineClass engine(m, "Engine",
                     "Continuous batching of requests over one model: a graph and its weights.");
  engine.def(py::init(&make_engine), py::arg("graph"), py::arg("weights"),
             py::arg("pool") = nullptr, init.c_str());
  return engine;
}

void register_profiles(EngineClass& engine_class) {
  engine_class
      .def("start_profile", &Engine::start_profile, py::arg("max_steps"),
           py::call_guard<py::gil_scoped_release>(), "Records the next `max_steps` steps.")
      .def("take_profile", &Engine::take_profile, py::call_guard<py::gil_scoped_release>(),
           "Ends recording: the Profile of what ran since start_profile().")
      .def("take_front_profile", &Engine::take_front_profile,
           py::call_guard<py::gil_scoped_release>(),
           "The same of the first layers, where they are on a device of their own.")
      .def(
          "take_draft_profiles",
          [](Engine& engine) {
            std::vector<NamedProfile> taken;
            {
              const py::gil_scoped_release release;
              taken = engine.take_draft_profiles();
            }
            std::map<std::string, Profile> profiles;
            for (NamedProfile& each : taken) profiles[each.name] = std::move(each.profile);
            return profiles;
          },
          "The same of what drafts on a device of its own, by name.");
}

}  // namespace

void register_engine(py::module_& m) {
  register_step_output(m);
  EngineClass engine_class = register_engine_class(m);
  register_profiles(engine_class);
  engine_class
      .def(
          "add",
          [](Engine& engine, const py::object& prompt, const SamplingParams& params,
             const py::object& constraint) {
            return engine.add(to_tokens(prompt, "prompt"), params, to_constraint(constraint));
          },
          py::arg("prompt"), py::arg("params"), py::arg("constraint") = py::none(),
          "Queues a request; returns its id. `constraint` says which tokens may come next, "
          "between\n"
          "steps: fill(mask) sets bit t % 32 of word t / 32 of a uint32 array for each, "
          "accept(token)\n"
          "returns whether it may come and goes on, rollback(count) takes tokens back, ended() is\n"
          "whether nothing may follow.")
      .def(
          "add_answers",
          [](Engine& engine, const py::object& prompt, const std::vector<SamplingParams>& params,
             const std::vector<py::object>& constraints) {
            std::vector<std::shared_ptr<TokenConstraint>> parts;
            for (const py::object& part : constraints) parts.push_back(to_constraint(part));
            return engine.add_answers(to_tokens(prompt, "prompt"), params, parts);
          },
          py::arg("prompt"), py::arg("params"), py::arg("constraints") = std::vector<py::object>{},
          "Queues several answers to one prompt, which share its pages; returns their ids.\n"
          "`constraints`: none, or one (or None) an answer.")
      .def("cancel", &Engine::cancel, py::arg("request"), "Ends a request at the next step.")
      .def("has_work", &Engine::has_work)
      .def("step", &Engine::step, py::call_guard<py::gil_scoped_release>(),
           "Runs one step: list[StepOutput].")
      .def("step_many", &step_many, py::arg("max_steps") = 1 << 20, py::arg("max_seconds") = 0.05,
           "Runs steps until a request ends or has its first token, or a limit is reached:\n"
           "list[StepOutput], one entry a request.")
      .def("logits", &engine_logits, py::arg("tokens"), py::arg("phase") = "prefill",
           "float32 [len(tokens), vocab] of a whole sequence, for evaluation.")
      .def("log_likelihoods", &engine_log_likelihoods, py::arg("tokens"),
           py::arg("phase") = "prefill",
           "float64 [len(tokens) - 1]: log p of each token but the first, in bounded memory.")
      .def(
          "metrics",
          [](const Engine& engine, RequestId request) {
            return metrics_dict(engine.metrics(request));
          },
          py::arg("request"))
      .def("forget", &Engine::forget, py::arg("request"), "Drops a finished request's metrics.")
      .def("stats", [](const Engine& engine) { return stats_dict(engine.stats()); })
      .def("explain", [](Engine& engine) { return engine.executable().explain(); })
      .def_property_readonly(
          "placement", [](Engine& e) { return ExecutableHalves::placement(e.executable()); },
          "Which layers are on which of two devices, and why; else \"\".")
      .def_property_readonly("graph_text",
                             [](Engine& e) { return e.executable().graph().to_string(); })
      .def_property_readonly("arena_bytes", [](Engine& e) { return e.executable().arena_bytes(); })
      .def_property_readonly("packed_bytes",
                             [](Engine& e) { return e.executable().packed_bytes(); })
      .def_property_readonly("pack_cache", [](Engine& e) { return e.executable().pack_cache(); })
      .def_property_readonly("tuning_trouble",
                             [](Engine& e) { return e.executable().tuning_trouble(); })
      .def_property_readonly("kv_bytes", [](Engine& e) { return e.kv_cache().num_bytes(); })
      .def_property_readonly(
          "kv_dtype", [](Engine& e) { return std::string(name(e.kv_cache().config().dtype)); })
      .def_property_readonly("kv_cache", &Engine::kv_cache,
                             py::return_value_policy::reference_internal)
      .def_property_readonly("vocab_size", &Engine::vocab_size)
      .def_property_readonly("max_seq_len", &Engine::max_seq_len)
      .def_property_readonly("threads", &Engine::threads)
      .def_property_readonly(
          "cores", [](Engine& e) { return cores_of(*e.executable().pool()); },
          "Those on which its threads may run.");
}

}  // namespace effinfer::bindings
