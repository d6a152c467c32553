# make bench   from nothing to the table: environment, model, a small sweep, the comparison
# make test    the test suite                make check   linters and types
# make clean   build leftovers and caches; the environment and the results stay
#
# PYTHON=python3.12       which Python builds the environment (3.11 to 3.13)
# TORCH_ARGS="--index-url URL"   where pip finds another build of torch, for example one for CPUs only
# BENCH="task=chat,code drafter=none,ngram"   the sweep's axes; the first varies slowest
# RUNS=results/runs/bench   where the sweep's runs go
# TEST_ARGS="tests/decoding -x"   what pytest is told; by default a process for each of up to 4 cores
PYTHON ?= python3
VENV ?= .venv
TORCH_ARGS ?=
BENCH ?= task=smoke drafter=ngram,ngram_hf,ngram_vllm max_new_tokens=40
RUNS ?= results/runs/bench
TEST_ARGS ?= --numprocesses auto --maxprocesses 4 --dist worksteal

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: bench test check clean install
.DELETE_ON_ERROR:

install: $(STAMP)

# torch comes first, so that TORCH_ARGS touch nothing else; the second call then finds its requirement met.
$(STAMP): pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); the first time takes minutes"
	$(PIP) $(TORCH_ARGS) torch
	$(PIP) --editable ".[dev]"
	@touch $@

bench: $(STAMP)
	$(BIN)/dispark fetch
	$(BIN)/dispark bench -m $(BENCH) paths.runs=$(RUNS)
	$(BIN)/dispark compare $(RUNS)

test: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(TEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
