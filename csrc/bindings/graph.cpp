#include "effinfer/graph.h"

#include <pybind11/stl.h>

#include "bindings/module.h"
#include "effinfer/error.h"

namespace effinfer::bindings {
namespace {

Attribute to_attribute(const std::string& key, const py::handle& value) {
  // bool first: it is an int in Python.
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) return value.cast<int64_t>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::str>(value)) return value.cast<std::string>();
  if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) {
    return value.cast<std::vector<int64_t>>();
  }
  throw InvalidArgument("[graph] " + key +
                        ": expected int, float, bool, str or a list of int, got " +
                        std::string(py::str(py::type::handle_of(value))));
}

Attributes to_attributes(const py::dict& dict) {
  Attributes attributes;
  for (const auto& [key, value] : dict) {
    std::string text = key.cast<std::string>();
    Attribute attribute = to_attribute(text, value);
    attributes.emplace(std::move(text), std::move(attribute));
  }
  return attributes;
}

py::dict to_dict(const Attributes& attributes) {
  py::dict dict;
  for (const auto& [key, value] : attributes) dict[py::str(key)] = py::cast(value);
  return dict;
}

Dim to_dim(const py::handle& value) {
  if (py::isinstance<py::str>(value)) {
    const std::string text = value.cast<std::string>();
    if (text == "T") return Dim::tokens();
    if (text == "S") return Dim::sequences();
    if (text == "R") return Dim::rows();
  } else if (py::isinstance<py::int_>(value)) {
    return Dim::constant(value.cast<int64_t>());
  }
  throw InvalidArgument("[graph] shape: expected integers, \"T\", \"S\" and \"R\", got " +
                        std::string(py::repr(value)));
}

py::list to_list(const Shape& shape) {
  py::list list;
  for (const Dim& dim : shape) {
    if (dim.kind == Dim::Kind::constant) {
      list.append(dim.value);
    } else {
      list.append(dim.to_string());
    }
  }
  return list;
}

// A value as Python sees it: a dict of plain things.
py::dict describe(const Value& value) {
  py::dict dict;
  dict["name"] = value.name;
  dict["dtype"] = std::string(name(value.dtype));
  dict["shape"] = to_list(value.shape);
  dict["weight_name"] = value.weight_name;
  return dict;
}

py::list nodes(const Graph& graph) {
  const auto names = [&](const std::vector<ValueId>& ids) {
    py::list list;
    for (const ValueId id : ids) list.append(graph.value(id).name);
    return list;
  };
  py::list list;
  for (const Node& node : graph.nodes) {
    py::dict dict;
    dict["op"] = node.op;
    dict["inputs"] = names(node.inputs);
    dict["outputs"] = names(node.outputs);
    dict["attributes"] = to_dict(node.attributes);
    list.append(dict);
  }
  return list;
}

py::dict values(const Graph& graph) {
  py::dict dict;
  const auto add = [&](ValueId id) {
    dict[py::str(graph.value(id).name)] = describe(graph.value(id));
  };
  for (const ValueId id : graph.inputs) add(id);
  for (const ValueId id : graph.weights) add(id);
  for (const Node& node : graph.nodes) {
    for (const ValueId id : node.outputs) add(id);
  }
  return dict;
}

void register_builder(py::module_& m) {
  py::class_<GraphBuilder>(m, "GraphBuilder",
                           "Builds a graph node by node; effinfer.graph has the readable form.")
      .def(py::init<std::string>(), py::arg("name"))
      .def(
          "input",
          [](GraphBuilder& builder, std::string name, const std::string& dtype,
             const py::list& dims) {
            Shape shape;
            for (const py::handle& dim : dims) shape.push_back(to_dim(dim));
            return builder.input(std::move(name), parse_dtype(dtype), std::move(shape));
          },
          py::arg("name"), py::arg("dtype"), py::arg("shape"))
      .def(
          "weight",
          [](GraphBuilder& builder, std::string name, const std::string& dtype,
             const std::vector<int64_t>& shape) {
            Dims dims;
            for (const int64_t dim : shape) dims.push_back(dim);
            return builder.weight(std::move(name), parse_dtype(dtype), dims);
          },
          py::arg("name"), py::arg("dtype"), py::arg("shape"))
      .def(
          "node",
          [](GraphBuilder& builder, std::string op, std::vector<ValueId> inputs,
             const py::dict& attributes) {
            return builder.node(std::move(op), std::move(inputs), to_attributes(attributes));
          },
          py::arg("op"), py::arg("inputs"), py::arg("attributes") = py::dict())
      .def("rename", &GraphBuilder::rename, py::arg("value"), py::arg("name"))
      .def(
          "set_metadata",
          [](GraphBuilder& builder, std::string key, const py::object& value) {
            Attribute attribute = to_attribute(key, value);
            builder.set_metadata(std::move(key), std::move(attribute));
          },
          py::arg("key"), py::arg("value"))
      .def(
          "value",
          [](const GraphBuilder& builder, ValueId id) {
            const Graph& graph = builder.graph();
            if (id < 0 || static_cast<size_t>(id) >= graph.values.size()) {
              throw InvalidArgument("[graph] id: no value " + std::to_string(id));
            }
            return describe(graph.value(id));
          },
          py::arg("id"))
      .def("finish", &GraphBuilder::finish, py::arg("outputs"));
}

}  // namespace

void register_graph(py::module_& m) {
  py::class_<Graph>(m, "Graph", "A graph of operators over symbolic sizes.")
      .def_static("parse", &Graph::parse, py::arg("text"),
                  "Reads the text form; FormatError with line and column.")
      .def("to_string", &Graph::to_string, "The text form, which parse() reads back.")
      .def("__str__", &Graph::to_string)
      .def("__eq__",
           [](const Graph& a, const py::object& b) {
             return py::isinstance<Graph>(b) && a.to_string() == b.cast<const Graph&>().to_string();
           })
      .def("verify", &Graph::verify, "Raises FormatError naming the node that is wrong.")
      .def_readonly("name", &Graph::name)
      .def_property_readonly("metadata", [](const Graph& graph) { return to_dict(graph.metadata); })
      .def_property_readonly("nodes", &nodes, "Dicts of op, inputs, outputs, attributes.")
      .def_property_readonly("values", &values, "By name: dtype, shape, weight_name.")
      .def_property_readonly("outputs",
                             [](const Graph& graph) {
                               std::vector<std::string> names;
                               for (const ValueId id : graph.outputs) {
                                 names.push_back(graph.value(id).name);
                               }
                               return names;
                             })
      .def_property_readonly(
          "weight_names",
          [](const Graph& graph) {
            std::vector<std::string> names;
            for (const ValueId id : graph.weights) names.push_back(graph.value(id).weight_name);
            return names;
          },
          "The weights that it reads, as their source names them.");
  register_builder(m);
  m.def("op_names", &op_names, "The operators that a node may have.");
}

}  // namespace effinfer::bindings
