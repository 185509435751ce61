# Two commands on a fresh machine: `make demo` and `make test`. They need git, python3 (3.11 or newer) with venv, make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Tests run in two processes, those that share what is costly to start in one (tests/conftest.py); WORKERS=0: here.
# The quick ones wait more than they compute: in three.
WORKERS ?= 2
test: WORKERS = 3
PYTEST = $(BIN)/python -m pytest -n $(WORKERS)
# What has a target of its own.
APART = faults or links or compose or fuzz or soak

# The real server that stands between datacenters; a Go module.
TOXIPROXY := .toxiproxy/bin/server
TOXIPROXY_VERSION := v2.12.0
MINUTES ?= 30

# What renders the chart for its test; a Go module.
HELM := .helm/bin/helm
HELM_VERSION := v3.16.4

# Where the machine sets it, each process that a test starts would compile anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-spark test-long test-faults test-compose fuzz mutants soak soak-faults soak-millwheel results toxiproxy site check bench proto clean

demo: $(VENV)/.run  ## join real data through two datacenters and check it against the ground truth
	$(BIN)/photon demo

test: $(VENV)/.dev  ## all quick tests: under 4 minutes on 2 quiet cores
	$(PYTEST) -p tests.in_memory -m "not (spark or long or $(APART))"

test-spark: $(VENV)/.dev $(VENV)/.spark  ## the tests of the Spark part, a cluster too; they skip where there is no Java
	$(PYTEST) -m "spark and not (long or $(APART))"

test-long: $(VENV)/.dev $(VENV)/.spark $(HELM)  ## real data sets; Spark drills; more seeds through the simulator of the replicated log
	$(PYTEST) -m "long and not ($(APART))"
	PHOTON_SIM_SEEDS=25 $(PYTEST) --timeout 1200 tests/simulation/test_seeds.py
	@echo "More seeds, of these tests and of the simulator: make soak"

test-faults: $(VENV)/.dev $(TOXIPROXY)  ## a system of several datacenters whose processes, links and disks fail; needs Go
	$(PYTEST) -m "faults or links"

test-compose: $(VENV)/.dev $(TOXIPROXY)  ## docker-compose.yml for real; starts an engine where none runs (root)
	$(BIN)/python -m pytest -m compose

fuzz: $(VENV)/.dev  ## strangers' bytes on every port, for long
	PHOTON_FUZZ_EXAMPLES=$${PHOTON_FUZZ_EXAMPLES:-2000} $(PYTEST) --timeout 3600 -m fuzz tests/fuzz

mutants: $(VENV)/.dev  ## mistakes a person would make, one at a time: do the tests notice?
	$(BIN)/python -m tests.mutants

soak-faults: $(VENV)/.dev $(TOXIPROXY)  ## random faults on whole systems for MINUTES (30), then a report
	$(BIN)/python -m tests.faults.soak --minutes $(MINUTES)

results: $(VENV)/.dev $(TOXIPROXY)  ## the paper's figures, measured and drawn into docs/results.md: twenty minutes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/figures.txt
	$(BIN)/python -m benchmarks.figures

soak-millwheel: $(VENV)/.dev $(TOXIPROXY)  ## random faults on machines that compute one run for MINUTES (30), then a report
	$(BIN)/python -m tests.millwheel.soak --minutes $(MINUTES)

soak: $(VENV)/.dev $(VENV)/.spark  ## more seeds than test-long, and faults that CI leaves out; tens of thousands through the simulator: hours
	PHOTON_SOAK=1 $(PYTEST) -m soak
	PHOTON_SIM_SEEDS=5000 $(PYTEST) --timeout 1200 tests/simulation/test_seeds.py

toxiproxy: $(TOXIPROXY)  ## the server that stands between datacenters in tests of faults; needs Go
	@test -x $(TOXIPROXY) || { echo "no Go to build $(TOXIPROXY) with: install it, or name one by PHOTON_TOXIPROXY" >&2; exit 1; }

# Both variables: no advertisement of what may come after MkDocs 1.
site: $(VENV)/.dev  ## the docs as a site in site/; a broken link or anchor, or a page that is nowhere in it, is an error
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --quiet --strict

check: $(VENV)/.dev  ## style, types, import contracts, freshness of the generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config setup.cfg
	PYTHON=$(BIN)/python sh photon/rpc/generate.sh --check

bench: $(VENV)/.dev  ## catch-up, steady rate, live latency, memory
	$(BIN)/photon bench

proto: $(VENV)/.dev  ## make the generated code anew
	PYTHON=$(BIN)/python sh photon/rpc/generate.sh

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python pyproject.toml requirements/run.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/run.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

$(VENV)/.dev: $(VENV)/.run requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	touch $@

# Spark is large, and of use only where there is a Java to run it.
$(VENV)/.spark: $(VENV)/.run requirements/spark.txt
	if command -v java >/dev/null; then \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/spark.txt && \
	    $(BIN)/python -m tests.spark.classes && touch $@; fi

# Without Go there is none, and what needs it says so.
$(TOXIPROXY):
	if command -v go >/dev/null; then \
	    GOBIN=$(CURDIR)/$(@D) go install github.com/Shopify/toxiproxy/v2/cmd/server@$(TOXIPROXY_VERSION); fi

$(HELM):
	if command -v go >/dev/null; then \
	    GOBIN=$(CURDIR)/$(@D) go install helm.sh/helm/v3/cmd/helm@$(HELM_VERSION); fi

clean:
	rm -rf $(VENV) .toxiproxy .helm build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache demo-out bench-out
