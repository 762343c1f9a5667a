# Entry point for developers: `make help` lists the targets. CMakeLists.txt defines the build, tools/ holds the steps.
#
# PYTHON=python3 uses that interpreter without installing anything; otherwise a virtual environment .venv is created
# and filled from requirements/. CC chooses the C compiler. Steps whose tools are missing are skipped with a note;
# with CI=true a missing tool is an error.

.DEFAULT_GOAL := build
MAKEFLAGS += --no-print-directory

BUILD ?= build
PREFIX ?= /usr/local
DESTDIR ?=
FUZZ_SECONDS ?= 300
BENCH_ARGS ?=

export PYTHON CI OPAQ_CUDA

build: ## build the libraries and the command opaq into build/ (the default); the CUDA back end too if there is an nvcc (OPAQ_CUDA=OFF: not)
	@TARGETS=opaq_products tools/build.sh $(BUILD)
	@tools/python_env.sh || [ $$? = 3 ]

programs: ## build everything: also tests, demonstrations, examples and benchmarks
	@tools/build.sh $(BUILD)

test: test-c test-python ## before a push: the C tests in Release and the Python tests

test-all: test test-python-slow test-wheel test-sanitize fuzz-short test-transformers test-trainers test-neon ## also slow Python tests, the wheel, sanitizers, fuzzers, the oldest transformers, trainers, AArch64

test-c: programs ## the C tests, examples and installation, in Release
	@tools/run_ctest.sh $(BUILD)

test-sanitize: ## the C tests under ASan and UBSan, those with threads under TSan
	@tools/test_sanitize.sh

test-neon: ## the C tests for AArch64, under emulation; needs a cross compiler and qemu-aarch64
	@tools/test_neon.sh

test-python: build ## the Python tests that are not marked slow
	@tools/test_python.sh $(BUILD)

test-python-slow: build ## the Python tests that are marked slow
	@tools/test_python.sh $(BUILD) slow

wheel: ## build the wheel into build/wheel/dist, with the CUDA back end if there is an nvcc; OPAQ_CUDA=OFF leaves it out
	@tools/build_wheel.sh $(BUILD)

test-wheel: ## build the wheel, check its contents, and install and run it in a bare environment
	@tools/test_wheel.sh $(BUILD)

test-transformers: build ## the transformers integration with the oldest supported release
	@tools/test_transformers_range.sh $(BUILD)

test-trainers: build ## opaq inside torchtitan and Megatron-core, from requirements/trainers.txt
	@tools/test_trainers.sh $(BUILD)

test-vllm: build ## the vLLM plug-in with the real vLLM, in .venv-vllm: 2.5 GB and about eight minutes
	@tools/test_vllm.sh $(BUILD)

test-cuda-build: ## compile the CUDA back end with nvcc, and print each kernel's registers, stack and spills
	@tools/check_cuda.sh --print

test-gpu: ## build the CUDA back end and test it on this machine's GPU: C tests, compute-sanitizer, PyTorch with PYTHON
	@tools/test_gpu.sh

fuzz: ## every fuzz target for FUZZ_SECONDS (300)
	@tools/fuzz.sh $(FUZZ_SECONDS)

fuzz-short: ## every fuzz target for 10 seconds, with the same inputs in every clone; fuzz explores others
	@tools/fuzz.sh 10 1

check: ## formatting, warnings, static analysis, include direction, exported symbols, ...
	@tools/check.sh

docs: ## the site of README.md and docs/ into build/site; a broken link is an error (also part of make check)
	@tools/docs.sh $(BUILD)/site

format: ## reformat the C and Python files in place
	@tools/check_format.sh --fix

demo: ## a look at everything in about two minutes; ends with a page, build/demo/index.html
	@tools/demo.sh $(BUILD)

evidence: build ## each projection's quantization error, as cosines to bf16; takes a minute
	@tools/evidence.sh $(BUILD)

bench: programs ## the benchmarks and one table of all targets; BENCH_ARGS="--rounds N --benches LIST --strict"; JSON in build/bench
	@tools/run_benches.sh $(BUILD) $(BENCH_ARGS)

bench-overhead: build ## the overhead of operator calls from PyTorch; figures also go to build/bench/bench_overhead.json
	@tools/bench_overhead.sh $(BUILD) $(BENCH_ARGS)

bench-gpu: ## the CUDA back end beside PyTorch on this machine's GPU, with PYTHON; BENCH_ARGS="--rows PATTERN --seconds N --quick"
	@tools/bench_gpu.sh $(BUILD) $(BENCH_ARGS)

bench-checkpoint: build ## quantizing a checkpoint of 2 GB beside cp and beside compressed-tensors; takes minutes and 10 GB
	@tools/bench_checkpoint.sh $(BUILD) $(BENCH_ARGS)

golden: ## regenerate tests/golden with independent encoders
	@tools/golden.sh

install: ## install under PREFIX (/usr/local), staged in DESTDIR
	@TARGETS=opaq_products tools/build.sh $(BUILD) -DCMAKE_INSTALL_PREFIX="$(abspath $(PREFIX))"
	@DESTDIR="$(DESTDIR)" "$$(tools/find_cmake.sh)" --install $(BUILD)

clean: ## remove all build folders; keeps .venv
	rm -rf build build-*

help: ## this table
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build wheel programs test test-all test-wheel test-transformers test-trainers test-vllm test-c test-sanitize test-neon test-python test-python-slow test-cuda-build test-gpu fuzz fuzz-short check docs format demo \
	evidence bench bench-overhead bench-gpu bench-checkpoint golden install clean help
