SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV ?= .venv
CACHE := .cache
TORCH ?= torch==2.13.0
# Kernels run through Triton's interpreter on a CPU. A CUDA build of torch brings its own Triton.
TRITON ?= triton==3.9.0
# Releases of everything else; empty for the newest: make CONSTRAINTS= test
CONSTRAINTS ?= -c tests/constraints.txt

BIN := $(VENV)/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
COMPAT := $(patsubst %/pyproject.toml,%,$(wildcard compat/*/pyproject.toml))
EXAMPLES := $(patsubst %/pyproject.toml,%,$(wildcard examples/plugins/*/pyproject.toml))
BESIDE := $(PLUGINS) $(COMPAT)
PACKAGES := $(patsubst %/__init__.py,%,$(wildcard $(addsuffix /engine_core_*/__init__.py,$(BESIDE) $(EXAMPLES))))
PROJECTS := pyproject.toml $(BESIDE:%=%/pyproject.toml)
EDITABLE := -e '.[cpu]' $(BESIDE:%=-e %)
empty :=
space := $(empty) $(empty)

# On so many cores, 0 for all: pip would take a minute on one. Some packages hold files of another Python.
# What hardly anything imports, which is more than half of it, is compiled when something does.
RARE := /transformers/models/|/tests/|/pip/|/torch/(testing|onnx|_inductor|ao)/|/anthropic/|/mypyc?/|/networkx/|/virtualenv/
RARE := $(RARE)|/ray/(rllib|data|llm|train|tune|autoscaler|dashboard)/|/pygments/lexers/|/sympy/physics/|/numba/cuda/
compile = { $(BIN)/python -m compileall -qq -j $(1) -x '$(RARE)' $(VENV)/lib || true; }

SMOLLM2 := $(CACHE)/models/SmolLM2-135M-Instruct.Q4_1.gguf
PROMPT ?= What is an inference engine? Answer in two sentences.

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_RETRIES ?= 5
export PIP_DEFAULT_TIMEOUT ?= 60
# Images for containers set it, and every process that a test starts would compile the code anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-embed models test check lint types imports fast unit browser soak soak-chats planted test-clients test-gpu bench-gpu bench-cpu bench-kernels clean
help: ## Show the targets.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

demo: $(VENV)/.runtime $(SMOLLM2) ## Chat with a small model on this machine's CPU or GPU.
	@$(BIN)/engine-core generate $(SMOLLM2) --chat --max-tokens 200 "$(PROMPT)"

demo-embed: $(VENV)/.runtime ## Find the sentence that is closest to a question, with a small embedding model.
	@$(BIN)/python scripts/fetch_models.py --cache $(CACHE) minilm
	@$(BIN)/python examples/embeddings.py $(CACHE)/models/all-MiniLM-L6-v2

models: $(VENV)/.created ## Fetch the models and tokenizers that the tests use.
	@$(BIN)/python scripts/fetch_models.py --cache $(CACHE)

# Tests that wait leave a core now and then, which is enough for the checks of types and imports.
test: $(VENV)/.created ## Run every check; CI runs this.
	@$(MAKE) -j 2 lint models browser
	@$(MAKE) types imports >$(CACHE)/checks.log 2>&1 & checks=$$!; failed=0; \
	$(MAKE) unit || failed=1; wait $$checks || failed=1; cat $(CACHE)/checks.log; exit $$failed

check: lint imports types fast ## Answer in two minutes: style, imports, types and the fast tests.

lint: $(VENV)/.test ## Check style and formatting.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test ## Check types.
	MYPYPATH=$(subst $(space),:,$(BESIDE) $(EXAMPLES)) $(BIN)/mypy -p engine_core $(patsubst %,-p %,$(notdir $(PACKAGES)))

imports: $(VENV)/.test ## Check which package may import which.
	$(BIN)/lint-imports

browser: ## Install Chromium for the tests of the web page, where apt can.
	@if command -v chromium chromium-browser google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing Chromium"; apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium >/dev/null; \
	else echo "no Chromium: the tests of the web page are skipped"; fi

# A process per core with one thread each: the models are too small to be worth two.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal

# What holds the engine together. Kernels, servers, commands and whole models take longer.
FAST := $(addprefix tests/,cache configs nn parsers registry runtime scheduler text test_imports.py)
fast: $(VENV)/.test models
	$(PYTEST) -m 'not slow' $(FAST) $(ARGS)

# What waits for ever fails, and shows where it waits: it would take the others' results with it.
unit: $(VENV)/.test models browser ## Run the tests; ARGS goes to pytest.
	$(PYTEST) --timeout 300 --durations 15 --durations-min 5 $(ARGS)

