# Every target sets up what it needs in .venv first. The recipes show the plain commands: copy them and go on from there.

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
# How many random examples test-all takes: thorough or quick.
HYPOTHESIS ?= thorough
# With DOSE, test-all runs one in 24 of the long tests, and one in DOSE of the parameters of each of these; other ones with
# each commit.
DOSE ?= 1
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Machines with a GPU: an environment beside .venv that takes jax, and what else there is, from GPU_PYTHON, and adds
# what that lacks; from the package registry, or from a folder of wheels: make test-gpu WHEELS=DIR
GPU_VENV := .venv-gpu
GPU_PY := $(GPU_VENV)/bin/python
READY_GPU := $(GPU_VENV)/.ready
GPU_PYTHON ?= python3
GPU_SECONDS ?= 1200
GPU_TESTS := tests/ops tests/models tests/train_step tests/weights
ifdef WHEELS
GPU_SOURCE := --no-index --find-links $(WHEELS)
endif

# Another Python that `make test-python` looks at, in an environment of its own.
OTHER_PYTHON ?= python3.14
OTHER_VENV := .venv-python
TEST_TOOLS := pytest pytest-xdist hypothesis beartype

# An interpreter counts only if it runs, is new enough and can make environments: a name on PATH proves none of that.
PYTHON ?= python3.12 python3.13 python3.14 python3
USABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-all test-python test-gpu check-gpu lint format bench bench-gpu constraints clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY_DEV)  ## make or refresh .venv (again only after pyproject.toml or constraints.txt changed)
	@echo "ready; for this shell: source $(VENV)/bin/activate"

quickstart: $(READY)  ## prepare text, train a small model on it, evaluate, write completions (minutes, CPU is enough)
	$(PY) -m data_pipeline.prepare data/stdlib --python-stdlib --tokenizer bpe:4096 --holdout 0.05
	$(PY) -m maxtrain.train config=quickstart $(ARGS)

test: $(READY_DEV)  ## run the tests, without the long ones, compiled quickly; more options by ARGS="-k packing"
	$(PY) -m pytest -n 2 -m 'not long and not slow and not gpu' --quickly --hypothesis-profile quick $(ARGS)

test-all: $(READY_DEV)  ## run all tests but those marked slow (an hour on 2 cores, less with DOSE)
	$(PY) -m pytest -n 2 -m 'not slow and not gpu' --hypothesis-profile $(HYPOTHESIS) --dose $(DOSE) $(ARGS)

test-python: $(READY)  ## import every module, train and generate with another Python, in .venv-python: OTHER_PYTHON=python3.14
	$(OTHER_PYTHON) -m venv --clear --without-pip $(OTHER_VENV)
	$(PY) -m pip --python $(OTHER_VENV)/bin/python install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --editable . $(TEST_TOOLS)
	$(OTHER_VENV)/bin/python -m pytest -n 0 -m '' --hypothesis-profile quick tests/test_python_versions.py $(ARGS)

test-gpu: $(READY_GPU)  ## run the tests marked gpu, with the jax of this machine; WHEELS=DIR to install from a folder
	MAXTRAIN_TEST_PLATFORM=cuda timeout $(GPU_SECONDS) $(GPU_PY) -m pytest -n 0 -m gpu $(GPU_TESTS) $(ARGS)

check-gpu: $(READY_GPU)  ## on a GPU: its tests, runs that repeat, the doctor, benchmarks (half an hour); PARTS="tests doctor"
	benchmarks/on_gpu.sh $(GPU_PY) runs/gpu $(PARTS)

lint: $(READY_DEV)  ## check style, format, imports between packages, and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports
	$(PY) -m pyright

format: $(READY_DEV)  ## mend what ruff can mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(READY)  ## measure the train step, the loader and prepare on this machine
	$(PY) -m benchmarks.train_step
	$(PY) -m benchmarks.data
	$(PY) -m benchmarks.prepare

bench-gpu: $(READY_GPU)  ## measure the train step on the GPU of this machine; WHEELS=DIR to install from a folder
	JAX_PLATFORMS=cuda,cpu timeout $(GPU_SECONDS) $(GPU_PY) -m benchmarks.train_step $(ARGS)

constraints: $(READY)  ## write constraints.txt anew, with the newest versions (then run the tests and look at the diff)
	rm -rf $(VENV)/newest && $(PY) -m venv $(VENV)/newest
	$(VENV)/newest/bin/python -m pip install --quiet --upgrade --editable '.[dev]'
	$(VENV)/newest/bin/python -m pip freeze --exclude-editable > constraints.txt
	rm -rf $(VENV)/newest

clean:  ## remove .venv and the tools' caches; runs/ and data/ stay
	rm -rf $(VENV) $(GPU_VENV) $(OTHER_VENV) dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PY) -c '$(USABLE)' 2>/dev/null || { \
	  for python in $(PYTHON); do \
	    "$$python" -c '$(USABLE)' 2>/dev/null && { echo "$$python -m venv $(VENV)"; exec "$$python" -m venv --clear $(VENV); }; \
	  done; \
	  echo "error: none of [$(PYTHON)] is a Python >= 3.12 that can make virtual environments (needs venv and ensurepip)." >&2; \
	  echo "Install one: 'apt install python3 python3-venv' (Debian 13, Ubuntu 24.04), 'pyenv install 3.12' or" >&2; \
	  echo "'uv python install 3.12' elsewhere; or name yours: make setup PYTHON=/path/to/python" >&2; \
	  exit 1; }
	@$(PY) -c 'import pip' 2>/dev/null || $(PY) -m ensurepip  # environments made by uv have no pip
	$(INSTALL) --editable .
	@touch $@

$(READY_DEV): $(READY)
	$(INSTALL) --editable '.[dev]'
	@touch $@

$(READY_GPU): pyproject.toml
	@$(GPU_PYTHON) -c 'import jax; jax.devices("cuda")' || { \
	  echo "error: the jax of GPU_PYTHON=$(GPU_PYTHON) finds no GPU (or there is no jax)." >&2; \
	  echo "Install jax[cuda13] for it, or name another Python: make test-gpu GPU_PYTHON=/path/to/python" >&2; \
	  exit 1; }
	$(GPU_PYTHON) -m venv --clear --system-site-packages $(GPU_VENV)
	$(GPU_PYTHON) -m benchmarks.gpu_environment $(GPU_VENV)
	$(GPU_PY) -m pip install --quiet --disable-pip-version-check $(GPU_SOURCE) \
	  --constraint $(GPU_VENV)/present.txt --requirement $(GPU_VENV)/needed.txt
	@touch $@
