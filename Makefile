# Two commands matter: `make train` and `make test`. Both make the environment first if it is not there.
PYTHON ?= python3
VENV ?= .venv
RECIPE ?= examples/grpo_arithmetic.yaml
ARGS ?=
TORCH_ARGS ?=
TEST_ARGS ?=
TURN ?=
HALF ?=
WORKERS ?= 3

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := models/SmolLM2-135M-Instruct
# One OpenMP thread a process unless the caller says otherwise, no test reaches for a model hub, and what is compiled is kept for the many processes of tests.
TEST_ENV := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
VLLM_TESTS := $(wildcard tests/rollout/test_vllm*.py)
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TEST_ARGS)
SERIAL := $(if $(TURN),--turn $(TURN)) $(if $(HALF),--half $(HALF)) $(TEST_ARGS)
SLOW := $(TEST_ENV) $(BIN)/python -m pytest -m "slow and not gpu and not peer"

.PHONY: help install model train test test-slow test-all vllm test-vllm style lint docs look environments gpu clean

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  Settings: PYTHON=python3.12  ARGS='trainer.seed=1'  RECIPE=file.yaml  WORKERS=4 (test processes)  TEST_ARGS='-x'"
	@echo "            TORCH_ARGS='--index-url URL'  (where pip takes torch from, such as PyTorch's CPU index)"

# torch goes first and alone: whichever build it is, nothing that follows replaces it.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.x"; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(TORCH_ARGS) torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,gguf,task,math,constrained,gateway,lora,deepspeed,megatron,tune]'
	@touch $@

install: $(INSTALLED) ## make the environment in .venv

model: $(INSTALLED) ## get SmolLM2-135M-Instruct into models/
	@$(BIN)/python scripts/get_model.py --out $(MODEL)

train: model ## train SmolLM2-135M-Instruct on a procedural task, and report
	$(BIN)/verl train $(RECIPE) $(ARGS)

style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/plain_words.py

lint: style ## style, words and types
	$(BIN)/mypy

test: style ## style, types and the fast tests
	@$(BIN)/mypy & types=$$!; $(PYTEST) -m "not slow and not gpu"; tests=$$?; wait $$types || { echo "mypy has errors: see above"; exit 1; }; exit $$tests

# They start processes of their own, and have deadlines: what fails beside another test is run again alone (without TURN,
# which deals out what is collected). Exit status 1 is that of tests that failed; where something was left behind, or the
# run was interrupted, it stays as it is.
test-slow: model ## the slow tests, two at a time; TURN=0 to TURN=5: a sixth of them; HALF=0, HALF=1: half of that
	@$(SLOW) $(SERIAL) -n 2 --dist worksteal || { rc=$$?; test $$rc = 1 && \
		$(SLOW) $(TEST_ARGS) --last-failed --last-failed-no-failures none || exit $$rc; }

test-all: lint model ## the slow tests too
	$(PYTEST) -m "not gpu and not peer"

vllm: ## make an environment with vLLM's CPU build in .venv-vllm
	@PYTHON="$(PYTHON)" TORCH_ARGS="$(TORCH_ARGS)" scripts/vllm_env.sh

test-vllm: vllm ## the tests of vLLM itself, in that environment; TURN as above
	$(TEST_ENV) .venv-vllm/bin/python -m pytest $(VLLM_TESTS) $(SERIAL)

docs: ## build the documentation as a site, in an environment of its own
	test -e .venv-docs/.installed -a .venv-docs/.installed -nt scripts/docs_requirements.txt || { $(PYTHON) -m venv .venv-docs && \
		.venv-docs/bin/python -m pip install --quiet --requirement scripts/docs_requirements.txt && touch .venv-docs/.installed; }
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo build/site/index.html

look: docs $(INSTALLED) ## open each page of that site in Chromium, wide and narrow: overflow, links, pictures, sizes of text
	$(BIN)/python scripts/look_at_site.py $(ARGS)

environments: $(INSTALLED) ## install and try it with Python 3.11 to 3.13, lower bounds, no compiler, a read-only home, TRL, agents' packages
	$(BIN)/python scripts/environments.py --torch-args='$(TORCH_ARGS)' $(ARGS)

gpu: $(INSTALLED) ## the tests and benchmarks that want an accelerator, and a page of results; fails where there is none
	$(BIN)/python benchmarks/gpu.py $(ARGS)

clean: ## remove everything that was made, runs and models excepted
	rm -rf $(VENV) .venv-vllm .venv-docs .bench build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
