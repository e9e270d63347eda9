# `make demo` and `make test` are all a newcomer needs; each sets up its own environment.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
RUN_TESTS := $(BIN)/python -u -m pytest

.PHONY: demo test test-full test-peers setup docs wheel lint bench audit-power faults fuzz experiments tables lock clean clean-kernels help
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: .venv/runtime.stamp ## made-up e-mails to private models and a report, in coowned-demo/
	$(BIN)/coowned demo

test: .venv/core.stamp ## the quick suite
	@echo "collecting about 4,500 tests and running them in two processes; a fresh clone also compiles its kernels ..."
	$(RUN_TESTS) -n 2 --dist worksteal -m "not full and not peers"

test-full: .venv/all.stamp ## what the quick suite leaves out: Spark, browser, documentation, faults
	$(RUN_TESTS) -m full

test-peers: .venv-peers/peers.stamp ## conformance with torch, transformers, opacus, flax and equinox
	.venv-peers/bin/python -m pytest tests/peers -m peers

setup: .venv/all.stamp ## the whole development environment

docs: .venv/docs.stamp ## build the site in site/, with warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

wheel: .venv/runtime.stamp ## build dist/coowned-VERSION-py3-none-any.whl
	$(BIN)/python -m hatchling build -t wheel

lint: .venv/all.stamp ## ruff, pyright, import order of the stages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: .venv/all.stamp ## ratios against peers and limits; reads ../shared/data
	$(BIN)/python -m benchmarks $(ONLY)

audit-power: .venv/all.stamp ## every planted bug against the audit, three seeds each; about ten minutes
	rm -f experiments/results/audit_power.parquet
	$(BIN)/python -m experiments audit_power
	$(BIN)/python -m experiments tables

faults: .venv/all.stamp ## kill every verb in every phase, 100 times in all, and run it again; about fifteen minutes
	rm -f experiments/results/kills.parquet
	$(BIN)/python -m experiments kills
	$(BIN)/python -m experiments tables

fuzz: .venv/all.stamp ## 100,000 damaged files of every kind that is read; about fifteen minutes
	rm -f experiments/results/fuzzing.parquet
	$(BIN)/python -m experiments fuzzing
	$(BIN)/python -m experiments tables

SCALE ?= small
experiments: .venv/all.stamp ## the paper's experiments (ONLY=name, SCALE=ci, small or paper); rows are stored, stopped grids resume
	$(BIN)/python -m experiments $(ONLY) --scale $(SCALE)

tables: .venv/all.stamp ## pictures, tables and verdicts in the documentation, from stored rows
	$(BIN)/python -m experiments tables

LOCK := uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate
lock: ## update the pins of all dependencies (needs uv on the PATH)
	$(LOCK) --upgrade --extra dev --extra spark --extra cyclic pyproject.toml -o requirements/all.lock
	$(LOCK) --upgrade --extra dev -c requirements/all.lock pyproject.toml -o requirements/core.lock
	$(LOCK) --upgrade --extra train --extra build -c requirements/all.lock pyproject.toml -o requirements/runtime.lock
	$(LOCK) --upgrade --extra docs -c requirements/all.lock pyproject.toml -o requirements/docs.lock

clean-kernels: ## remove compiled kernels, which may hold an older version of one another
	find src -name '*.nb[ic]' -delete

clean: clean-kernels ## remove environments and caches
	rm -rf .venv .venv-peers coowned-demo dist site .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "coowned needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv .venv

# Each lock contains the one before it, at the same versions.
.venv/runtime.stamp: requirements/runtime.lock pyproject.toml | .venv/bin/python
	@echo "setting up .venv (once) ..."
	$(PIP) install --require-hashes -r requirements/runtime.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

.venv/core.stamp: requirements/core.lock .venv/runtime.stamp
	@echo "adding what tests need to .venv (once) ..."
	$(PIP) install --require-hashes -r requirements/core.lock
	@touch $@

.venv/all.stamp: requirements/all.lock .venv/core.stamp
	$(PIP) install --require-hashes -r requirements/all.lock
	@touch $@

.venv/docs.stamp: requirements/docs.lock .venv/all.stamp
	$(PIP) install --require-hashes -r requirements/docs.lock
	@touch $@

.venv-peers/peers.stamp: requirements/core.lock requirements/peers.txt requirements/peers-alone.txt pyproject.toml
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip --quiet --disable-pip-version-check install --require-hashes -r requirements/core.lock
	.venv-peers/bin/python -m pip --quiet --disable-pip-version-check install -r requirements/peers.txt
	.venv-peers/bin/python -m pip --quiet --disable-pip-version-check install --no-deps -r requirements/peers-alone.txt
	.venv-peers/bin/python -m pip --quiet --disable-pip-version-check install --no-deps --no-build-isolation --editable .
	@touch $@
