# make demo   train the digits example on this machine, with progress on the screen
# make test-quick  in two minutes: what is pure, one run on this machine and one on a real Slurm
# make test   install what the tests need, a real Slurm and gigabytes of frameworks included, and run every test,
#             long matrices by a sample of their cases; PYTEST_ARGS='--seed 7' takes the cases of that seed again
# make test-all  the same with all cases, and compare docs/tested.md's table of launchers; UPDATE_TABLE=1 writes it
# make check  format, lint, types, import contracts, documentation and its links, golden scripts
# make lock   write the versions and hashes of what development, tests and releases use, requirements-*.lock
# make docs   the generated pages of the documentation, in docs/reference, and the site, in build/site
# make test-slurm-versions  the end-to-end tests on Slurm 20.11, 22.05, 24.11 and 26.05, and their table in docs/tested.md
# make test-gpu  what only a GPU can show, on a machine with one, into docs/gpu.json; GPU_PYTHON=/path/to/python
#             trains with the frameworks that are installed there
# make test-torch-versions  the tests of dtslurm.train with older releases of torch: five gigabytes for each
# make bench  every benchmark beside its peers, into docs/benchmarks.json
# make coverage      branches that the tests pass, of all but training with frameworks
# make mutation      a sample of wrong programs, and how many of them the tests find
# make test-release  a release in clean environments: every Python here, uv, pipx; SBOM, licenses, audit
# make fuzz   an hour of coverage-guided fuzzing of every parser; FUZZ_ARGS='--seconds 60 frames'
# make nemesis  500 random schedules of faults on a real Slurm, some hours; NEMESIS_ARGS='--seed 7'
#               NEMESIS_ARGS='--seeds 3000-3199' are schedules of runs with roles, from 4000 on of job arrays
# make soak   an hour of compressed life on a cluster, and what leaks of it; SOAK_ARGS='--seconds 60'

VENV ?= .venv
PYTHON ?= $(shell command -v python3 || command -v python)
DEMO_RUNS ?= runs
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --retries 10 --quiet
# A file of tests runs in one process, so that what its tests share is made once. Much of a test is waiting.
WORKERS ?= 6
PYTEST := $(BIN)/python -m pytest
QUICK := cli config container diagnose discover e2e/test_runs.py fuzz launch logs model planner render services slurm \
  store worker
IN_PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: lock demo test test-quick test-all install-test test-slurm-versions test-gpu test-torch-versions test-release lint check docs fuzz nemesis soak install install-dev bench coverage mutation sbom clean

# Dependency groups need pip 25.1; Debian's is older.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or later is needed, $(PYTHON) is older; make PYTHON=/path/to/python3.x" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "python3-venv is needed: apt-get install python3-venv" >&2; exit 1; }
	$(PIP) install --upgrade 'pip>=25.1'

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt --editable '.[torch]' --group examples
	touch $@

# Everything but torch, whose wheel differs from machine to machine, comes by version and hash.
$(VENV)/.installed-dev: $(BIN)/python pyproject.toml constraints.txt requirements-dev.lock
	$(PIP) install --require-hashes -r requirements-dev.lock
	$(PIP) install -c constraints.txt --editable '.[torch]'
	touch $@ $(VENV)/.installed

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

COMPILE := $(BIN)/uv pip compile --universal --python-version 3.10 --generate-hashes --no-header --no-annotate --quiet \
  --upgrade
lock: install-dev
	$(COMPILE) pyproject.toml --group test --group check --output-file requirements-dev.lock
	$(COMPILE) --group release --constraint requirements-dev.lock --output-file requirements-release.lock

demo: install
	. $(BIN)/activate && dtslurm submit --cluster local --follow --ntasks-per-node 2 -l torchrun \
	  --run-root $(DEMO_RUNS) -t 10 examples/digits/train.py

install-test: install-dev
	tests/lab/install.sh
	tests/sshd/install.sh
	tests/dashboard/install.sh
	tests/frameworks/install.sh $(BIN)/python
	$(BIN)/python -m tests.garbage

test: lint install-test
	DTSLURM_REQUIRE_SLURM=1 $(PYTEST) $(IN_PARALLEL) --frameworks $(PYTEST_ARGS)

test-all: lint install-test
	DTSLURM_REQUIRE_SLURM=1 DTSLURM_TABLE=1 $(PYTEST) $(IN_PARALLEL) --frameworks --everything $(PYTEST_ARGS)

test-quick: install-dev
	tests/lab/install.sh
	DTSLURM_REQUIRE_SLURM=1 $(PYTEST) $(IN_PARALLEL) -q -m "(quick and not ssh) or not (slow or slurm or ssh or e2e)" \
	  $(QUICK:%=tests/%) $(PYTEST_ARGS)

# Tests share the GPU where they can: most of their time is imports.
test-gpu: install-dev
	$(PYTEST) -n 4 $(PYTEST_ARGS) tests/gpu

# Of Debian's releases, downloaded into the cache; VERSIONS=sid runs one of them.
test-slurm-versions: install-dev
	tests/lab/install.sh
	tests/sshd/install.sh
	$(PIP) install --group versions
	$(BIN)/python -m tests.lab.versions $(VERSIONS)

# No --quiet for mkdocs: with --quiet, --strict ignores all warnings, such as links to missing pages.
lint: install-dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/typos --format brief
	$(BIN)/python -m tests.prose
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --strict
	$(BIN)/python -m tests.links

check: lint
	$(PYTEST) -q tests/render/test_golden.py tests/test_structure.py tests/test_links.py

docs: install-dev
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict

bench: install-dev
	tests/lab/install.sh
	tests/sshd/install.sh rsync
	rm -f $(VENV)/lib/python3.*/site-packages/dtslurm_tests.pth # of tests/garbage.py: measure Python as users have it
	$(BIN)/python -m benchmarks

fuzz: install-dev
	$(PIP) install --group fuzz
	$(BIN)/python -m tests.fuzz --record $(FUZZ_ARGS)

nemesis: install-dev
	tests/lab/install.sh
	$(BIN)/python -m tests.nemesis --record $(NEMESIS_ARGS)

soak: install-dev
	tests/lab/install.sh
	tests/sshd/install.sh
	$(BIN)/python -m tests.soak --record $(SOAK_ARGS)

coverage: install-dev
	tests/lab/install.sh
	tests/sshd/install.sh
	tests/dashboard/install.sh
	$(PIP) install --group measure
	tests/coverage.sh $(BIN)/python $(PYPYTEST_ARGS)

mutation: install-dev
	$(PIP) install --group measure
	$(BIN)/python -m tests.mutation $(MUTATION_ARGS)

test-torch-versions: install-dev
	$(BIN)/python -m tests.train.versions $(VERSIONS)

test-release: install-dev
	$(PIP) install --require-hashes -r requirements-release.lock
	$(BIN)/python -m tests.release

sbom: install-dev
	$(PIP) install --require-hashes -r requirements-release.lock
	$(BIN)/python -m tests.release sbom

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
