// Attention over bfloat16 pages: of decoding steps, batches of sequences with a few rows each
// (section attention), and of whole prompts, dense and with lists of pages (prompts).
#include "bench/gpu/attention_batch.h"

namespace bench {
namespace {

// (query head, row, key) triples.
double pairs(const Shape& shape, const Batch& batch) {
  const double rows = static_cast<double>(shape.batch) * shape.rows * shape.qo_heads();
  if (!shape.prompt) return rows * shape.context;
  if (batch.num_blocks == 0) return rows * (shape.context + 1) / 2;
  return batch.visited_pages * ops::kPageSize * ops::kPageSize * shape.group;
}

void run_case(const Shape& shape, const Pages& pages, const Settings& settings, Queue& queue) {
  const int copies = copies_of(shape.kv_bytes(), settings);
  const Batch batch(shape, copies);
  const DeviceArray<uint16_t> q(random_bf16(static_cast<size_t>(shape.q_numbers())));
  const DeviceArray<uint16_t> out(q.size());
  ops::AttentionProblem problem = problem_of(shape, pages, batch);
  problem.q = {reinterpret_cast<const uint8_t*>(q.data()), DType::bf16, shape.head_dim,
               problem.out_stride, shape.head_dim};
  problem.out = reinterpret_cast<uint8_t*>(out.data());
  const auto& variant = ops::table<ops::AttentionProblem>().select(problem, current_target(kGpu));
  const Timing time = measure(queue, settings, copies, [&](int copy) {
    problem.batch.kv_indices = batch.pages[static_cast<size_t>(copy)].data();
    variant.launch(problem, queue);
  });
  const std::string what = member("section", shape.prompt ? "prompts" : "attention") + ", " +
                           member("batch", shape.batch) + ", " + member("context", shape.context) +
                           ", " + member("group", shape.group) + ", " +
                           member("kv_heads", shape.kv_heads) + ", " +
                           member("head_dim", shape.head_dim) + ", " + member("rows", shape.rows) +
                           ", " + member("items", batch.work.items.size()) + ", " +
                           member("arranged_pages", batch.work.arranged.size());
  const std::string density =
      shape.prompt ? ", \"density\": " + std::to_string(shape.density) : std::string();
  check_results(widened(out.values()), what);
  print_row(what + density, time, shape.kv_bytes() + 4 * shape.q_numbers(),
            4.0 * shape.head_dim * pairs(shape, batch));
}

std::vector<Shape> shapes_of(Options& options) {
  std::vector<Shape> shapes;
  const auto each = [&](const char* option, const std::function<void(int32_t)>& take) {
    for (const std::string& value : split(options[option])) take(std::atoi(value.c_str()));
  };
  Shape shape{};
  shape.kv_heads = std::atoi(options["--kv-heads"].c_str());
  shape.head_dim = std::atoi(options["--head-dim"].c_str());
  each("--batches", [&](int32_t batch) {
    each("--contexts", [&](int32_t context) {
      each("--groups", [&](int32_t group) {
        each("--query-rows", [&](int32_t rows) {
          shape.batch = batch;
          shape.context = context;
          shape.group = group;
          shape.rows = rows;
          shapes.push_back(shape);
        });
      });
    });
  });
  return shapes;
}

// One memory of pages for all of them.
int run_cases(const std::vector<Shape>& wanted, const Settings& settings, Queue& queue) {
  // A case that would leave the device less than this much of its memory is left out, aloud.
  const int64_t most_bytes = device_facts().free_bytes / 10 * 8;
  std::vector<Shape> shapes;
  int64_t most_pages = 0;
  for (const Shape& shape : wanted) {
    const int64_t pages = copies_of(shape.kv_bytes(), settings) * shape.pages();
    if (2 * pages * shape.page_bytes() > most_bytes) {
      std::fprintf(stderr, "attention: batch %d of %d tokens does not fit the device\n",
                   shape.batch, shape.context);
      continue;
    }
    shapes.push_back(shape);
    most_pages = std::max(most_pages, pages);
  }
  if (shapes.empty()) return 0;
  const Pages pages(most_pages, shapes[0].page_bytes());
  for (const Shape& shape : shapes) run_case(shape, pages, settings, queue);
  return static_cast<int>(shapes.size());
}

}  // namespace

int bench_attention(Options& options, const Settings& settings, Queue& queue) {
  return run_cases(shapes_of(options), settings, queue);
}

int bench_prompts(Options& options, const Settings& settings, Queue& queue) {
  std::vector<Shape> shapes;
  for (const std::string& tokens : split(options["--prompt-lengths"])) {
    for (const std::string& group : split(options["--groups"])) {
      for (const std::string& density : split(options["--densities"])) {
        Shape shape{};
        shape.batch = 1;
        shape.context = shape.rows = std::atoi(tokens.c_str());
        shape.group = std::atoi(group.c_str());
        shape.kv_heads = std::atoi(options["--kv-heads"].c_str());
        shape.head_dim = std::atoi(options["--head-dim"].c_str());
        shape.prompt = true;
        shape.density = std::atof(density.c_str());
        shapes.push_back(shape);
      }
    }
  }
  return run_cases(shapes, settings, queue);
}

}  // namespace bench
