# make demo      train a small model, run it through splitkv, print every decision
# make test      lint, types, every test that needs no GPU, kernels compiled on two Tritons
# make test-gpu  the tests that need an NVIDIA GPU; writes tests/gpu/last_run.json. GPU_SHARD=1/2
#                and then 2/2: the same in two goes
# make sanitize  a few GPU calls under every tool of compute-sanitizer, which comes with CUDA
# make bench     the benchmarks, which need an NVIDIA GPU; results in RESULTS, options in BENCH:
#                make bench BENCH="--place page16 --peers none"
#
# demo and test set up .venv first. test-gpu, sanitize and bench use PYTHON as it is where its torch
# sees a GPU, and .venv elsewhere.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
NEWEST := .triton-newest
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
WORKERS ?= 2
SHARED = -n $(WORKERS) --dist worksteal
GPU_WORKERS ?= 8
GPU_SHARD ?= 1/1
RESULTS ?= build/bench/decode.jsonl
BENCH ?=
# Processes import the same files many times: what Python compiles of them is kept.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test lint types test-cpu test-interpreter test-newest test-gpu sanitize bench clean

demo: $(INSTALLED)
	$(BIN)/splitkv demo

test: $(INSTALLED)
	$(MAKE) -j 2 lint types $(NEWEST)/.installed
	$(MAKE) test-newest test-cpu test-interpreter

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

test-cpu: $(INSTALLED)
	$(BIN)/python -m pytest $(SHARED) tests/cpu tests/integrations

# The kernels run as Python, which takes processes in which nothing compiles them.
test-interpreter: $(INSTALLED)
	$(BIN)/python -m pytest $(SHARED) tests/interpreter

# Variants of every kernel once more, compiled by the newest Triton in place of the pinned one.
test-newest: $(NEWEST)/.installed
	PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest $(SHARED) -m newest tests/cpu/test_compile*.py

test-gpu sanitize bench: GPU_PYTHON = $(shell $(PYTHON) -c \
	"import torch, triton; raise SystemExit(not torch.cuda.is_available())" 2>/dev/null \
	&& echo $(PYTHON) || { $(MAKE) $(INSTALLED) >&2; echo $(BIN)/python; })

# First what several processes can share out, on as many GPUs as there are; then the host times,
# which anything beside them would disturb. Both are recorded.
test-gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -p no:benchmark -q -n $(GPU_WORKERS) --dist worksteal \
		-m "not alone" --shard $(GPU_SHARD) tests/gpu; shared=$$?; \
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -p no:benchmark -m alone --shard $(GPU_SHARD) tests/gpu \
		&& exit $$shared

sanitize:
	set -e; for tool in memcheck racecheck synccheck; do \
		compute-sanitizer --tool $$tool --error-exitcode 1 $(GPU_PYTHON) tests/gpu/sanitize.py \
			$$([ $$tool = racecheck ] && echo --without-roles); \
	done

bench:
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m splitkv bench decode --json $(RESULTS) $(BENCH)

# torch before the rest, so that the wheel chosen for it is the one that the rest builds on. pip
# would compile what it installs on one core. A file of torch's is for newer Pythons only.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; assert sys.version_info >= (3, 10), 'Python 3.10 or newer is needed'"
	$(PYTHON) -m venv --clear .venv
	$(PIP) --no-compile --constraint constraints.txt torch numpy
	$(PIP) --no-compile --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	touch $@

$(NEWEST)/.installed: constraints-newest.txt $(INSTALLED)
	rm -rf $(NEWEST)
	$(PIP) --no-deps --target $(NEWEST) --requirement constraints-newest.txt
	touch $@

clean:
	rm -rf .venv $(NEWEST)