# The first two run side by side: on two cores all of it takes about a quarter of an hour.
soak: $(VENV)/.test ## Ten minutes of random load on an engine and a server, then every random example and damaged file.
	export OMP_NUM_THREADS=1; \
	ENGINE_CORE_SOAK_SECONDS=600 $(BIN)/pytest -s tests/soak/test_server_soak.py & server=$$!; \
	ENGINE_CORE_TEST_FULL=1 ENGINE_CORE_SOAK_SECONDS=300 $(BIN)/pytest -s tests/soak/test_engine_soak.py; wait $$server
	OMP_NUM_THREADS=1 ENGINE_CORE_TEST_SCHEMA_EXAMPLES=2000 $(BIN)/pytest tests/server/test_schema.py
	OMP_NUM_THREADS=1 ENGINE_CORE_TEST_SCHEMA_EXAMPLES=200 $(BIN)/pytest tests/server/test_embeddings.py
	OMP_NUM_THREADS=1 $(BIN)/python scripts/fallback_table.py
	ENGINE_CORE_TEST_FULL=1 $(PYTEST) -m long
	ENGINE_CORE_TEST_FULL=1 $(PYTEST) -m hypothesis
	ENGINE_CORE_TEST_FULL=1 $(PYTEST) -m 'not hypothesis' tests/kernels
	ENGINE_CORE_TEST_FULL=1 $(PYTEST) tests/fuzz tests/cli/test_new_plugin.py tests/server/test_api_attacks.py \
	    tests/server/test_hostile_grammars.py tests/test_packaging.py tests/engine/test_quantization.py
	ENGINE_CORE_TEST_FULL=1 $(PYTEST) tests/soak/test_ray_soak.py
	OMP_NUM_THREADS=1 ENGINE_CORE_TEST_FULL=1 $(BIN)/pytest -s tests/soak/test_ray_replicas_soak.py

planted: $(VENV)/.test ## Plant errors in the families: the conformance kit must find each and say where.
	ENGINE_CORE_TEST_FULL=1 $(PYTEST) $(addprefix tests/testing/,test_planted_errors.py test_kit_bites.py test_kit_sees.py) $(ARGS)

test-clients: $(VENV)/.test $(SMOLLM2) ## Drive a server with the clients that people use; ARGS names some of them.
	@OMP_NUM_THREADS=1 $(BIN)/python tests/clients/run.py --cache $(CACHE)/clients --smollm2 $(SMOLLM2) $(ARGS)

soak-chats: $(VENV)/.test $(SMOLLM2) ## An hour of short chats: the server's processes may not grow after ten minutes.
	OMP_NUM_THREADS=1 ENGINE_CORE_SOAK_SECONDS=$${ENGINE_CORE_SOAK_SECONDS:-3600} $(BIN)/pytest -s tests/soak/test_chat_soak.py

test-gpu: $(VENV)/.test models ## Run the tests that need a CUDA GPU.
	$(BIN)/pytest -m gpu $(ARGS)

bench-gpu: $(VENV)/.runtime ## Run the shared workloads on a GPU beside the peers' figures.
	$(BIN)/python benchmarks/gpu.py $(ARGS)

bench-cpu: $(VENV)/.runtime $(SMOLLM2) ## Compare with transformers and llama.cpp on this CPU, side by side.
	$(BIN)/python benchmarks/cpu_peers.py --peers-env .venv-peers $(ARGS)

bench-kernels: $(VENV)/.runtime ## Check and time every kernel on a GPU.
	$(BIN)/python benchmarks/kernels.py $(ARGS)

clean: ## Remove the virtual environments, the fetched models and every cache.
	rm -rf $(VENV) .venv-ci .venv-peers $(CACHE) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, and $(PYTHON) is " + sys.version.split()[0] + "; name another with: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.created $(PROJECTS) tests/constraints.txt
	@echo "installing torch, engine-core and its plugins into $(VENV); this takes a minute"
	$(BIN)/pip install --quiet --no-compile $(CONSTRAINTS) $(TORCH) $(EDITABLE)
	@$(call compile,0)
	@touch $@

# Without a new environment for the build of each of our packages. pip takes one core alone, most of it to
# find and unpack what tests need; beside it the other builds ours and compiles what torch brought.
$(VENV)/.test: $(VENV)/.created $(PROJECTS) $(EXAMPLES:%=%/pyproject.toml) tests/constraints.txt
	@echo "installing torch, engine-core, its plugins and what tests need into $(VENV); this takes two minutes"
	$(BIN)/pip install --quiet --no-compile $(CONSTRAINTS) $(TORCH) setuptools
	triton=$$($(BIN)/python -c 'from importlib.util import find_spec; print("" if find_spec("triton") else "$(TRITON)")'); \
	{ $(BIN)/pip install --quiet --no-deps --no-compile --no-build-isolation $(BESIDE:%=-e %) $(EXAMPLES:%=-e %) && \
	  $(call compile,1); } & beside=$$!; \
	$(BIN)/pip install --quiet --no-compile --no-build-isolation $(CONSTRAINTS) $(TORCH) $$triton -e '.[test]'; wait $$beside
	@! { $(BIN)/pip check || true; } | grep '^engine-core'
	@$(call compile,0)
	@touch $(VENV)/.runtime $@

$(SMOLLM2): | $(VENV)/.created
	@$(BIN)/python scripts/fetch_models.py --cache $(CACHE) smollm2
