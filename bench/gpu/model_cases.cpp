// A whole model of Llama's blocks with random weights of one type: a prompt's tokens, then tokens
// one after the other, each of which reads all weights but the embedding's.
#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "bench/gpu/measure.h"
#include "effinfer/engine.h"
#include "effinfer/error.h"
#include "effinfer/model.h"
#include "effinfer/weights.h"
#include "ops/attention.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/registry.h"
#include "ops/rope_append.h"

namespace bench {
namespace {

using namespace effinfer;

struct ModelShape {
  int64_t layers, cols, ffn, heads, kv_heads, head_dim, vocab;
  std::string type;
};

// "layers=32,cols=4096,..."
ModelShape shape_of(const std::string& text) {
  std::map<std::string, int64_t> values;
  for (const std::string& item : split(text)) {
    const size_t equals = item.find('=');
    values[item.substr(0, equals)] = std::atoll(item.c_str() + equals + 1);
  }
  const auto number = [&](const char* name) {
    if (values[name] <= 0) throw InvalidArgument("--model: expected " + std::string(name) + "=N");
    return values[name];
  };
  return {number("layers"),   number("cols"),     number("ffn"),   number("heads"),
          number("kv_heads"), number("head_dim"), number("vocab"), ""};
}

// Writes the text of a graph, an operator a line.
class GraphText {
 public:
  explicit GraphText(const ModelShape& shape) : shape_(shape) {}

  std::string write() {
    text_ =
        "graph random {\n  meta context_length = 8192\n  input %token_ids : i32[T]\n"
        "  input %positions : i32[T]\n  input %logit_rows : i32[R]\n";
    const int64_t q = shape_.heads * shape_.head_dim;
    const int64_t kv = shape_.kv_heads * shape_.head_dim;
    weight("embed", shape_.vocab, shape_.cols);
    weight("head", shape_.vocab, shape_.cols);
    norm("last");
    for (int64_t i = 0; i < shape_.layers; ++i) {
      const std::string n = std::to_string(i);
      norm("na" + n);
      norm("nf" + n);
      weight("q" + n, q, shape_.cols);
      weight("k" + n, kv, shape_.cols);
      weight("v" + n, kv, shape_.cols);
      weight("o" + n, shape_.cols, q);
      weight("gate" + n, shape_.ffn, shape_.cols);
      weight("up" + n, shape_.ffn, shape_.cols);
      weight("down" + n, shape_.cols, shape_.ffn);
    }
    value("x", "T", shape_.cols, "embedding(%token_ids, %embed)");
    value(
        "t", "T", shape_.head_dim,
        "rope_table(%positions) {dims = " + std::to_string(shape_.head_dim) + ", theta = 10000.0}");
    std::string in = "%x";
    for (int64_t i = 0; i < shape_.layers; ++i) in = layer(i, in);
    value("z", "T", shape_.cols, "rms_norm(" + in + ", %last) {eps = 1e-06}");
    value("rows", "R", shape_.cols, "select_rows(%z, %logit_rows)");
    value("logits", "R", shape_.vocab, "linear(%rows, %head)");
    return text_ + "  return %logits\n}\n";
  }

 private:
  void weight(const std::string& name, int64_t rows, int64_t cols) {
    text_ += "  weight %" + name + " = \"" + name + "\" : " + shape_.type + "[" +
             std::to_string(rows) + ", " + std::to_string(cols) + "]\n";
  }
  void norm(const std::string& name) {
    text_ +=
        "  weight %" + name + " = \"" + name + "\" : f32[" + std::to_string(shape_.cols) + "]\n";
  }
  void value(const std::string& name, const char* rows, int64_t cols, const std::string& of) {
    text_ += "  %" + name + " : f32[" + rows + ", " + std::to_string(cols) + "] = " + of + "\n";
  }

