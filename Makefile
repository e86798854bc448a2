# Two commands do everything, set-up included: `make run` and `make test`.
PYTHON ?= python3
VENV := .venv
VLLM_VENV := .venv-vllm
RANKS_VENV := .venv-ranks
GPU_VENV := .venv-gpu
CLIENTS := .venv-clients
TINKER_VENV := .venv-tinker
HARBOR_VENV := .venv-harbor
DOCS_VENV := .venv-docs
BIN := $(VENV)/bin
CONFIG ?= examples/quickstart/config.toml
SEED ?= 0
FUZZ_SECONDS ?= 600
WAITING := tests/contract tests/e2e tests/redteam
STARTED := $(shell date +%s)

.PHONY: run test examples test-slow fuzz lint style types tidy pytest waiting setup vm-qemu vllm-env gpu-env ranks-env test-engines harbor-env clients-env test-clients tinker-env test-tinker doctor docs clean help

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

# Tasks and corpora are made, and the machines' kernel and image fetched, while torch is; the run waits for
# what is left of each.
run: .cache/apt.done $(VENV)/.light  ## The quickstart: a real run, end to end
	@$(MAKE) --no-print-directory $(VENV)/.base & packages=$$!; trap "kill $$packages 2>/dev/null" EXIT; \
	$(BIN)/penstock run --config $(CONFIG) --seed $(SEED) --images --after $$packages --since $(STARTED)

# A monitor follows the first run from a process of its own.
examples: setup  ## Three small programs, a few minutes each: examples/README.md
	@rm -rf runs/examples && mkdir -p runs/examples
	$(BIN)/python examples/monitor.py runs/examples/own-parts & monitor=$$!; trap "kill $$monitor 2>/dev/null" EXIT; \
	  PYTHONPATH=examples/own_parts $(BIN)/penstock --runs-dir runs/examples run \
	  --config examples/own_parts/config.toml --run-id own-parts --no-replay && wait $$monitor
	$(BIN)/python -m examples.live_users

test: setup style  ## All gates and the fast tests
	@$(MAKE) --no-print-directory -j3 pytest waiting types tidy

test-slow: setup  ## The tests that take minutes: kill -9 of every actor, whole runs, long fuzzing
	$(BIN)/python -m pytest -m slow --timeout 3000

fuzz: setup  ## Coverage-guided fuzzing of every decoder, FUZZ_SECONDS each (600)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

lint: style types tidy  ## The gates alone: style, layers, unreachable names, types, tidy rules

style: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python -m tests.tidy.unreachable

types: $(VENV)/.installed
	@nice $(BIN)/python -m tests.tidy.types

tidy: $(VENV)/.installed
	@mkdir -p .cache
	@nice $(BIN)/python -m pytest tests/tidy >.cache/tidy.log 2>&1 \
	  && echo "tidy: $$(tail -n 1 .cache/tidy.log)" || { cat .cache/tidy.log; exit 1; }

# Tests that mostly wait, for machines, servers and deadlines, beside those that compute.
waiting: $(VENV)/.installed
	@mkdir -p .cache
	@$(BIN)/python -m pytest -p no:cacheprovider $(WAITING) >.cache/waiting.log 2>&1 \
	  && echo "$(WAITING): $$(tail -n 1 .cache/waiting.log)" || { cat .cache/waiting.log; exit 1; }

pytest: $(VENV)/.installed
	@$(BIN)/python -m pytest $(addprefix --ignore ,tests/tidy $(WAITING))

setup: .cache/apt.done $(VENV)/.installed  ## Packages, virtual environment, VM kernel and image; cached
	@$(BIN)/penstock images base

vm-qemu: setup  ## Also QEMU: machines that can be copied and saved while they run
	@sh infra/install-apt.sh infra/apt-packages-qemu.txt
	@$(BIN)/penstock images base --qemu

vllm-env: $(VLLM_VENV)/.installed  ## vLLM in an environment of its own (3.5 GB), as engine of generators

# torchvision and its kin may come built for another torch than the CPU's; models of text need none of them.
$(VLLM_VENV)/.installed: pyproject.toml
	@echo "[vllm-env] vLLM for the CPU into $(VLLM_VENV) (a few minutes)"
	@sh infra/install-apt.sh infra/apt-packages-vllm.txt || echo "[vllm-env] going on without: slower steps"
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[vllm]' \
	  'hypothesis>=6.130' 'pytest>=8.4' 'pytest-asyncio>=1.0' 'pytest-timeout>=2.4'
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

gpu-env: $(RANKS_VENV)/.installed $(GPU_VENV)/.installed  ## Ranks, and vLLM with CUDA in an environment of its own (8 GB)

# vLLM pins torch and an older transformers than ranks use.
$(GPU_VENV)/.installed: pyproject.toml
	@echo "[gpu-env] vLLM for CUDA into $(GPU_VENV) (several minutes)"
	@test -x $(GPU_VENV)/bin/python || $(PYTHON) -m venv $(GPU_VENV)
	@$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[gpu]'
	@touch $@

