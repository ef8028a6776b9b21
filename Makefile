# What a developer does here. Every target sets up .venv itself when it is missing or older than the packages' files.
#
#   PYTHON   interpreter to make .venv with            BACKEND, WORKERS, SECONDS   of `make demo`
#   VERSION  the older TorchRL of `make test-torchrl`
#   ARGS     more arguments for pytest, the demo or the benchmarks, e.g. make test ARGS="-k wire -x"

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.set-up
# TensorDict, Ray and friends are optional to users; developers get all that the tests and figures need.
PACKAGES := -e "core[cli,testing,torchrl]" -e plugins/vanilla -e plugins/ipc -e plugins/ray -e plugins/nccl -e ".[test,lint,demo,bench,docs,examples]"
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CODE := conftest.py core plugins tests examples benchmarks scripts

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-torchrl soak lint format bench docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */make \1\t/' | expand -t 20

setup: $(STAMP)  ## make .venv, with all packages editable and what the tests, the demo and the benchmarks need
	@echo ".venv is ready: $(BIN)/weightwire backends"

# torch first and alone: it is by far the largest, and everything else builds on the version that constraints.txt names.
$(STAMP): pyproject.toml constraints.txt core/pyproject.toml $(wildcard plugins/*/pyproject.toml)
	@echo "setting up .venv, once: it takes minutes, the network and room on the disk"
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@echo "installing torch (large) ..."
	@$(INSTALL) torch
	@echo "installing the packages of this repository, and what their tests, demo and benchmarks need ..."
	@$(INSTALL) $(PACKAGES)
	@$(BIN)/python -m pip check
	@touch $@

demo: $(STAMP)  ## learn CartPole with workers that get their policy through Weightwire (BACKEND=ipc WORKERS=2 SECONDS=60)
	$(strip $(BIN)/python examples/cartpole.py $(if $(BACKEND),--backend "$(BACKEND)") \
	    $(if $(WORKERS),--workers $(WORKERS)) $(if $(SECONDS),--seconds $(SECONDS)) $(ARGS))

test: $(STAMP)  ## every test but the soak, and how long each part took
	$(BIN)/python scripts/run_tests.py $(ARGS)

# Beside the release that constraints.txt names, the collector adapter is tested on this one, in an environment of its
# own: 0.11 is the first with schemes. 0.8 and 0.9 work too, for weight_updater= alone.
VERSION ?= 0.11.1
OLDER := .venv-torchrl-$(VERSION)

test-torchrl: $(OLDER)/.set-up  ## the tests of the TorchRL adapter on an older release (VERSION=0.11.1), made ready like .venv
	$(OLDER)/bin/python -m pytest tests/collectors -k torchrl -m "not soak" --timeout=300 $(ARGS)

$(OLDER)/.set-up: pyproject.toml constraints.txt core/pyproject.toml $(wildcard plugins/*/pyproject.toml)
	@test -x $(OLDER)/bin/pip || $(PYTHON) -m venv $(OLDER)
	@grep -v '^torchrl==' constraints.txt > $(OLDER)/constraints.txt
	@echo "torchrl==$(VERSION)" >> $(OLDER)/constraints.txt
	@echo "setting up $(OLDER), once: torch (large), torchrl $(VERSION) and what these tests need ..."
	@$(OLDER)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OLDER)/constraints.txt torch
	@$(OLDER)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OLDER)/constraints.txt \
	    -e "core[testing,torchrl]" -e plugins/vanilla -e plugins/ipc -e plugins/ray -e plugins/nccl -e ".[test,demo]"
	@$(OLDER)/bin/python -m pip check
	@touch $@

soak: export WEIGHTWIRE_HYPOTHESIS := random
soak: $(STAMP)  ## the long tests, with new random examples in each run
	$(BIN)/python -m pytest -m soak --durations=0 --timeout=3600 $(ARGS)
	$(MAKE) test-torchrl ARGS=

lint: $(STAMP)  ## ruff (format and rules) and mypy --strict
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy

format: $(STAMP)  ## let ruff format the code and mend what it can
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

bench: $(STAMP)  ## measure everything side by side; writes benchmarks/results/
	$(BIN)/python benchmarks/breakdown.py --out benchmarks/results
	$(BIN)/python benchmarks/run.py $(ARGS)

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(STAMP)  ## build the documentation into site/, strictly: a link that leads nowhere is an error
	$(BIN)/mkdocs build --strict
	@echo "read it: site/index.html"

clean:  ## remove .venv and every cache
	rm -rf site .venv .venv-torchrl-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
