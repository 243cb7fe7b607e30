# make quickstart   install, run a small sweep on this machine, print its tables
# make test         install what the tests need, run them all (GPU tests: make test-gpu)
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Some tests wait for most of their time
JOBS ?= $(shell expr $$(nproc) + 1)

.PHONY: help install quickstart test test-gpu lint format compile-check bench report clean

help:
	@sed -n 's/^# make/make/p' $(MAKEFILE_LIST)

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, not $$($(PYTHON) --version); try make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[nvml]'
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/pip install --quiet --editable '.[nvml,test]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed-test
	$(BIN)/pip install --quiet --editable '.[nvml,test,dev]'
	@touch $@

install: $(VENV)/installed

quickstart: $(VENV)/installed
	$(BIN)/python -m jobs.submit sweeps/quickstart.yaml --local
	$(BIN)/python aggregate.py logs/quickstart --plot logs/quickstart/plots

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -n $(JOBS) -m 'not gpu' $(ARGS)

test-gpu: $(VENV)/installed-test
	$(BIN)/python -m pytest -m gpu $(ARGS)

# make lint         formatting, lint and types
lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# make compile-check  registers, spills and shared memory of the attention kernels on sm_90; no GPU
compile-check: $(VENV)/installed
	$(BIN)/python scripts/compile_check.py

# make bench        what the launcher itself costs
bench: $(VENV)/installed-test
	$(BIN)/python scripts/bench_launcher.py

# make report       tables, texts and plots of the reference results, docs/results from logs/h200
report: $(VENV)/installed
	@mkdir -p docs/results
	@for folder in logs/h200/*/; do name=$$(basename $$folder); rm -f docs/results/$$name/*.png; \
	  $(BIN)/python aggregate.py $$folder --views sweeps/$$name.yaml --plot docs/results/$$name \
	    >docs/results/$$name.md || exit 1; \
	done

clean:
	rm -rf $(VENV) build *.egg-info
