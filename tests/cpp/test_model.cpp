// Artifacts: a GGUF file with a graph becomes a model, anything else a typed error.
#include <cstdio>
#include <string>

#include "check.h"
#include "effinfer/error.h"
#include "effinfer/gguf.h"
#include "effinfer/model.h"
#include "gguf_bytes.h"

using namespace effinfer;

namespace {

// A file with one f32 tensor "norm.weight" of 8 elements and no metadata.
gguf_bytes::Bytes weights_file() {
  gguf_bytes::Bytes bytes;
  bytes.header(1, 0).tensor("norm.weight", {8}, gguf_bytes::kTypeF32, 0).pad();
  for (int i = 0; i < 8; ++i) bytes.number(static_cast<float>(i));
  return bytes;
}

std::string graph_text(const std::string& weight, const std::string& type) {
  return "graph tiny {\n"
         "  input %token_ids : i32[T]\n"
         "  weight %w = \"" +
         weight + "\" : " + type +
         "\n"
         "  return %w\n"
         "}\n";
}

// Writes an artifact with this graph and removes it at the end.
struct Artifact {
  std::string path;
  explicit Artifact(const std::string& text, const char* key = kGraphKey)
      : path(gguf_bytes::scratch("model.gguf")) {
    const gguf_bytes::Bytes bytes = weights_file();
    write_gguf_with_metadata(*GgufFile::parse(bytes.data, "weights"), key, text, path);
  }
  ~Artifact() { std::remove(path.c_str()); }
};

}  // namespace

TEST("an artifact gives its graph and its weights") {
  std::shared_ptr<const Model> model;
  {
    const Artifact artifact(graph_text("norm.weight", "f32[8]"));
    model = Model::load(artifact.path);
  }
  CHECK_EQ(model->graph.name, "tiny");
  CHECK_EQ(static_cast<const float*>(model->weights->weight("norm.weight").data)[7], 7.0f);
}

TEST("a file without a graph says how to make an artifact") {
  const Artifact artifact("text", "general.name");
  CHECK_THROWS(FormatError, "effinfer compile", Model::load(artifact.path));
  CHECK_THROWS(FileError, "cannot open", Model::load(artifact.path + ".absent"));
}

TEST("a graph that is broken or does not fit the weights names the file") {
  const auto load = [](const std::string& text) { Model::load(Artifact(text).path); };
  CHECK_THROWS(FormatError, "effinfer.graph", load("graph {"));
  CHECK_THROWS(FormatError, "_model.gguf: effinfer.graph", load(""));
  CHECK_THROWS(FormatError, "weight \"absent\": expected a tensor",
               load(graph_text("absent", "f32[8]")));
  CHECK_THROWS(FormatError, "expected f32[9], got f32[8]",
               load(graph_text("norm.weight", "f32[9]")));
  CHECK_THROWS(FormatError, "expected f16[8], got f32[8]",
               load(graph_text("norm.weight", "f16[8]")));
}

CHECK_MAIN()
