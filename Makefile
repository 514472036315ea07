# effinfer: what the README and CI call. Everything happens in .venv and build/.
#
#   make demo      build, fetch the default model, generate text
#   make test      C++ tests, Python tests, the C++ embedding example
#   make wheel     a manylinux wheel in dist/, checked by auditwheel
#   make test-serving
#                  the server's tests in full: 10^4 mutated bodies, 30 seeds of 50 schemas, 2,000
#                  clients that hang up
#   make test-clients
#                  the server through langchain-openai and litellm, which it installs (300 MB)
#   make test-ray  two replicas behind Ray Serve, which it installs (330 MB)
#   make test-browser
#                  the page to chat, in the Chromium that is on the PATH
#   make soak      ten minutes of mixed load on the server; SOAK_SECONDS=60 is a minute
#   make test-slow what is exhaustive: all small trees under each verifier, a million draws of each
#   make lint      formatting, types, size budgets, layers, the catalogue of techniques
#   make sanitize  the core's tests and the GGUF fuzzer under ASan and UBSan; the pool, the engine,
#                  speculation and the GPU's emulator under TSan
#   make sanitize-gpu
#                  GPU kernels in the emulator under ASan and UBSan, alone and in whole models
#   make fidelity  distance to a float32 reference on the full text
#   make bench     speed against the peers, interleaved; writes docs/performance.md;
#                  BENCH_FLAGS="--only context,batch" measures some sections again
#   make bench-techniques
#                  techniques on real models; writes the tables of docs/techniques.md;
#                  BENCH_FLAGS="--table keys --row xkv" prints some rows of one in minutes
#   make bench-gpu on a machine with a GPU: its ceilings, the device tests, the kernels' speed;
#                  BENCH_FLAGS="--skip peers" leaves parts out
#   make format    rewrites the sources in the house style
#   make catalogue rewrites docs/catalogue.md, after a change of a technique
#   make stubs     rewrites the types of the native module, after a change of its bindings

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One build tree for the package and the C++ tests: nothing is compiled twice. A wheel to be given
# away has one of its own, as it has machine code for more GPUs.
BUILD := build/wheel
FUZZ_MUTATIONS ?= 100000
SOAK_SECONDS ?= 600
SETUP := $(BIN)/python tools/setup_venv.py

.PHONY: demo test test-slow test-serving test-clients test-browser test-ray soak wheel lint sanitize sanitize-gpu fidelity bench bench-compare bench-techniques bench-gpu format stubs catalogue clean
.DEFAULT_GOAL := test

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Installs groups of requirements once, and the package whenever a source changed.
demo: | $(BIN)/python
	@$(SETUP) build
	@$(SETUP) package --build-dir $(BUILD)
	$(BIN)/effinfer generate "The three laws of robotics are" --max-tokens 64
	@echo "demo: done"

# Two processes, whose models run on one thread each where a test does not say on how many, as do NumPy
# and PyTorch, whose threads would wait for a core in a loop; then what measures time. Files in their
# order: by their number of tests, as xdist would, those with one long test come last, and one process
# waits.
PYTEST_WITH_EMULATOR = EFFINFER_EMULATED=$(CURDIR)/$(BUILD)/emulated/libeffinfer.so \
  EFFINFER_WATCHED_LAUNCHES=2 $(BIN)/python -m pytest

test: | $(BIN)/python
	@$(SETUP) build serve test
	@$(SETUP) package --build-dir $(BUILD) --with-tests
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure --parallel 2
	$(BIN)/python tools/check_isa_symbols.py $(BUILD)
	@$(CHECK_SASS)
	EFFINFER_THREADS=1 OMP_NUM_THREADS=1 $(PYTEST_WITH_EMULATOR) -n 2 --dist loadfile \
	  --no-loadscope-reorder -m "not alone"
	$(PYTEST_WITH_EMULATOR) -m alone
	@echo "test: all passed"

test-serving: | $(BIN)/python
	@$(SETUP) build serve test
	@$(SETUP) package --build-dir $(BUILD)
	EFFINFER_FULL=1 $(BIN)/python -m pytest tests/serve
	@echo "test-serving: all passed"

test-clients: | $(BIN)/python
	@$(SETUP) build serve test clients
	@$(SETUP) package --build-dir $(BUILD)
	$(BIN)/python -m pytest tests/serve/test_clients.py
	@echo "test-clients: all passed"

# A browser is the system's: nothing is installed here.
test-browser: | $(BIN)/python
	@$(BIN)/python -c "import sys; sys.path.insert(0, '.'); from tests.serve.browser import find_browser; \
	  sys.exit(0 if find_browser() else 'make test-browser: no Chromium on the PATH; Debian has one: apt-get install chromium-headless-shell')"
	@$(SETUP) build serve test
	@$(SETUP) package --build-dir $(BUILD)
	$(BIN)/python -m pytest tests/serve/test_page.py
	@echo "test-browser: all passed"

test-ray: | $(BIN)/python
	@$(SETUP) build serve test scale
	@$(SETUP) package --build-dir $(BUILD)
	$(BIN)/python -m pytest tests/serve/test_ray_serve.py
	@echo "test-ray: all passed"

soak: | $(BIN)/python
	@$(SETUP) build serve test
	@$(SETUP) package --build-dir $(BUILD)
	$(BIN)/python -m tests.serve.soak --seconds $(SOAK_SECONDS)

