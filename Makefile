# Every target works in a fresh clone: it installs what is missing first.
python := .venv/bin/python
INSTALLED := .venv/.installed
PYTEST := OMP_NUM_THREADS=1 $(python) -m pytest
# Tests in one file share runs; tests/conftest.py orders the longest files first.
BY_FILE := --dist loadfile --no-loadscope-reorder
ARGS ?=
# With this variable, every process would recompile torch and vLLM to bytecode, which takes ten seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup constraints run check docs site test test-all gpu-bundle gpu-check chaos mutants clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## install into .venv: the GPU build on a machine with an NVIDIA GPU, else the CPU build

$(INSTALLED): pyproject.toml constraints/cpu.txt constraints/gpu.txt constraints/hashes.txt
	@scripts/setup.sh

constraints: ## add missing versions to constraints/; ARGS=--upgrade renews all
	@scripts/setup.sh constraints $(ARGS)

run: $(INSTALLED) ## train the default experiment; ARGS="experiment=addition_cpu seed=1" changes settings
	@$(python) run_async.py $(ARGS)

check: $(INSTALLED) ## format, lint, types, imports, spelling, and the fast tests
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/codespell
	$(PYTEST) -q -n auto --maxprocesses=8 $(BY_FILE) -m "not slow and not long" tests/unit tests/contract tests/shape

docs: $(INSTALLED) ## update the generated parts of docs/
	$(python) -m docs.tools.write_docs

site: $(INSTALLED) ## build the documentation site into build/site/html and check all links
	@$(python) -m docs.tools.site

test: $(INSTALLED) ## run the fast tests and the core slow ones, 8 minutes on 2 cores; ARGS="tests/unit -k cli" selects
	$(PYTEST) $(if $(ARGS),-m "not long" $(ARGS),-q -n auto --maxprocesses=8 $(BY_FILE) -m "not long and (core or not slow)")

test-all: $(INSTALLED) ## run all tests: over an hour on 2 cores
	$(PYTEST) $(or $(ARGS),-n 2 $(BY_FILE))

gpu-bundle: $(INSTALLED) ## collect the wheels of `make gpu-check` for an offline machine, 19 MB, into .gpu_bundle/
	@scripts/gpu_bundle.sh

gpu-check: ## test one GPU in about 10 minutes, several in 25, into gpu_check/; from .gpu_bundle/ if it exists; ARGS="--stage 1"
	@[ -d .gpu_bundle ] || $(MAKE) --no-print-directory setup
	@scripts/gpu_check.sh $(ARGS)

chaos: $(INSTALLED) ## kill roles of a run at random, then audit it; ARGS="--seed=7 --kills=200", or ARGS=--matrix for the failure matrix
	$(python) -m tests.chaos $(ARGS)

mutants: $(INSTALLED) ## plant bugs that the fast tests must catch; ARGS="--only NAME", "--kind delivery" or "--by chaos"
	$(python) -m tests.mutants $(ARGS)

clean: ## remove .venv, caches and build output; keep runs, data and models
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
