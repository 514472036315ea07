// A small model of Llama's blocks, and what tests of engines on a GPU ask of it.
#pragma once

#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "cpp/arrays.h"
#include "cpp/check.h"
#include "effinfer/engine.h"
#include "effinfer/model.h"
#include "effinfer/quantize.h"

namespace effinfer {

// The operator and attributes of the index that attention follows, or nothing; and attention's
// window.
struct IndexText {
  std::string op = "";
  std::string attributes = "";
  int window_left = -1;
};
// Of the gate.
struct UnaryText {
  std::string op = "silu";
  std::string attributes = "";
};

inline std::string layer_text(int layer, const std::string& type, const IndexText& index,
                              const UnaryText& gate) {
  const std::string n = std::to_string(layer);
  const std::string in = layer == 0 ? "%x" : "%m" + std::to_string(layer - 1);
  return "  weight %na" + n + " = \"na" + n + "\" : f32[64]\n  weight %nm" + n + " = \"nm" + n +
         "\" : f32[64]\n  weight %q" + n + " = \"q" + n + "\" : " + type + "[64, 64]\n  weight %k" +
         n + " = \"k" + n + "\" : " + type + "[32, 64]\n  weight %v" + n + " = \"v" + n +
         "\" : " + type + "[32, 64]\n  weight %p" + n + " = \"p" + n + "\" : " + type +
         "[64, 64]\n  weight %g" + n + " = \"g" + n + "\" : " + type + "[96, 64]\n  weight %u" + n +
         " = \"u" + n + "\" : " + type + "[96, 64]\n  weight %d" + n + " = \"d" + n +
         "\" : " + type + "[64, 96]\n" + "  %a" + n + " : f32[T, 64] = rms_norm(" + in + ", %na" +
         n + ") {eps = 1e-06}\n" + "  %qa" + n + " : f32[T, 64] = linear(%a" + n + ", %q" + n +
         ")\n" + "  %ka" + n + " : f32[T, 32] = linear(%a" + n + ", %k" + n + ")\n" + "  %va" + n +
         " : f32[T, 32] = linear(%a" + n + ", %v" + n + ")\n" + "  %qr" + n +
         " : f32[T, 64] = rope(%qa" + n + ", %t) {heads = 4, head_dim = 16}\n" + "  %kr" + n +
         " : f32[T, 32] = rope(%ka" + n + ", %t) {heads = 2, head_dim = 16}\n" + "  %kv" + n +
         " : kv[" + n + ", 2, 16] = kv_append(%kr" + n + ", %va" + n + ") {layer = " + n +
         ", heads = 2, head_dim = 16}\n" +
         (index.op.empty() ? ""
                           : "  %i" + n + " : visits[" + n + ", 2] = " + index.op + "(%qr" + n +
                                 ", %kv" + n + ") {layer = " + n +
                                 ", heads = 4, kv_heads = 2, head_dim = 16, sm_scale = 0.25, " +
                                 index.attributes + "}\n") +
         "  %o" + n + " : f32[T, 64] = attention(%qr" + n + ", %kv" + n +
         (index.op.empty() ? "" : ", %i" + n) + ") {layer = " + n +
         ", heads = 4, kv_heads = 2, head_dim = 16, sm_scale = 0.25, window_left = " +
         std::to_string(index.window_left) + "}\n" + "  %op" + n + " : f32[T, 64] = linear(%o" + n +
         ", %p" + n + ")\n" + "  %y" + n + " : f32[T, 64] = add(%op" + n + ", " + in + ")\n" +
         "  %b" + n + " : f32[T, 64] = rms_norm(%y" + n + ", %nm" + n + ") {eps = 1e-06}\n" +
         "  %gb" + n + " : f32[T, 96] = linear(%b" + n + ", %g" + n + ")\n" + "  %ub" + n +
         " : f32[T, 96] = linear(%b" + n + ", %u" + n + ")\n" + "  %gs" + n +
         " : f32[T, 96] = " + gate.op + "(%gb" + n + ")" + gate.attributes + "\n" + "  %gu" + n +
         " : f32[T, 96] = mul(%gs" + n + ", %ub" + n + ")\n" + "  %db" + n +
         " : f32[T, 64] = linear(%gu" + n + ", %d" + n + ")\n" + "  %m" + n +
         " : f32[T, 64] = add(%db" + n + ", %y" + n + ")\n";
}

inline void replace_all(std::string& text, std::string_view what, std::string_view with) {
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at)) {
    text.replace(at, what.size(), with);
    at += with.size();
  }
}

