#include "bindings/options.h"

#include <pybind11/stl.h>

#include <functional>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/hooks.h"
#include "bindings/strings.h"
#include "effinfer/error.h"

namespace effinfer::bindings {
namespace {

namespace py = pybind11;

Precision parse_precision(const std::string& text) {
  if (text == "fast") return Precision::fast;
  if (text == "f32") return Precision::f32;
  throw InvalidArgument("[options] precision: expected \"fast\" or \"f32\", got \"" + text + "\"");
}

Device parse_option_device(const std::string& text) {
  return parse_device(text, "[options] device");
}

// An option of Python's type `type`; `text` is its default as Python writes it.
template <class Options>
struct Keyword {
  std::string name;
  std::string type;
  std::string text;
  std::function<void(Options&, const py::object&)> set;
};

template <class T>
T cast(const std::string& name, const std::string& type, const py::object& value) {
  try {
    return value.cast<T>();
  } catch (const py::cast_error&) {
    throw py::type_error("[options] " + name + ": expected " + type + ", got " +
                         std::string(py::repr(value)));
  }
}

// An option whose Python type is that of the field.
template <class Options, class Base, class T>
Keyword<Options> plain(const std::string& name, const std::string& type, T Base::* field) {
  const auto set = [=](Options& options, const py::object& value) {
    options.*field = cast<T>(name, type, value);
  };
  return {name, type, std::string(py::repr(py::cast(Options().*field))), set};
}

// A size that is 0 where the core chooses it: None in Python.
template <class Options, class Base, class T>
Keyword<Options> open_size(const std::string& name, T Base::* field) {
  const std::string type = "int | None";
  const auto set = [=](Options& options, const py::object& value) {
    options.*field = cast<std::optional<T>>(name, type, value).value_or(0);
  };
  return {name, type, "None", set};
}

// An option that is text in Python; parse(text) gives the field.
template <class Options, class Base, class T, class Parse>
Keyword<Options> named(const std::string& name, const char* text, T Base::* field, Parse parse) {
  const auto set = [=](Options& options, const py::object& value) {
    options.*field = parse(cast<std::string>(name, "str", value));
  };
  return {name, "str", "'" + std::string(text) + "'", set};
}

template <class Options>
void set_kv_dtype(Options& options, const py::object& value) {
  const auto text = cast<std::optional<std::string>>("kv_dtype", "str | None", value);
  options.kv_dtype = text ? std::optional(parse_dtype(*text)) : std::nullopt;
}

template <class Options>
void set_front(Options& options, const py::object& value) {
  const std::string type = "FrontLayers | None";
  options.front = cast<std::optional<FrontLayers>>("front", type, value);
}

void set_speculation(EngineOptions& options, const py::object& value) {
  if (value.is_none()) return;
  options.speculation = cast<Speculation>("speculation", "Speculation | None", value);
}

// (bits, residual).
void set_kv_coding(EngineOptions& options, const py::object& value) {
  const auto [bits, residual] =
      cast<std::pair<int32_t, int32_t>>("kv_coding", "tuple[int, int]", value);
  options.kv_coding = {bits, residual};
}

void set_hooks(EngineOptions& options, const py::object& value) {
  options.hooks = to_hooks(value);
}

// A path that is empty where there is none: None in Python.
template <class Options, class Base>
Keyword<Options> folder(const std::string& name, std::string Base::* field) {
  const auto set = [=](Options& options, const py::object& value) {
    options.*field = value.is_none() ? std::string() : to_path(value);
  };
  return {name, "typing.Any", "None", set};
}

// The options that executables and engines share, then those that are `own`.
template <class Options>
std::vector<Keyword<Options>> with_model_options(std::vector<Keyword<Options>> own) {
  using Base = ModelOptions;
  std::vector<Keyword<Options>> keywords = {
      named<Options>("precision", "fast", &Base::precision, parse_precision),
      plain<Options>("deterministic", "bool", &Base::deterministic),
      {"kv_dtype", "str | None", "None", set_kv_dtype<Options>},
      open_size<Options>("max_seq_len", &Base::max_seq_len),
      plain<Options>("max_sequences", "int", &Base::max_sequences),
      plain<Options>("disabled_passes", "collections.abc.Set[str]", &Base::disabled_passes),
      folder<Options>("pack_cache", &Base::pack_cache),
      folder<Options>("tuning_cache", &Base::tuning_cache),
      named<Options>("ternary_packing", "auto", &Base::ternary_packing, parse_ternary_packing),
      named<Options>("device", "cpu", &Base::device, parse_option_device),
      {"front", "effinfer._core.FrontLayers | None", "None", set_front<Options>},
  };
  for (Keyword<Options>& keyword : own) keywords.push_back(std::move(keyword));
  return keywords;
}

std::vector<Keyword<CompileOptions>> compile_keywords() {
  using Options = CompileOptions;
  return with_model_options<Options>({
      plain<Options>("max_tokens", "int", &Options::max_tokens),
      plain<Options>("max_rows", "int", &Options::max_rows),
  });
}

std::vector<Keyword<EngineOptions>> engine_keywords() {
  using Options = EngineOptions;
  return with_model_options<Options>({
      open_size<Options>("num_pages", &Options::num_pages),
      plain<Options>("max_batch_tokens", "int", &Options::max_batch_tokens),
      plain<Options>("prefix_cache", "bool", &Options::prefix_cache),
      {"kv_coding", "tuple[int, int]", "(0, 128)", set_kv_coding},
      {"speculation", "effinfer._core.Speculation | None", "None", set_speculation},
      {"hooks", "collections.abc.Sequence[typing.Any]", "()", set_hooks},
  });
}

template <class Options>
Options to_options(const std::vector<Keyword<Options>>& known, const py::kwargs& given) {
  Options options;
  for (const auto& [key, value] : given) {
    const std::string name = key.template cast<std::string>();
    const Keyword<Options>* found = nullptr;
    std::string names;
    for (const Keyword<Options>& keyword : known) {
      if (keyword.name == name) found = &keyword;
      names += (names.empty() ? "" : ", ") + keyword.name;
    }
    if (found == nullptr) {
      throw InvalidArgument("[options] " + name + ": unknown option; expected one of " + names);
    }
    found->set(options, py::reinterpret_borrow<py::object>(value));
  }
  return options;
}

template <class Options>
std::string signature(const std::vector<Keyword<Options>>& keywords) {
  std::string text;
  for (const Keyword<Options>& keyword : keywords) {
    text += text.empty() ? "" : ", ";
    text += keyword.name + ": " + keyword.type + " = " + keyword.text;
  }
  return text;
}

}  // namespace

CompileOptions to_compile_options(const py::kwargs& keywords) {
  return to_options(compile_keywords(), keywords);
}

EngineOptions to_engine_options(const py::kwargs& keywords) {
  return to_options(engine_keywords(), keywords);
}

std::string compile_option_signature() {
  return signature(compile_keywords());
}

std::string engine_option_signature() {
  return signature(engine_keywords());
}

}  // namespace effinfer::bindings
