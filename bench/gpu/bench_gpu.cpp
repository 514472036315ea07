// Speed of the GPU kernels, in CUDA graphs over inputs in turn that no cache holds.
//
//   bench_gpu [--sections copy,matmul,prefill,ternary,attention,prompts,norms,sampling,model,step]
//             [--rotate-mb 400] [--replays 12] [--least-calls 8] [--copy-mb 1024]
//             [--shapes 4096x4096,30MBx4096] [--dtypes q4_0,bf16] [--tokens 1,4,16,64]
//             [--prompt-tokens 512,2048] [--ternary-shapes 13824x2560]
//             [--batches 1,8,64] [--contexts 1024] [--groups 1,4,8] [--kv-heads 8]
//             [--head-dim 128] [--query-rows 1,8] [--prompt-lengths 8192] [--densities 1,0.1]
//             [--norm-rows 1,1024] [--norm-cols 4096]
//             [--sampling-rows 1,64] [--sampling-vocab 128256]
//             [--model layers=32,cols=4096,ffn=14336,heads=32,kv_heads=8,head_dim=128,vocab=128256]
//             [--step-model layers=8,...]
//             [--model-type q4_k] [--model-prompt 512] [--model-tokens 64]
//
// A JSON object a line goes to stdout: first the device, then a row for each case with the bytes
// that its call must move and the operations that it makes. Without a device: exit status 2.
#include <cstdio>

#include "bench/gpu/measure.h"
#include "effinfer/error.h"

namespace bench {

// Bytes are counted twice: read and written.
int bench_copy(Options& options, const Settings& settings, effinfer::Queue& queue) {
  const auto bytes = static_cast<size_t>(std::atof(options["--copy-mb"].c_str()) * 1e6);
  const std::vector<uint8_t> pattern = random_bytes(std::min<size_t>(bytes, 1 << 20));
  const effinfer::DeviceArray<uint8_t> from =
      filled(static_cast<int64_t>(bytes), pattern.data(), static_cast<int64_t>(pattern.size()));
  const effinfer::DeviceArray<uint8_t> to(bytes);
  const Timing time = measure(queue, settings, 1,
                              [&](int) { copy_on_device(queue, to.data(), from.data(), bytes); });
  if (to.values() != from.values()) {
    std::fprintf(stderr, "copy: other bytes arrived\n");
    std::exit(1);
  }
  print_row(member("section", "copy"), time, static_cast<int64_t>(2 * bytes), 0);
  return 1;
}

namespace {

void print_device() {
  const DeviceFacts facts = device_facts();
  std::printf(
      "{\"section\": \"device\", \"name\": \"%s\", \"arch\": %d, \"multiprocessors\": %d, "
      "\"l2_bytes\": %lld, \"free_bytes\": %lld, \"runtime\": %d, \"driver\": %d}\n",
      facts.name.c_str(), facts.arch, facts.multiprocessors, static_cast<long long>(facts.l2_bytes),
      static_cast<long long>(facts.free_bytes), facts.runtime, facts.driver);
}

int run(Options& options) {
  using Section = int (*)(Options&, const Settings&, effinfer::Queue&);
  const std::map<std::string, Section> sections = {
      {"copy", bench_copy},       {"matmul", bench_matmul},       {"prefill", bench_prefill},
      {"ternary", bench_ternary}, {"attention", bench_attention}, {"prompts", bench_prompts},
      {"norms", bench_norms},     {"sampling", bench_sampling},   {"model", bench_model},
      {"step", bench_step}};
  const Settings settings{std::atof(options["--rotate-mb"].c_str()) * 1e6,
                          std::atoi(options["--replays"].c_str()),
                          std::atoi(options["--least-calls"].c_str())};
  print_device();
  const std::unique_ptr<effinfer::Queue> queue = effinfer::make_queue(effinfer::kGpu);
  for (const std::string& name : split(options["--sections"])) {
    const auto section = sections.find(name);
    if (section == sections.end()) {
      std::fprintf(stderr, "unknown section: %s\n", name.c_str());
      return 2;
    }
    if (section->second(options, settings, *queue) > 0) continue;
    std::fprintf(stderr, "%s: nothing was measured\n", name.c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  bench::Options options = {
      {"--sections", "copy,matmul,prefill,ternary,attention,prompts,norms,sampling,model,step"},
      {"--rotate-mb", "400"},
      {"--replays", "12"},
      {"--least-calls", "8"},
      {"--copy-mb", "1024"},
      {"--shapes", "4096x4096,14336x4096,4096x14336,30MBx4096"},
      {"--dtypes", "q4_0,q4_k,q6_k,q8_0,bf16"},
      {"--tokens", "1,4,16,64"},
      {"--prompt-tokens", "512,2048"},
      {"--ternary-shapes", "13824x2560"},
      {"--batches", "1,8,64"},
      {"--contexts", "1024,8192,65536"},
      {"--groups", "1,4,8"},
      {"--kv-heads", "8"},
      {"--head-dim", "128"},
      {"--query-rows", "1,8"},
      {"--prompt-lengths", "8192"},
      {"--densities", "1,0.1"},
      {"--norm-rows", "1,64,1024,8192"},
      {"--norm-cols", "4096"},
      {"--sampling-rows", "1,64"},
      {"--sampling-vocab", "128256"},
      {"--model", "layers=32,cols=4096,ffn=14336,heads=32,kv_heads=8,head_dim=128,vocab=128256"},
      {"--step-model",
       "layers=8,cols=4096,ffn=14336,heads=32,kv_heads=8,head_dim=128,vocab=128256"},
      {"--model-type", "q4_k"},
      {"--model-prompt", "512"},
      {"--model-tokens", "64"}};
  bench::read_options(argc, argv, options);
  const effinfer::Backend* backend = effinfer::cuda_backend();
  if (backend == nullptr || backend->num_devices() == 0) {
    std::fprintf(stderr, "bench_gpu: %s\n",
                 backend == nullptr ? "built without CUDA" : backend->status().c_str());
    return 2;
  }
  try {
    return bench::run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_gpu: %s\n", error.what());
    return 1;
  }
}
