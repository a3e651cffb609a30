# make demo    set up, raise a yard, and watch agents repair real packages
# make test    set up, run every test
# make check   set up, lint, types, import rules, and the guest with warnings as errors
# make bench   set up, measure against the floors
# make setup   only that; the others do it by themselves
# make purge   take back what all of them made

PYTHON := .venv/bin/python
BIN := src/cloudyard/_bin
DEMO_ARGS ?=
BENCH_ARGS ?=
TEST_ARGS ?=

# Live tests that cannot run are failures where they should be able to.
export CLOUDYARD_MUST_WORK ?= $(if $(filter 0,$(shell id -u)),1,0)

.PHONY: demo test check bench setup purge guest

demo: setup
	@$(PYTHON) examples/demo.py --cache build $(DEMO_ARGS)

test: setup
	@$(PYTHON) -m pytest -q tests/core tests $(TEST_ARGS) </dev/null

check: setup
	@$(PYTHON) -m ruff check --quiet .
	@$(PYTHON) -m ruff format --check --quiet .
	@$(PYTHON) -m mypy
	@.venv/bin/lint-imports --no-logo
	@$(MAKE) -s -C guest BUILD=$(CURDIR)/$(BIN) all check
	@echo "All checks passed."

bench: setup
	@.venv/bin/cloudyard bench $(BENCH_ARGS)

setup:
	@scripts/setup

purge:
	@scripts/purge

guest:
	@$(MAKE) -s -C guest BUILD=$(CURDIR)/$(BIN)
