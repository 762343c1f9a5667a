# The front door: `make help` lists the targets. The build itself is CMakeLists.txt, the steps are in tools/.
#
# PYTHON=python3 uses that interpreter as it is; without it a virtual environment .venv is made and filled
# from requirements/. CC chooses the C compiler. With CI=true whatever is missing is a failure, otherwise it
# is left out with a sentence that says so.

.DEFAULT_GOAL := build
MAKEFLAGS += --no-print-directory

BUILD ?= build
PREFIX ?= /usr/local
DESTDIR ?=
FUZZ_SECONDS ?= 300
BENCH_ARGS ?=
PRODUCTS := opaq_shared opaq_static opaq_torch opaq opaq_cli_pages # targets of CMakeLists.txt

export PYTHON CI

build: ## build the libraries and the command opaq into build/ (the default)
	@TARGETS="$(PRODUCTS)" tools/build.sh $(BUILD)

programs: ## also tests, demonstrations, examples and benchmarks
	@tools/build.sh $(BUILD)

test: test-c test-python ## before a push: the C tests in Release and the Python tests

test-all: test test-python-slow test-wheel test-sanitize fuzz-short test-transformers test-trainers test-neon ## also slow Python tests, the wheel, sanitizers, fuzzers, the oldest transformers, trainers, AArch64

test-c: programs ## the C tests, examples and installation, in Release
	@tools/run_ctest.sh $(BUILD)

test-sanitize: ## the C tests under ASan and UBSan, those with threads under TSan
	@tools/test_sanitize.sh

test-neon: ## the C tests for AArch64, under emulation; needs a cross compiler and qemu-aarch64
	@tools/test_neon.sh

test-python: build ## the Python tests but for the slow ones
	@tools/test_python.sh $(BUILD)

test-python-slow: build ## the Python tests that are marked slow
	@tools/test_python.sh $(BUILD) slow

test-wheel: ## builds the wheel and reads it: files, licences, ELF properties
	@tools/test_wheel.sh $(BUILD)

test-transformers: build ## the transformers integration with the oldest supported release
	@tools/test_transformers_range.sh $(BUILD)

test-trainers: build ## opaq inside torchtitan and Megatron-core, from requirements/trainers.txt
	@tools/test_trainers.sh $(BUILD)

test-vllm: build ## the plug-in for vLLM with the real vLLM, in .venv-vllm: 2.5 GB and about eight minutes
	@tools/test_vllm.sh $(BUILD)

test-cuda-build: ## compiles the CUDA back end with nvcc, and says what each kernel takes
	@tools/check_cuda.sh --print

test-gpu: ## builds the CUDA back end and tests it on this machine's GPU: C tests, compute-sanitizer, PyTorch with PYTHON
	@tools/test_gpu.sh

fuzz: ## every fuzz target for FUZZ_SECONDS (300)
	@tools/fuzz.sh $(FUZZ_SECONDS)

fuzz-short: ## every fuzz target for 10 seconds
	@tools/fuzz.sh 10

check: ## formatting, warnings, static analysis, include direction, exported symbols, ...
	@tools/check.sh

format: ## reformat the C and Python files in place
	@tools/check_format.sh --fix

demo: programs ## run the demonstrations
	@tools/demo.sh $(BUILD)

evidence: build ## what quantizing costs in each projection, in cosines to bf16; also part of the demonstrations
	@tools/demo.sh $(BUILD) demo/demo_projections.py

bench: programs ## the benchmarks and one table of all targets; BENCH_ARGS="--rounds N --benches LIST --strict"; JSON in build/bench
	@tools/run_benches.sh $(BUILD) $(BENCH_ARGS)

bench-overhead: build ## what calling an operator from PyTorch costs; figures also go to build/bench/bench_overhead.json
	@tools/bench_overhead.sh $(BUILD) $(BENCH_ARGS)

bench-checkpoint: build ## quantizing a checkpoint of 2 GB beside cp and beside compressed-tensors; takes minutes and 10 GB
	@tools/bench_checkpoint.sh $(BUILD) $(BENCH_ARGS)

golden: ## make the files in tests/golden again, from other people's encoders
	@tools/golden.sh

install: ## install under PREFIX (/usr/local), staged in DESTDIR
	@TARGETS="$(PRODUCTS)" tools/build.sh $(BUILD) -DCMAKE_INSTALL_PREFIX="$(abspath $(PREFIX))"
	@DESTDIR="$(DESTDIR)" "$$(tools/find_cmake.sh)" --install $(BUILD)

clean: ## remove everything that was built; .venv stays
	rm -rf build build-*

help: ## this table
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build programs test test-all test-wheel test-transformers test-trainers test-vllm test-c test-sanitize test-neon test-python test-python-slow test-cuda-build test-gpu fuzz fuzz-short check format demo \
	evidence bench bench-overhead bench-checkpoint golden install clean help
