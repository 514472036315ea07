#include "effinfer/model.h"

#include "effinfer/error.h"
#include "effinfer/gguf.h"

namespace effinfer {
namespace {

// The graph's weights must be those of the file: found here, a mismatch names the file.
void check_weights(const Graph& graph, const GgufFile& file) {
  for (const ValueId id : graph.weights) {
    const Value& value = graph.value(id);
    const std::string where = "[model] " + file.path() + ": weight \"" + value.weight_name + "\"";
    const GgufTensor* tensor = file.find_tensor(value.weight_name);
    if (tensor == nullptr) throw FormatError(where + ": expected a tensor, got none");
    Shape shape;
    for (int axis = 0; axis < tensor->dims.rank(); ++axis) {
      shape.push_back(Dim::constant(tensor->dims[axis]));
    }
    if (tensor->dtype != value.dtype || shape != value.shape) {
      std::string expected = std::string(name(value.dtype)) + "[";
      for (size_t axis = 0; axis < value.shape.size(); ++axis) {
        expected += (axis == 0 ? "" : ", ") + value.shape[axis].to_string();
      }
      throw FormatError(where + ": expected " + expected + "], got " + tensor->type_name +
                        tensor->dims.to_string());
    }
  }
}

}  // namespace

std::shared_ptr<const Model> Model::load(const std::string& path) {
  const std::shared_ptr<const GgufFile> file = GgufFile::open(path);
  if (file->find(kGraphKey) == nullptr) {
    throw FormatError("[model] " + path + ": expected an artifact with metadata \"" +
                      std::string(kGraphKey) +
                      "\", got a GGUF file without a graph: make one with " + "effinfer compile " +
                      path + " -o artifact.gguf");
  }
  auto model = std::make_shared<Model>();
  try {
    model->graph = Graph::parse(file->get_string(kGraphKey));
    model->graph.verify();
  } catch (const FormatError& error) {
    throw FormatError("[model] " + path + ": " + kGraphKey + ": " + error.what());
  }
  check_weights(model->graph, *file);
  model->weights = file;
  return model;
}

}  // namespace effinfer
