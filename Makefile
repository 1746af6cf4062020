# Every target sets up what it needs in .venv first. The recipes show the plain commands: copy them and go on from there.

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# An interpreter counts only if it runs, is new enough and can make environments: a name on PATH proves none of that.
PYTHON ?= python3.12 python3.13 python3
USABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint format bench constraints clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY_DEV)  ## make or refresh .venv (again only after pyproject.toml or constraints.txt changed)
	@echo "ready; for this shell: source $(VENV)/bin/activate"

quickstart: $(READY)  ## prepare text, train a small model on it, evaluate, write completions (minutes, CPU is enough)
	$(PY) -m data_pipeline.prepare data/stdlib --python-stdlib --tokenizer bpe:4096 --holdout 0.05
	$(PY) -m maxtrain.train config=quickstart $(ARGS)

test: $(READY_DEV)  ## run the tests; two at a time; more options by ARGS="-k packing"
	$(PY) -m pytest -n 2 $(ARGS)

lint: $(READY_DEV)  ## check style, format and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright

format: $(READY_DEV)  ## mend what ruff can mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(READY)  ## measure the train step, the loader and prepare on this machine
	$(PY) -m benchmarks.train_step
	$(PY) -m benchmarks.data
	$(PY) -m benchmarks.prepare

constraints: $(READY)  ## write constraints.txt anew, with the newest versions (then run the tests and look at the diff)
	rm -rf $(VENV)/newest && $(PY) -m venv $(VENV)/newest
	$(VENV)/newest/bin/python -m pip install --quiet --upgrade --editable '.[dev]'
	$(VENV)/newest/bin/python -m pip freeze --exclude-editable > constraints.txt
	rm -rf $(VENV)/newest

clean:  ## remove .venv and the tools' caches; runs/ and data/ stay
	rm -rf $(VENV) dist .pytest_cache .ruff_cache .hypothesis
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