// Llama's blocks, small. `wide`: with one head of 64 dims, for longer texts.
inline Graph graph_of(const std::string& type, const IndexText& index, const UnaryText& gate,
                      bool wide = false, int layers = 2) {
  std::string text =
      "graph tiny {\n  meta context_length = 512\n  input %token_ids : i32[T]\n"
      "  input %positions : i32[T]\n  input %logit_rows : i32[R]\n"
      "  weight %embed = \"embed\" : " +
      type +
      "[80, 64]\n  weight %n = \"n\" : f32[64]\n"
      "  %x : f32[T, 64] = embedding(%token_ids, %embed)\n"
      "  %t : f32[T, 16] = rope_table(%positions) {dims = 16, theta = 10000.0}\n";
  for (int layer = 0; layer < layers; ++layer) text += layer_text(layer, type, index, gate);
  text += "  %z : f32[T, 64] = rms_norm(%m" + std::to_string(layers - 1) +
          ", %n) {eps = 1e-06}\n"
          "  %r : f32[R, 64] = select_rows(%z, %logit_rows)\n"
          "  %logits : f32[R, 80] = linear(%r, %embed)\n  return %logits\n}\n";
  if (wide) {
    replace_all(text, "context_length = 512", "context_length = 2048");
    replace_all(text, "heads = 4", "heads = 1");
    replace_all(text, "heads = 2", "heads = 1");
    replace_all(text, "dim = 16", "dim = 64");
    replace_all(text, "dims = 16", "dims = 64");
    replace_all(text, ", 2, 16]", ", 1, 64]");
    replace_all(text, "[32, 64]", "[64, 64]");
    replace_all(text, "[T, 32]", "[T, 64]");
    replace_all(text, "[T, 16]", "[T, 64]");
  }
  return Graph::parse(text);
}

inline std::shared_ptr<const Model> model_of(const std::string& type, const IndexText& index = {},
                                             const UnaryText& gate = {}, bool wide = false,
                                             int layers = 2) {
  const Graph graph = graph_of(type, index, gate, wide, layers);
  auto weights = std::make_shared<MemoryWeights>();
  std::mt19937 random(3);
  ThreadPool pool(1);
  for (const ValueId id : graph.weights) {
    const Value& value = graph.value(id);
    TensorView plain;
    for (const Dim& dim : value.shape) plain.dims.push_back(dim.value);
    std::vector<float> numbers = normals(plain.dims.num_elements(), random);
    const float scale = value.shape.size() == 1 ? 0.1f : 0.15f;
    for (float& x : numbers) x = x * scale + (value.shape.size() == 1 ? 1.0f : 0.0f);
    plain.data = numbers.data();
    TensorView stored = plain;
    stored.dtype = value.dtype;
    auto bytes = std::make_shared<std::vector<std::byte>>(stored.num_bytes());
    stored.data = bytes->data();
    quantize(plain, value.dtype, pool, bytes->data());
    weights->add(value.weight_name, stored, bytes);
  }
  return std::make_shared<Model>(Model{graph, weights});
}

inline std::vector<int32_t> tokens_of(int count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 80);
  return tokens;
}

inline std::vector<float> logits_of(Engine& engine, const std::vector<int32_t>& tokens,
                                    Phase phase) {
  std::vector<float> logits(tokens.size() * static_cast<size_t>(engine.vocab_size()));
  engine.logits(tokens, logits, phase);
  return logits;
}

// What the engine generates for requests whose numbers these are.
inline std::map<int, std::vector<int32_t>> texts_of(Engine& engine,
                                                    const std::map<RequestId, int>& requests) {
  std::map<int, std::vector<int32_t>> texts;
  while (engine.has_work()) {
    for (const StepOutput& output : engine.step()) {
      CHECK_EQ(output.error, "");
      for (const SampledToken& token : output.tokens) {
        texts[requests.at(output.request)].push_back(token.token);
      }
    }
    engine.kv_cache().check_integrity();
  }
  return texts;
}

inline double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(double{a[i]} - b[i], 2);
    norm += std::pow(double{b[i]}, 2);
  }
  return std::sqrt(difference / norm);
}

}  // namespace effinfer
