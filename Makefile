# make train, make test: each sets itself up. The first call makes .venv; the next ones find it there.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help train test test-fast torture test-slow test-gpu test-ranks test-vllm test-sglang test-llama test-browser test-hosts fuzz lint check wheel clean

PYTHON ?= python3
VENV   ?= .venv
VLLM_VENV ?= .venv-vllm
SGLANG_VENV ?= .venv-sglang
CONFIG ?= config/quickstart.yaml
ARGS   ?=
# One more than two cores: tests wait for processes, timers and disks.
JOBS   ?= 3

BIN := $(VENV)/bin
# Bytecode is written whatever the shell says: each worker would compile all tests anew, 7 s of its time.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
PIP := PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --disable-pip-version-check --no-compile --progress-bar off -c constraints.txt
# pip would compile on one core. Some packages hold templates that are no Python: what they say is of no interest.
COMPILE := $(BIN)/python -W ignore -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true
# pip's own lines, cut down to one per package that is fetched. Its errors go past this to the terminal, without its
# remarks on places where a package is not.
SAY := 2> >(grep -v '^WARNING: Location' >&2) | awk '/^Collecting / { sub(/[ <>=!~;\[(].*/, "", $$2); print "  fetching " $$2; fflush() } /^Installing collected/ { print "  installing all of them ..."; fflush() }'

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo '  CONFIG=config/x.yaml and ARGS="max_steps=100" choose what make train runs; PYTHON=python3.12 the interpreter.'

train: $(VENV)/.installed ## train the embedded model (or CONFIG) and show before and after
	@$(BIN)/python -m whetstone train $(CONFIG) $(ARGS)

test: $(VENV)/.installed-dev ## the tests
	@$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# The core: mathematics, configuration, rewards, rollouts, update, model, engine; no whole runs.
FAST := tests/test_layers.py tests/test_language.py tests/algorithm tests/config tests/evaluation tests/rewards \
  tests/rollout tests/update tests/optimizer tests/model tests/engines/test_native.py tests/engines/test_scheduler.py \
  $(addprefix --ignore=tests/,config/test_recipes.py config/test_trl_yamls.py model/test_architectures.py \
  model/test_card.py model/test_compiled.py \
  rewards/test_bad_rewards.py update/test_sft.py)

test-fast: $(VENV)/.installed-dev ## the core of the tests, in a minute and a half
	@$(PYTEST) -n $(JOBS) --dist loadfile -q $(FAST) $(ARGS)

test-slow: $(VENV)/.installed-dev ## the tests that take minutes or fetch a model
	@$(BIN)/python -m pytest -m slow $(ARGS)

test-gpu: $(VENV)/.installed-dev ## the tests that need a GPU
	@$(BIN)/python -m pytest -m gpu $(ARGS)

test-vllm: $(VLLM_VENV)/.installed ## the tests against a real vLLM, in an environment of its own; half an hour on a CPU
	@HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm $(ARGS)

test-sglang: $(VENV)/.installed-dev $(SGLANG_VENV)/.installed ## the tests against a real SGLang, in an environment of its own (a GPU)
	@HF_HUB_OFFLINE=1 SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python $(BIN)/python -m pytest -m sglang tests/sglang $(ARGS)

test-llama: $(VENV)/.installed-dev ## GGUF files in the real llama.cpp (the wheel xllamacpp)
	@$(BIN)/python -m pip install -q "xllamacpp>=2026.10"
	@$(BIN)/python -m pytest -m llama_cpp tests/export $(ARGS)

test-browser: $(VENV)/.installed-dev ## the page of whet watch in Chromium (chromium, chromedriver)
	@$(BIN)/python -m pip install -q "selenium>=4.20,<5"
	@$(BIN)/python -m pytest -m browser tests/watch $(ARGS)

# WHETSTONE_TEST_DEVICE=cpu runs the same over gloo.
test-ranks: $(VENV)/.installed-dev ## runs by 2 and 4 ranks beside one process: NCCL on one GPU, or gloo on CPUs
	@WHETSTONE_TEST_DEVICE=$${WHETSTONE_TEST_DEVICE:-$$($(BIN)/python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')} \
	  $(BIN)/python -m pytest -m ranks tests/distributed $(ARGS)

test-hosts: $(VENV)/.installed-dev ## two hosts on one machine, a cable that is pulled (root, iproute2)
	@$(BIN)/python -m pytest -m hosts $(ARGS)

torture: $(VENV)/.installed-dev ## kills, faults, bad input, hostile text: about an hour on 2 cores; ARGS=--resume goes on
	@$(BIN)/python -m tests.torture --docs docs/torture.md $(ARGS)

fuzz: $(VENV)/.installed-dev ## 300 random configurations, trained and held against invariants: half an hour on 2 cores
	@$(BIN)/python -m tests.fuzz $(ARGS)

lint: $(VENV)/.installed-dev ## ruff and its formatter
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .

check: lint ## ruff and pyright
	@$(BIN)/python -m pyright

wheel: $(VENV)/.installed ## build the wheel into dist/
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist/*.whl

clean: ## remove what was built, and .venv; outputs/ stays
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) dist build

# pip is the last thing that appears in a new environment, so one that was broken off is made again.
$(VENV)/bin/pip:
	@command -v $(PYTHON) > /dev/null || { echo "make: there is no $(PYTHON) here: install Python 3.11, 3.12 or 3.13, or name one, such as make PYTHON=python3.12 train"; exit 2; }
	@$(PYTHON) -c '' > /dev/null 2>&1 || { echo "make: $(PYTHON) ($$(command -v $(PYTHON))) does not start; a shim of pyenv without a version for this folder does that (pyenv versions): name another one, such as make PYTHON=python3.12 train"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	  || { echo "make: $$($(PYTHON) --version) does not suit: whetstone needs Python 3.11, 3.12 or 3.13; name one, such as make PYTHON=python3.12 train"; exit 2; }
	@echo "Setting up, once: making $(VENV) with $$($(PYTHON) --version)."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "make: $(PYTHON) can't make a virtual environment: install its venv module (on Debian and Ubuntu: python3-venv)"; exit 2; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "Installing what training needs into $(VENV): about 2 minutes the first time, more on a slow network."
	@$(PIP) -e . $(SAY)
	@echo "  compiling, so that the first run starts as quickly as the next ..."
	@$(COMPILE)
	@touch $@
	@echo "Installed."

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing what the tests need as well: some seconds."
	@$(PIP) -e '.[dev]' $(SAY)
	@$(COMPILE)
	@touch $@

$(VLLM_VENV)/.installed: scripts/setup_vllm.sh
	@echo "Installing vLLM into $(VLLM_VENV): some minutes."
	@PYTHON=$(PYTHON) bash scripts/setup_vllm.sh $(VLLM_VENV)
	@touch $@

$(SGLANG_VENV)/.installed: scripts/setup_sglang.sh
	@echo "Installing SGLang into $(SGLANG_VENV): some minutes."
	@PYTHON=$(PYTHON) bash scripts/setup_sglang.sh $(SGLANG_VENV)
	@touch $@
