# Two commands matter: `make train` and `make test`. Each installs what is missing, builds, runs.
VENV ?= .venv
PYTHON_VENV := $(VENV)/bin/python
JOBS ?= $(shell nproc)
# A Python test may start four processes of its own.
PYTEST_JOBS ?= 2
BUILD := build/release
export VENV JOBS

.DEFAULT_GOAL := help
.PHONY: help setup setup-all setup-test build build-all train train-compare test test-cpp test-python test-long fuzz bench-activations bench-adam bench-checkpoint bench-compile bench-formats bench-gguf bench-gpu bench-gradient bench-graph bench-inference bench-intake bench-io bench-limited bench-plan bench-ranks bench-ranks-deepspeed bench-sizes bench-step large readme lint format sanitize neon wheels docs docs-serve clean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## Install what is missing: Debian packages, .venv with pinned requirements
	@tools/setup

build: setup  ## Build the Python extension (build/release), which is all that training needs
	@tools/build

build-all: setup-all  ## Build the extension, the C++ tests, the benches and the examples
	@tools/build --all

train: build  ## Fine-tune SmolLM2-135M with a 600 MiB host budget, states on NVMe, beside plain PyTorch for a while
	@tools/setup --train
	@$(PYTHON_VENV) tools/train_job.py $(TRAIN_ARGS)

train-compare: build  ## The same with a comparison long enough for figures to quote; 8 minutes
	@tools/setup --train
	@tools/keep_result train $(PYTHON_VENV) tools/train_job.py --steps 40 --turns 8 --eval-batches 16 $(TRAIN_ARGS)

setup-all: setup
	@tools/setup --all

setup-test: setup-all
	@tools/setup --test || echo "setup: going on; tests that need what is missing are skipped"
	@tools/setup --browser || echo "setup: going on; the page of overspill serve is not tested in a browser"

test: setup-test build-all test-cpp test-python  ## C++ and Python tests: 12 minutes on 2 fast cores, 30 on slow ones

test-cpp: build-all
	@ctest --test-dir $(BUILD) --output-on-failure --no-tests=error --timeout 300 -j $(JOBS) --output-junit ctest.xml

test-python: build-all test-cpp
	@$(PYTHON_VENV) -m pytest -n $(PYTEST_JOBS) --dist worksteal --junitxml=$(BUILD)/pytest.xml

test-long: build-all  ## Soak and kill runs
	@OVERSPILL_STEPS=1000 $(BUILD)/tests/engine/engine_allocation_test --gtest_filter='ManySteps*'
	@OVERSPILL_LONG=1 $(BUILD)/tests/faults/fault_tests --gtest_filter='*Killed*:*HalfAMinute*'
	@$(PYTHON_VENV) -m pytest -m long
	@OVERSPILL_LONG=1 $(PYTHON_VENV) -m pytest tests/python/test_extra.py tests/python/test_*_faults.py -k damage

fuzz:  ## Fuzz the readers of checkpoints and of model folders, FUZZ_SECONDS (600) each, with clang's libFuzzer; coverage at the end
	@tools/setup --fuzz
	@tools/fuzz

bench-activations: build  ## Moved activations beside plain torch and gradient checkpointing: seconds and memory; then bench-limited; 40 minutes
	@tools/keep_result activations $(PYTHON_VENV) bench/activations/run.py $(BENCH_ACTIVATIONS_ARGS)
	@$(MAKE) --no-print-directory bench-limited

bench-limited: build  ## 690 M at 4,096 tokens in a memory cgroup in which plain torch with checkpointing is killed; as root, 25 minutes
	@tools/keep_result limited $(PYTHON_VENV) bench/activations/limited.py $(BENCH_LIMITED_ARGS)

bench-adam: build-all  ## The update beside torch's, DeepSpeed's and the memory's limit, in turn; 8 minutes
	@tools/peers
	@tools/keep_result adam $(PYTHON_VENV) bench/adam/run.py $(BENCH_ADAM_ARGS)

bench-io: build-all  ## The store beside fio and DeepSpeed, in turn on one file system; 13 minutes
	@tools/peers
	@tools/keep_result io $(PYTHON_VENV) bench/io/run.py $(BENCH_IO_ARGS)

bench-plan: build  ## What overspill plan says of a step beside the step: 18 configurations on 1, 2 and 4 ranks; 25 minutes
	@tools/keep_result published $(PYTHON_VENV) bench/plan/published.py
	@tools/keep_result plan $(PYTHON_VENV) bench/plan/run.py $(BENCH_PLAN_ARGS)

bench-ranks-deepspeed: build-all  ## Two ranks over gloo beside DeepSpeed ZeRO-3: step time, bytes a rank; 4 minutes
	@tools/peers
	@tools/keep_result ranks-deepspeed $(PYTHON_VENV) bench/ranks/beside_deepspeed.py $(BENCH_RANKS_DEEPSPEED_ARGS)