  std::string layer(int64_t index, const std::string& in) {
    const std::string n = std::to_string(index);
    const std::string head_dim = ", head_dim = " + std::to_string(shape_.head_dim);
    const std::string heads = "heads = " + std::to_string(shape_.heads) + head_dim;
    const std::string kv_heads = "heads = " + std::to_string(shape_.kv_heads) + head_dim;
    const int64_t q = shape_.heads * shape_.head_dim;
    const int64_t kv = shape_.kv_heads * shape_.head_dim;
    value("a" + n, "T", shape_.cols, "rms_norm(" + in + ", %na" + n + ") {eps = 1e-06}");
    value("qa" + n, "T", q, "linear(%a" + n + ", %q" + n + ")");
    value("ka" + n, "T", kv, "linear(%a" + n + ", %k" + n + ")");
    value("va" + n, "T", kv, "linear(%a" + n + ", %v" + n + ")");
    value("qr" + n, "T", q, "rope(%qa" + n + ", %t) {" + heads + "}");
    value("kr" + n, "T", kv, "rope(%ka" + n + ", %t) {" + kv_heads + "}");
    text_ += "  %kv" + n + " : kv[" + n + ", " + std::to_string(shape_.kv_heads) + ", " +
             std::to_string(shape_.head_dim) + "] = kv_append(%kr" + n + ", %va" + n +
             ") {layer = " + n + ", " + kv_heads + "}\n";
    value("c" + n, "T", q,
          "attention(%qr" + n + ", %kv" + n + ") {layer = " + n + ", " + heads +
              ", kv_heads = " + std::to_string(shape_.kv_heads) + ", sm_scale = 0.1}");
    value("p" + n, "T", shape_.cols, "linear(%c" + n + ", %o" + n + ")");
    value("y" + n, "T", shape_.cols, "add(%p" + n + ", " + in + ")");
    value("f" + n, "T", shape_.cols, "rms_norm(%y" + n + ", %nf" + n + ") {eps = 1e-06}");
    value("g" + n, "T", shape_.ffn, "linear(%f" + n + ", %gate" + n + ")");
    value("u" + n, "T", shape_.ffn, "linear(%f" + n + ", %up" + n + ")");
    value("s" + n, "T", shape_.ffn, "silu(%g" + n + ")");
    value("m" + n, "T", shape_.ffn, "mul(%s" + n + ", %u" + n + ")");
    value("d" + n, "T", shape_.cols, "linear(%m" + n + ", %down" + n + ")");
    value("h" + n, "T", shape_.cols, "add(%d" + n + ", %y" + n + ")");
    return "%h" + n;
  }

