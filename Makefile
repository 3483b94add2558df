# Everything runs in $(VENV), which is made on demand. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=
# Test processes; each uses one thread.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 8 ? n : 8)))

PY := $(VENV)/bin/python
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadgroup
# Named after what decides the installation, so that it is repeated when that changes and only then.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml requirements.txt scripts/install.sh | cksum | cut -d' ' -f1)

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-slow test-gpu lint format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## make the environment, or bring it up to date

$(STAMP):
	PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(TORCH)" bash scripts/install.sh
	@rm -f $(VENV)/.installed-* && touch $@

quickstart: $(STAMP)  ## build a small model, fine-tune it, train it with GRPO, compare the stages
	$(PY) -m verl.quickstart $(ARGS)

test: $(STAMP)  ## the default suite (ARGS="tests/test_x.py -k name" for a part)
	$(PYTEST) $(ARGS)

test-slow: $(STAMP)  ## tests that take minutes
	$(PYTEST) -m "slow and not gpu" $(ARGS)

test-gpu: $(STAMP)  ## tests that need a CUDA GPU
	$(PY) -m pytest -m gpu $(ARGS)

lint: $(STAMP)  ## style, formatting, types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)

format: $(STAMP)  ## mend style and formatting
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:  ## remove caches and build results; the environment and runs stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find verl tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
