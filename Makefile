# make quickstart       install the project, run a small sweep on this machine, print its tables
# make ... VENV=.venvs/new PYTHON=python3.12 TORCH='torch==2.12.*'    use another environment
# make test             install the test dependencies and run the tests (3 minutes on two cores)
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Number of test processes: one more than there are cores, because some tests mostly wait.
JOBS ?= $(shell expr $$(nproc) + 1)
# What a new virtual environment gets: the newest torch that is tested
TORCH ?= torch<2.15
# Let Python write bytecode files. Tests start hundreds of processes, and without these files each
# process would compile all modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install quickstart lint format compile-check size report docs cluster clean \
  test test-all test-portable test-numeric test-exhaustive test-versions test-gpu

help:
	@sed -n 's/^# make/make/p' $(MAKEFILE_LIST)

$(VENV)/torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, not $$($(PYTHON) --version); try make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet '$(TORCH)'
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch", version("torch"))'
	@touch $@

$(VENV)/installed: pyproject.toml $(VENV)/torch
	$(BIN)/pip install --quiet --editable .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed-test
	$(BIN)/pip install --quiet --editable '.[test,dev]'
	@touch $@

# make install          install the project into .venv
install: $(VENV)/installed

quickstart: $(VENV)/installed
	$(BIN)/python -m jobs.submit sweeps/quickstart.yaml --local
	$(BIN)/python aggregate.py logs/quickstart --plot logs/quickstart/plots

PYTEST = $(BIN)/python -m pytest -n $(JOBS)
# Tests that run Triton kernels in Triton's interpreter on the CPU. They need a separate process,
# because Triton reads TRITON_INTERPRET when it is imported.
define interpreted
env $(SETTING) $(2) TRITON_INTERPRET=1 $(PYTEST) tests/interpreted $(1) $(SELECTED)
endef
# pytest exits with code 5 if no test is selected. If ARGS are given, this is not an error.
SELECTED = $(ARGS) $(if $(ARGS),|| [ $$? -eq 5 ])

test: $(VENV)/installed-test
	$(PYTEST) $(SELECTED)
	$(call interpreted)

# make test-all         run also the tests marked slow, such as the studies in sweeps/cpu; CI runs this
ALL = -m 'not gpu and not exhaustive'
test-all: $(VENV)/installed-test
	$(PYTEST) $(ALL) $(SELECTED)
	$(call interpreted,$(ALL))

# make test-portable    run the numeric tests with several CPU instruction sets and thread counts
PORTABLE = ATEN_CPU_CAPABILITY=default \
  $(shell grep -qw avx2 /proc/cpuinfo && echo ATEN_CPU_CAPABILITY=avx2) \
  $(shell grep -qw avx512f /proc/cpuinfo && echo ATEN_CPU_CAPABILITY=avx512) \
  MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1 OMP_NUM_THREADS=2
test-portable: $(VENV)/installed-test
	for setting in $(PORTABLE); do \
	  $(MAKE) --no-print-directory test-numeric SETTING=$$setting || exit 1; \
	done

# make test-numeric     run the numeric tests; SETTING=NAME=VALUE sets an environment variable
test-numeric: $(VENV)/installed-test
	env $(SETTING) $(PYTEST) tests/systems --depends all $(SELECTED)
	$(call interpreted,--depends all)

# make test-exhaustive  run what CI leaves out: many seeds and repeats, checks of unchanged kernels
EXHAUSTIVE = -m '(exhaustive or depends) and not gpu' --depends record
test-exhaustive: $(VENV)/installed-test
	$(PYTEST) $(EXHAUSTIVE) $(SELECTED)
	REPEATS=20 $(PYTEST) tests/systems/parallel $(SELECTED)
	$(call interpreted,$(EXHAUSTIVE))
	$(call interpreted,-m 'slow or not exhaustive' --depends all,CHECK_OVERFLOW=1)
	$(MAKE) --no-print-directory test-numeric SETTING=ATEN_CPU_CAPABILITY=default

# make test-versions    run the tests with each release of torch and Triton that is tested
test-versions: $(VENV)/installed
	$(BIN)/python scripts/test_versions.py $(ARGS)

# make test-gpu         run the tests that need an NVIDIA GPU (some need two GPUs)
test-gpu: $(VENV)/installed-test
	$(BIN)/python -m pytest -m 'gpu and not exhaustive' $(ARGS)

# make lint             check formatting, lint, types, spelling and links
lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/md-dead-link-check --no-color

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# make compile-check    print registers, spills and shared memory of kernels on sm_90; needs no GPU
compile-check: $(VENV)/installed
	$(BIN)/python scripts/compile_check.py

# make size             print the lines of each room beside its target
size:
	@$(PYTHON) scripts/size.py

# make report           write the report of the results in logs/h100 and logs/h200 to docs/report
report: $(VENV)/installed
	$(BIN)/python aggregate.py report logs/h100 logs/h200 --out docs/report

# make docs             update the generated parts of README.md and docs/
docs: $(VENV)/installed
	$(BIN)/python scripts/update_docs.py

# make cluster          run a local Slurm cluster until Ctrl-C, to try the launcher; needs root
cluster: $(VENV)/installed
	$(BIN)/python -m tests.jobs.launch.slurm_cluster

clean:
	rm -rf $(VENV) build *.egg-info
