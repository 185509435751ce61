# Two commands on a fresh machine: `make demo` and `make test`. They need git, python3 (3.11 or newer) with venv, make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-spark test-long soak check bench proto clean

demo: $(VENV)/.run  ## join real data through two datacenters and check it against the ground truth
	$(BIN)/photon demo

test: $(VENV)/.dev  ## all quick tests: under 5 minutes on 2 cores
	$(BIN)/python -m pytest -m "not spark and not long"

test-spark: $(VENV)/.dev $(VENV)/.spark  ## the tests of the Spark part, a cluster too; they skip where there is no Java
	$(BIN)/python -m pytest -m "spark and not long"

test-long: $(VENV)/.dev $(VENV)/.spark  ## real data sets; Spark drills; more seeds through the simulator of the replicated log
	$(BIN)/python -m pytest -m long
	PHOTON_SIM_SEEDS=60 $(BIN)/python -m pytest --timeout 1200 tests/simulation/test_seeds.py

soak: $(VENV)/.dev  ## tens of thousands of seeds through the simulator of the replicated log: hours
	$(BIN)/python -m tests.simulation --soak 20000 --jobs 2

check: $(VENV)/.dev  ## style, types, import contracts, freshness of the generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config setup.cfg
	PYTHON=$(BIN)/python sh photon/wire/generate.sh --check

bench: $(VENV)/.dev  ## catch-up, steady rate, live latency, memory
	$(BIN)/photon bench

proto: $(VENV)/.dev  ## make the generated code anew
	PYTHON=$(BIN)/python sh photon/wire/generate.sh

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python setup.cfg requirements/run.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/run.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

$(VENV)/.dev: $(VENV)/.run requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	touch $@

# Spark is large, and of use only where there is a Java to run it.
$(VENV)/.spark: $(VENV)/.run requirements/spark.txt
	if command -v java >/dev/null; then \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/spark.txt && touch $@; fi

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache demo-out bench-out