bench-step: build-all  ## A training step beside DeepSpeed and its own floor: 160 M and 690 M, RAM and NVMe; 15 minutes
	@tools/peers
	@tools/keep_result step $(PYTHON_VENV) bench/step/run.py $(BENCH_STEP_ARGS)

bench-sizes: build-all  ## Step time and memory from 50 M to 3 B parameters, fitted slopes, a plot; 15 minutes, can be resumed
	@tools/keep_result sizes $(PYTHON_VENV) bench/sizes/run.py $(BENCH_SIZES_ARGS)

bench-ranks: build-all  ## Stages 0 to 3 over 1 to 4 ranks: bytes held, bytes sent, losses against one process; 5 minutes
	@tools/keep_result ranks $(PYTHON_VENV) bench/ranks/run.py $(BENCH_RANKS_ARGS)

bench-gpu: build-all  ## A step of 1 B and 7 B parameters on a GPU beside plain PyTorch without an optimizer; 20 minutes
	@mkdir -p results
	@tools/keep_result gpu-step $(PYTHON_VENV) bench/gpu/run.py --trace results $(BENCH_GPU_ARGS)

large: build  ## A 3 B model, constructed to merged, inside 6 GiB of memory (root, cgroup v1, 49 GB of disk); about 10 minutes
	@tools/setup --train
	@tools/keep_result large $(PYTHON_VENV) tools/large_job.py $(LARGE_ARGS)

readme:  ## The README's numbers, from the results/*.json that are there
	@$(PYTHON_VENV) tools/readme_numbers.py $(wildcard results/*.json)

bench-checkpoint: build  ## Saves beside training, restores and merges beside fio, DeepSpeed's zero_to_fp32 and torch's DCP; 20 minutes
	@tools/setup --train
	@tools/peers
	@tools/keep_result checkpoint $(PYTHON_VENV) bench/checkpoint/run.py $(BENCH_CHECKPOINT_ARGS)

bench-compile: build  ## What engine.compile saves of a step of Llama, GPT-2 and ViT on the CPU, beside torch.compile of the plain model; 10 minutes
	@tools/setup --train
	@tools/keep_result compile $(PYTHON_VENV) bench/compile/run.py $(BENCH_COMPILE_ARGS)

bench-formats: build-all  ## What compact and 8-bit states keep of exact's learning on the job of `make train`; 80 minutes, can be resumed
	@tools/setup --train
	@tools/keep_result formats $(PYTHON_VENV) bench/formats/run.py $(BENCH_FORMATS_ARGS)

bench-gguf: build  ## GGUF files in llama.cpp itself: tokens and logits beside transformers'; 1 minute once llama.cpp is built
	@tools/setup --train
	@tools/llama_cpp
	@tools/keep_result gguf $(PYTHON_VENV) bench/gguf/run.py

bench-gradient: build-all  ## Gradient passes: squares, accumulation (Google Benchmark)
	@$(BUILD)/bench/bench_gradient

bench-graph: build  ## A step of two towers on two ranks, gathers together and one by one, in turn; 3 minutes
	@tools/keep_result graph $(PYTHON_VENV) bench/graph/run.py $(BENCH_GRAPH_ARGS)

bench-inference: build-all  ## Models on the CPU beside llama.cpp, in turn, in memory and larger than it; 15 minutes, can be resumed
	@tools/setup --train
	@tools/llama_cpp
	@tools/keep_result inference $(PYTHON_VENV) bench/inference/run.py $(BENCH_INFERENCE_ARGS)

bench-intake: build-all  ## Gradients on their way in: sums beside the memory's limit, and what is left after backward; 4 minutes
	@tools/keep_result intake $(BUILD)/bench/bench_intake $(BENCH_INTAKE_ARGS)

lint: build-all  ## clang-format, clang-tidy, ruff, locks
	@tools/setup --lint
	@tools/lint

format: setup-all  ## Rewrite sources with clang-format and ruff
	@tools/setup --lint
	@tools/lint --fix

sanitize: setup-all  ## C++ tests under ASan+UBSan and under TSan
	@tools/sanitize asan tsan

neon:  ## The update's kernels for aarch64, cross-compiled and tested under qemu
	@tools/setup --neon
	@tools/neon

wheels: setup-all  ## manylinux wheels of each CPython that is here, into dist/cpu and dist/cuda (where nvcc is)
	@tools/setup --wheels
	@tools/wheels

docs: setup  ## The documentation as a site, build/docs/index.html; a broken link fails
	@tools/setup --docs
	@NO_MKDOCS_2_WARNING=1 $(PYTHON_VENV) -m mkdocs build --strict  # --quiet would hide warnings from --strict

docs-serve: docs  ## The same with search at http://127.0.0.1:8000, until Ctrl-C
	@$(PYTHON_VENV) -m http.server --bind 127.0.0.1 --directory build/docs 8000

clean:  ## Remove build products (.venv and runs/ stay)
	rm -rf build dist .pytest_cache .ruff_cache
	find bindings tests -name '__pycache__' -prune -exec rm -rf {} +
	find bindings -name '_core*.so' -delete
