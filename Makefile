# gpuchange: `make demo` shows it, `make test` proves it. Both need a Debian-like machine, root, and only
# python3 (3.11 or newer), pip, git and make; what else they need they install with apt and pip.

SHELL := /bin/bash -euo pipefail
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORE := gpuchange/journal.py,gpuchange/states.py,gpuchange/planner.py,gpuchange/engine.py
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help venv check lint fast test test-all reliability demo docs wheel clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

venv: $(STAMP)  ## a virtual environment in .venv with gpuchange and its tools

$(STAMP): pyproject.toml scripts/venv
	scripts/venv $(PYTHON) $(VENV)
	touch $@

lint: $(STAMP)
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	ansible-lint --offline -q playbooks

fast: $(STAMP)
	python -m pytest -n auto -m 'not lab and not reliability and not slow' --cov=gpuchange --cov-branch --cov-report=term:skip-covered
	python -m coverage report --include=$(CORE) --fail-under=100 --show-missing --skip-covered

check: lint fast  ## everything that needs neither root nor network

# The lab's tests have one worker more than two processors: they wait for boots, drains and lost hosts.
test: check  ## check, then the tests on real lab hosts (root; about half an hour)
	scripts/tools
	python -m pytest -n auto -m 'reliability and not lab and not slow'
	gpuchange lab build --install-tools
	python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m 'lab and not slow' --durations=40

test-all: test  ## test, then what is slow: the rest of the kill series and its like
	python -m pytest -m slow

reliability: $(STAMP)  ## every promise tried in full (hours; can be resumed); makes docs/reliability.md
	scripts/tools
	gpuchange lab build --install-tools
	scripts/reliability

demo: $(STAMP)  ## a driver change on three lab hosts under load: 0 failed requests
	demo/run

docs: $(STAMP)  ## the manual, in docs/_build/html
	pip install -q -e '.[docs]'
	sphinx-build -q -W -b html docs docs/_build/html

wheel: $(STAMP)  ## dist/gpuchange-*.whl, playbooks included
	python -m build --wheel --outdir dist .

clean:
	-gpuchange lab down 2>/dev/null
	rm -rf $(VENV) build dist docs/_build .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .ansible
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
