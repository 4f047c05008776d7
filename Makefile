# `make run` and `make test` each work alone in a fresh clone: they install what is missing first.
python := .venv/bin/python
INSTALLED := .venv/.installed
PYTEST := OMP_NUM_THREADS=1 $(python) -m pytest
ARGS ?=
# Where this is set, every process compiles torch and vLLM anew, ten seconds each time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup run check docs test test-all chaos clean

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## install into .venv: the GPU build where a GPU answers, else the CPU build

$(INSTALLED): pyproject.toml
	@scripts/setup.sh

run: $(INSTALLED) ## train the default experiment; ARGS="experiment=addition_cpu seed=1" changes it
	@$(python) run_async.py $(ARGS)

check: $(INSTALLED) ## format, lint, types, imports, spelling and the fast tests: about three minutes on 2 cores
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/codespell
	$(PYTEST) -q -n auto --maxprocesses=8 -m "not slow and not long" tests/unit tests/contract tests/shape

docs: $(INSTALLED) ## write the generated parts of docs/ anew
	$(python) -m slipstream.scripts.write_docs

test: $(INSTALLED) ## every test but those of many minutes
	$(PYTEST) -m "not long" $(ARGS)

test-all: $(INSTALLED) ## every test
	$(PYTEST) $(ARGS)

chaos: $(INSTALLED) ## kill the roles of a run at random, then audit it; ARGS="--seed=7 --kills=200" changes it
	$(python) -m tests.chaos $(ARGS)

clean: ## remove .venv, caches and build output; runs, data and models stay
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
