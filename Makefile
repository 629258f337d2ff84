# Everything from nothing: `make demo` and `make test` need Python 3.11 or newer and a network, no more.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slurm test-gpu slurm-up slurm-down lint docs bench clean

help:
	@echo "make demo        set up, run the default sweep, show its best cells"
	@echo "make test        set up, run the tests"
	@echo "make test-slurm  the tests on a real Slurm cluster inside this machine (root; installs Debian's packages)"
	@echo "make test-gpu    the claims that need a GPU, on that of this machine: adds to docs/gpu-results.md (8 minutes)"
	@echo "make slurm-up    that cluster, to try things on; make slurm-down stops it"
	@echo "make lint        ruff, snakefmt, mypy"
	@echo "make bench       this beside other tools on the same cells: docs/benchmarks.md (some 30 minutes)"
	@echo "make docs        write config/README.md and config/schema.json from the models"
	@echo "make venv        set up $(VENV); then: . $(BIN)/activate"

venv: $(VENV)/.installed

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"sweepack needs Python 3.11 or newer, but $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: requirements.txt pyproject.toml $(VENV)/.created
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements-dev.txt
	@touch $@

demo: venv
	@PATH="$(CURDIR)/$(BIN):$$PATH" snakemake --profile profiles/local
	@$(BIN)/sweepack best digits
	@echo "table:  results/digits/table.csv (and .parquet)"
	@echo "report: results/digits/report.html"

# With SWEEPACK_SKIP_SLURM=1 without those that `make test-slurm` runs; else they skip where there is no Slurm.
test: $(VENV)/.installed-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n logical --maxprocesses 4 $(if $(SWEEPACK_SKIP_SLURM),--ignore tests/slurm)

test-slurm: $(VENV)/.installed-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/slurm/run

test-gpu: $(VENV)/.installed-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/gpu/run

slurm-up:
	@$(PYTHON) tests/slurm/cluster up

slurm-down:
	@$(PYTHON) tests/slurm/cluster down

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow/rules
	$(BIN)/mypy

docs: venv
	@$(BIN)/sweepack docs

# A peer that cannot be installed or fails is said to, and must not keep the others from the page; without a Slurm
# cluster that part is left out.
bench: venv
	-PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/run.py
	-PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/plan.py
	-$(BIN)/python benchmarks/leases.py
	-$(BIN)/python benchmarks/packing.py --into latest
	-PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/slurm.py
	$(BIN)/python benchmarks/report.py

clean:
	rm -rf results .sweepack .snakemake data