ranks-env: $(RANKS_VENV)/.installed  ## transformers models on trainer ranks, in an environment of its own (1.3 GB)

$(RANKS_VENV)/.installed: pyproject.toml
	@echo "[ranks-env] torch and transformers into $(RANKS_VENV) (a few minutes)"
	@test -x $(RANKS_VENV)/bin/python || $(PYTHON) -m venv $(RANKS_VENV)
	@$(RANKS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(RANKS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[ranks]'
	@touch $@

# Without all that Harbor needs to run: its schema needs these two.
harbor-env:  ## Harbor, whose schema the reader is compared with; needs PYTHON=python3.12 or newer
	@test -x $(HARBOR_VENV)/bin/python || $(PYTHON) -m venv $(HARBOR_VENV)
	@$(HARBOR_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'pydantic>=2.12' 'toml>=0.10.2'
	@$(HARBOR_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps harbor==0.25.0
	@$(HARBOR_VENV)/bin/python -c 'import harbor.models.task.config'

test-engines: setup $(RANKS_VENV)/.installed $(VLLM_VENV)/.installed  ## The engines of others, each in its own environment (minutes)
	$(BIN)/python -m pytest -m slow tests/engines/ranks -rs --timeout 900
	$(VLLM_VENV)/bin/python -m pytest -m slow tests/engines --ignore tests/engines/ranks -rs --timeout 900

clients-env: $(CLIENTS)/.installed  ## Other people's clients, each in an environment of its own (1.3 GB)

test-clients: $(VENV)/.installed $(CLIENTS)/.installed  ## Every case of every client: a table
	$(BIN)/python -m pytest -m slow tests/clients -rA --timeout 900

# Coding agents come from npm, where it is at hand; without them their tests are skipped.
$(CLIENTS)/.installed: $(wildcard tests/clients/environments/*)
	@for name in sdk litellm mini; do \
	  echo "[clients-env] $$name"; \
	  test -x $(CLIENTS)/$$name/bin/python || $(PYTHON) -m venv $(CLIENTS)/$$name || exit 1; \
	  $(CLIENTS)/$$name/bin/python -m pip install --quiet --disable-pip-version-check \
	    -r tests/clients/environments/$$name.txt || exit 1; \
	done
	@if command -v npm >/dev/null; then mkdir -p $(CLIENTS)/npm; \
	  cp tests/clients/environments/package.json $(CLIENTS)/npm/; \
	  npm install --silent --no-audit --no-fund --prefix $(CLIENTS)/npm; \
	else echo "[clients-env] no npm: Codex and Claude Code are left out"; fi
	@touch $@

tinker-env: $(TINKER_VENV)/.installed  ## The tinker SDK and its cookbook, in an environment of their own (1.2 GB)

test-tinker: $(VENV)/.installed $(TINKER_VENV)/.installed  ## The SDK and the cookbook's recipes against penstock tinker
	$(BIN)/python -m pytest -m slow tests/clients/test_tinker.py -rA --timeout 900

# The cookbook without what it needs for its makers' own models alone, which not every index has.
$(TINKER_VENV)/.installed: tests/clients/tinker.txt
	@echo "[tinker-env] the SDK and its cookbook into $(TINKER_VENV)"
	@test -x $(TINKER_VENV)/bin/python || $(PYTHON) -m venv $(TINKER_VENV)
	@$(TINKER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/tinker.txt
	@$(TINKER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps tinker-cookbook==0.6.1
	@touch $@

.cache/apt.done: infra/apt-packages.txt infra/install-apt.sh
	@sh infra/install-apt.sh infra/apt-packages.txt
	@mkdir -p .cache && touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.base
	@echo "[setup] what tests and gates need, into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

# All that a run imports but torch.
$(VENV)/.light: pyproject.toml | .cache/apt.done
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Penstock needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Set PYTHON=python3.x"; exit 1; }
	@echo "[setup] Python packages into $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $$($(PYTHON) -c \
	  'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*(each for each in project["dependencies"] if not each.startswith("torch")))')
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

$(VENV)/.base: $(VENV)/.light
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@touch $@

docs: $(DOCS_VENV)/.installed  ## The documentation as a site, in .cache/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --strict -f docs/site/mkdocs.yml
	@echo "[docs] .cache/site/index.html"

$(DOCS_VENV)/.installed: pyproject.toml
	@echo "[docs] MkDocs into $(DOCS_VENV)"
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -c 'import tomllib; print(*tomllib.load(open("$<", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	  | $(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r /dev/stdin
	@touch $@

doctor: $(VENV)/.installed  ## What is there, what is missing, how to get it
	$(BIN)/penstock doctor

clean:  ## Remove what was built here (not the shared VM cache)
	rm -rf $(VENV) $(VLLM_VENV) $(RANKS_VENV) $(GPU_VENV) $(HARBOR_VENV) $(DOCS_VENV) $(CLIENTS) .cache build dist .pytest_cache .ruff_cache .hypothesis