test-slow: test
	EFFINFER_SLOW_TESTS=1 $(BIN)/ctest --test-dir $(BUILD) -R test_verifier --output-on-failure
	EFFINFER_SLOW_TESTS=1 $(BIN)/python -m pytest tests/techniques/test_pair.py

# Where the CUDA backend was built. Its disassembler is NVIDIA's, and optional.
ifneq ($(shell command -v nvcc),)
CHECK_SASS = $(SETUP) sass || echo "test: no cuobjdump"; \
  $(BIN)/python tools/check_sass.py $(BUILD)
else
CHECK_SASS = true
endif

wheel: | $(BIN)/python
	@$(SETUP) build wheel
	$(BIN)/python tools/build_wheel.py

lint: | $(BIN)/python
	@$(SETUP) build run serve lint
	$(BIN)/python tools/check_size.py
	$(BIN)/python tools/check_layers.py
	$(BIN)/python tools/make_catalogue.py --check
	$(BIN)/python tools/clang_format.py --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@echo "lint: clean"

format: | $(BIN)/python
	@$(SETUP) build lint
	$(BIN)/python tools/clang_format.py
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The optimiser would take most of the time of an instrumented build, and only lines are needed of
# debug data.
SANITIZE_FLAGS := -G Ninja -DEFFINFER_TESTS=ON -DEFFINFER_CUDA=OFF -DEFFINFER_UNITY=ON \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  '-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O0 -g1 -DNDEBUG'
# What several threads use at once.
TSAN_TESTS := test_core test_engine test_executors test_draft_ahead test_speculation test_speculation_faults
# The emulator and the kernels of its own tests: it sees races of all others itself, in every build
# without sanitizers (tests/gpu/races.cpp).
TSAN_GPU_TESTS := test_gpu_emulator test_gpu_emulator_races test_gpu_unit
# CMake reads it from the environment.
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
endif

CONFIGURE_ASAN = PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/cmake -S . $(SANITIZE_FLAGS) \
  -DEFFINFER_SANITIZE=address,undefined

sanitize: | $(BIN)/python
	@$(SETUP) build
	$(CONFIGURE_ASAN) -B build/asan
	$(BIN)/cmake --build build/asan
	ASAN_OPTIONS=allocator_may_return_null=1 $(BIN)/ctest --test-dir build/asan --output-on-failure --parallel 2 -LE kernels
	build/asan/tests/cpp/fuzz_gguf tests/cpp/corpus/gguf $(FUZZ_MUTATIONS)
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/cmake -S . -B build/tsan $(SANITIZE_FLAGS) \
	  -DEFFINFER_SANITIZE=thread -DEFFINFER_VECTOR_KERNELS=OFF
	$(BIN)/cmake --build build/tsan --target $(TSAN_TESTS) $(TSAN_GPU_TESTS)
	for test in $(TSAN_TESTS); do build/tsan/tests/cpp/$$test || exit 1; done
	$(BIN)/ctest --test-dir build/tsan --output-on-failure --parallel 2 -R '^test_gpu_(emulator|emulator_races.*|unit)$$'
	@echo "sanitize: clean"

sanitize-gpu: | $(BIN)/python
	@$(SETUP) build
	$(CONFIGURE_ASAN) -B build/asan-gpu -DEFFINFER_SANITIZE_KERNELS=ON
	$(BIN)/cmake --build build/asan-gpu --target gpu_tests
	$(BIN)/ctest --test-dir build/asan-gpu --output-on-failure --parallel 2 -R '^test_gpu_'
	@echo "sanitize-gpu: clean"

fidelity: | $(BIN)/python
	@$(SETUP) build test
	@$(SETUP) package --build-dir $(BUILD)
	EFFINFER_FULL=1 $(BIN)/python -m pytest tests/models -s
	@echo "fidelity: done"

bench: | $(BIN)/python
	@$(SETUP) build serve test bench
	@$(SETUP) package --build-dir $(BUILD)
	$(BIN)/python bench/run.py $(BENCH_FLAGS)
	@echo "bench: docs/performance.md written"

# This version beside another checkout, in turns: BEFORE=/path, COMPARE_FLAGS="--repeats 9".
bench-compare: | $(BIN)/python
	@$(SETUP) build test bench
	@$(SETUP) package --build-dir $(BUILD)
	$(BIN)/python bench/compare.py --before $(BEFORE) $(COMPARE_FLAGS)

# Sparse prefills on real models and text; writes the tables of docs/techniques.md.
bench-techniques: | $(BIN)/python
	@$(SETUP) build test bench
	@$(SETUP) package --build-dir $(BUILD)
	$(BIN)/python bench/techniques.py $(BENCH_FLAGS)

# Says what is missing, with status 2, before it installs or builds anything. What CMake needs comes
# from the PATH if it is there: a machine with a GPU may reach no package index.
bench-gpu:
	@$(PYTHON) bench/gpu.py --look
	@command -v cmake ninja >/dev/null || { $(MAKE) $(BIN)/python && $(SETUP) build; }
	PATH=$$PATH:$(CURDIR)/$(BIN) $(PYTHON) bench/gpu.py $(BENCH_FLAGS)

# The typing stubs of the native module, generated from the built one.
catalogue: | $(BIN)/python
	@$(SETUP) build run
	$(BIN)/python tools/make_catalogue.py

stubs: | $(BIN)/python
	@$(SETUP) build lint
	@$(SETUP) package --build-dir $(BUILD)
	$(BIN)/python tools/make_stubs.py

clean:
	rm -rf build $(VENV)
