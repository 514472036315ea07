// Loads an artifact and generates tokens, without Python:  embed ARTIFACT MAX_TOKENS ID [ID ...]
#include <effinfer/effinfer.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: embed ARTIFACT MAX_TOKENS ID [ID ...]\n");
    return 2;
  }
  try {
    effinfer::EngineOptions options;
    options.precision = effinfer::Precision::f32;
    effinfer::Engine engine(effinfer::Model::load(argv[1]), options);

    effinfer::SamplingParams params;
    params.temperature = 0.0f;
    params.max_tokens = std::atoi(argv[2]);
    std::vector<int32_t> prompt;
    for (int i = 3; i < argc; ++i) prompt.push_back(std::atoi(argv[i]));

    engine.generate(prompt, params, [](int32_t token) {
      std::printf("%d\n", token);
      return true;
    });
  } catch (const effinfer::Error& error) {
    std::fprintf(stderr, "embed: %s\n", error.what());
    return 1;
  }
  return 0;
}
