# make demo   train the digits example on this machine, with progress on the screen
# make test   install what the tests need, a real Slurm and gigabytes of frameworks included, and run everything
# make test-frameworks  of these, what the README's table of launchers says; UPDATE_README=1 writes the table
# make check  format, lint, types, import contracts, golden scripts

VENV ?= .venv
PYTHON ?= $(shell command -v python3 || command -v python)
DEMO_RUNS ?= runs
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --retries 10 --quiet
PARALLEL ?= -n 2 --dist worksteal
PYTEST := $(BIN)/python -m pytest
SELECTED := tests/frameworks tests/e2e tests/render -m "frameworks or proves"

.PHONY: demo test test-frameworks check install install-dev bench clean

# Dependency groups need pip 25.1; Debian's is older.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or later is needed, $(PYTHON) is older; make PYTHON=/path/to/python3.x" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "python3-venv is needed: apt-get install python3-venv" >&2; exit 1; }
	$(PIP) install --upgrade 'pip>=25.1'

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt --editable '.[torch]' --group examples
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -c constraints.txt --editable '.[torch]' --group examples --group test --group check
	touch $@

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

demo: install
	. $(BIN)/activate && dtslurm submit --cluster local --follow --ntasks-per-node 2 -l torchrun \
	  --run-root $(DEMO_RUNS) -t 10 examples/digits/train.py

# Everything is one run of pytest, so that what proves a cell of the README's table runs once.
test: SELECTED :=
test: check test-frameworks

test-frameworks: install-dev
	tests/lab/install.sh
	tests/sshd/install.sh
	tests/frameworks/install.sh $(BIN)/python
	DTSLURM_REQUIRE_SLURM=1 DTSLURM_TABLE=1 $(PYTEST) $(PARALLEL) --frameworks $(SELECTED) $(PYTEST_ARGS)

check: install-dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) -q tests/render

bench: install-dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
