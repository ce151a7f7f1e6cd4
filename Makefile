# `make search` and `make test` each create .venv and install the pinned dependencies first, if that is still to do.
# The work is in scripts/setup.sh.
PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?= -q
SPACE ?= search_spaces/gpt3_175b_h800.toml
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

export PYTHON
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help setup search test test-all lint quick-checks types quick-tests all-tests clean dist

help:
	@echo 'make search    set up if needed, then search the layouts of GPT-3 175B on 96 H800s'
	@echo '               options: make search ARGS="--address none"; another space: make search SPACE=FILE.toml'
	@echo 'make test      set up if needed, then check the code and run the tests (12 minutes at most on 2 cores)'
	@echo 'make test-all  the same with the slow tests, and why one was left out; the first time it installs torch'
	@echo '               in its other build (CPU or CUDA) into the cache of the user: 5.4 GB'
	@echo 'make lint      only the checks: ruff, mypy, import-linter'
	@echo 'make setup     only set up; another Python: make setup PYTHON=python3.13'
	@echo 'make dist      wheel and source archive into dist/'
	@echo 'make clean     delete $(VENV), caches and what was built'

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt
	@scripts/setup.sh $@ all,dev

search: $(STAMP)
	@exec $(BIN)/echo-explore search $(SPACE) $(ARGS)

# --dist loadgroup: tests/conftest.py keeps the tests that start Ray, and those of a file that import torch, on one worker.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup

# mypy keeps one core busy for a minute or two where it has nothing cached, so it runs beside the tests.
BESIDE := $(MAKE) --no-print-directory -j 2 types

# Without this Ray writes an access token into the home of whoever runs the tests.
test test-all: export RAY_AUTH_MODE := disabled
test: quick-checks
	@$(BESIDE) quick-tests

test-all: quick-checks
	@$(BESIDE) all-tests

quick-tests: $(STAMP)
	@exec $(PYTEST) -m 'not slow' $(PYTEST_ARGS)

all-tests: $(STAMP)
	@exec $(PYTEST) -rs --hypothesis-profile full $(PYTEST_ARGS)

lint: quick-checks types

quick-checks: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

dist: $(STAMP)
	rm -rf build dist
	$(BIN)/python -m build --no-isolation
	rm -rf build

clean:
	rm -rf $(VENV) $(VENV).lock build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