  const ModelShape& shape_;
  std::string text_;
};

// Of quantised types weights of about 0.01: float16 scales of 2^-14.
std::vector<uint8_t> small_numbers(size_t count) {
  std::vector<uint8_t> bytes = random_bytes(count);
  for (size_t i = 1; i < count; i += 2) bytes[i] = static_cast<uint8_t>((bytes[i] & 0x83) | 0x04);
  return bytes;
}

// Weights of one shape share their bytes on the host, and each has its own on the device.
std::shared_ptr<const Model> random_model(const ModelShape& shape, int64_t& bytes_of_token) {
  const Graph graph = Graph::parse(GraphText(shape).write());
  auto weights = std::make_shared<MemoryWeights>();
  std::map<std::vector<int64_t>, std::shared_ptr<std::vector<std::byte>>> by_shape;
  bytes_of_token = 0;
  for (const ValueId id : graph.weights) {
    const Value& value = graph.value(id);
    TensorView view;
    view.dtype = value.dtype;
    std::vector<int64_t> key;
    for (const Dim& dim : value.shape) key.push_back(dim.value);
    for (const int64_t dim : key) view.dims.push_back(dim);
    std::shared_ptr<std::vector<std::byte>>& bytes = by_shape[key];
    if (bytes == nullptr) {
      bytes = std::make_shared<std::vector<std::byte>>(view.num_bytes());
      if (key.size() == 1) {  // of a norm
        std::fill_n(reinterpret_cast<float*>(bytes->data()), key[0], 1.0f);
      } else {
        std::memcpy(bytes->data(), small_numbers(view.num_bytes()).data(), view.num_bytes());
      }
    }
    view.data = bytes->data();
    weights->add(value.weight_name, view, bytes);
    if (value.weight_name != "embed") bytes_of_token += static_cast<int64_t>(view.num_bytes());
  }
  return std::make_shared<Model>(Model{graph, weights});
}

ModelShape shape_of(Options& options, const char* model) {
  ModelShape shape = shape_of(options[model]);
  shape.type = options["--model-type"];
  return shape;
}

std::string members_of(const char* section, const std::string& op, const ModelShape& shape) {
  return member("section", section) + ", " + member("op", op) + ", " + member("type", shape.type) +
         ", " + member("layers", shape.layers) + ", " + member("cols", shape.cols);
}

// Seconds until the first token, and of each after it.
struct Times {
  std::vector<double> first, each;
};

Times generate(const std::shared_ptr<const Model>& model, Options& options,
               const Settings& settings) {
  EngineOptions engine_options;
  engine_options.device = kGpu;
  engine_options.max_seq_len = 4096;
  engine_options.num_pages = 128;
  Engine engine(model, engine_options);
  SamplingParams params;
  params.temperature = 0.0f;
  params.ignore_eos = true;
  const int tokens = std::atoi(options["--model-tokens"].c_str());
  std::vector<int32_t> prompt(static_cast<size_t>(std::atoi(options["--model-prompt"].c_str())));
  std::iota(prompt.begin(), prompt.end(), 1);
  Times times;
  for (int i = 0; i <= settings.replays / 4 + 1; ++i) {
    prompt[0] = i;  // no prefix is found
    params.max_tokens = tokens + 1;
    const double started = now(CLOCK_MONOTONIC);
    double begun = 0;
    engine.generate(prompt, params, [&](int32_t) {
      if (begun == 0) begun = now(CLOCK_MONOTONIC);
      return true;
    });
    if (i == 0) continue;  // recordings are made
    times.first.push_back(begun - started);
    times.each.push_back((now(CLOCK_MONOTONIC) - begun) / tokens);
  }
  return times;
}

// The operator that is launched twice.
std::string repeated;

template <class Problem, const char* kOp>
void may_be_repeated() {
  ops::ensure_registered();
  ops::mutable_table<Problem>().add(
      {std::string(kOp) + ".twice", Isa::portable,
       [](const Problem&) { return repeated == kOp ? nullptr : "is not repeated"; }, nullptr,
       nullptr, DeviceKind::cuda,
       [](const Problem& problem, Queue& queue) {
         const std::string op = std::exchange(repeated, "");
         const auto& variant = ops::table<Problem>().select(problem, current_target(kGpu));
         for (int i = 0; i < 2; ++i) variant.launch(problem, queue);
         repeated = op;
       },
       cuda_backend()->arch(0)});
}

// Of the second cache, in percent: what a matmul behind attention asks for of the next weights in
// place of what the compiler says.
std::optional<int> asked_ahead;

void may_ask_for_another_share() {
  ops::ensure_registered();
  ops::mutable_table<ops::MatmulProblem>().add(
      {"matmul.another_share", Isa::portable,
       [](const ops::MatmulProblem& problem) {
         return asked_ahead && problem.next.num_parts > 0 ? nullptr : "asks for what it should";
       },
       nullptr, nullptr, DeviceKind::cuda,
       [](const ops::MatmulProblem& problem, Queue& queue) {
         const std::optional<int> percent = std::exchange(asked_ahead, {});
         const Target target = current_target(kGpu);
         ops::MatmulProblem own = problem;
         own.next.bytes = target.l2_bytes * percent.value_or(0) / 100;
         ops::table<ops::MatmulProblem>().select(own, target).launch(own, queue);
         asked_ahead = percent;
       },
       cuda_backend()->arch(0)});
}

constexpr char kNorm[] = "norm", kRope[] = "rope", kAttention[] = "attention";

}  // namespace

int bench_model(Options& options, const Settings& settings, effinfer::Queue&) {
  const ModelShape shape = shape_of(options, "--model");
  int64_t bytes = 0;
  const std::shared_ptr<const Model> model = random_model(shape, bytes);
  const Times times = generate(model, options, settings);
  print_row(members_of("model", "a token", shape), summary(times.each), bytes, 0);
  const std::string prompt = options["--model-prompt"];
  const double products =
      2.0 * std::atof(prompt.c_str()) * static_cast<double>(shape.layers * shape.cols) *
      static_cast<double>(shape.head_dim * (shape.heads + shape.kv_heads) * 2 + 3 * shape.ffn);
  print_row(members_of("model", "a prompt of " + prompt, shape), summary(times.first), bytes,
            products);
  return 2;
}

// Kernels overlap in a recorded step, so that what one of them takes alone says little: what an
// operator costs there is how much longer a token takes when each of its launches comes twice. Then
// what it gains that weights are asked for while attention runs (ops::NextWeights).
int bench_step(Options& options, const Settings& settings, effinfer::Queue&) {
  may_be_repeated<ops::RmsNormProblem, kNorm>();
  may_be_repeated<ops::RopeAppendProblem, kRope>();
  may_be_repeated<ops::AttentionProblem, kAttention>();
  may_ask_for_another_share();
  const ModelShape shape = shape_of(options, "--step-model");
  int64_t bytes = 0;
  const std::shared_ptr<const Model> model = random_model(shape, bytes);
  const char* const ops[] = {"", kNorm, kRope, kAttention};
  for (const char* op : ops) {
    repeated = op;
    const Times times = generate(model, options, settings);
    const std::string what = repeated.empty() ? "a token" : "a token, each " + repeated + " twice";
    print_row(members_of("step", what, shape), summary(times.each), 0, 0);
  }
  repeated.clear();
  const int shares[] = {0, 10, 20, 50};
  for (const int percent : shares) {
    asked_ahead = percent;
    const Times times = generate(model, options, settings);
    const std::string what = "a token, " + std::to_string(percent) + " % of L2 asked for ahead";
    print_row(members_of("step", what, shape), summary(times.each), 0, 0);
  }
  asked_ahead.reset();
  return static_cast<int>(std::size(ops) + std::size(shares));
}

}  // namespace bench
