# Transformers, End to End. `make` alone lists the targets.
PROFILE ?= smoke
ONLY    ?=
FRESH   ?=
JOBS    ?=
PYTHON  ?= python3
SHELL   := /bin/bash
ifeq ($(OS),Windows_NT)
VPY := .venv/Scripts/python.exe
else
VPY := .venv/bin/python
endif
COURSE  := $(VPY) -m course
INSTALL := $(VPY) -m pip install -q --disable-pip-version-check -c constraints/locked.txt
CHOSEN  := --profile $(PROFILE) $(if $(ONLY),--only "$(ONLY)")
STAMP   := .venv/.installed
TESTING := .venv/.installed-for-tests

.DEFAULT_GOAL := help
.PHONY: help setup assets run lab test style bench report check release-check faults sync clean

help:           ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22
	@echo "  variables: PROFILE=smoke|laptop|gpu|cluster|auto  ONLY=05 or 04-07  FRESH=1  JOBS=2  PYTHON=python3.12"

$(STAMP): requirements.txt constraints/locked.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON) here: install Python 3.11 or newer, or make PYTHON=…"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the course needs Python 3.11 or newer: make PYTHON=python3.12")'
	@$(VPY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "installing into .venv (once, and when a requirement file changes)"
	@$(INSTALL) -r requirements.txt -e .
	@touch $@

$(TESTING): $(STAMP) requirements-test.txt
	@echo "installing the test tools (once)"
	@$(INSTALL) -r requirements-test.txt
	@touch $@

setup: $(STAMP)  ## create .venv and install what a run needs
assets: setup   ## fetch the weights and data of the chosen lessons
	@$(COURSE) fetch --for "$(ONLY)"

run: assets     ## run the chosen lessons headlessly and write a report
	@JOBS="$(JOBS)" $(COURSE) run $(CHOSEN) $(if $(FRESH),--fresh)

lab: assets     ## open the course in JupyterLab
	@$(VPY) -m jupyterlab --notebook-dir=. notebooks

test: $(TESTING)  ## the tests of the code, on all cores; the lessons are run by `make run`
	@$(COURSE) fetch
	@$(VPY) -m pytest -n auto -m "not release"

style: $(TESTING)  ## style, format, types, and who imports whom
	@status=0; bin=$(dir $(VPY)); \
	  $${bin}ruff check . || status=1; \
	  $${bin}ruff format --check . || status=1; \
	  $${bin}mypy || status=1; \
	  $${bin}lint-imports || status=1; exit $$status

bench: setup    ## side by side against named peers, a table and build/bench.json
	@$(VPY) -m benchmarks

report: setup   ## write the report of the last run again
	@$(COURSE) report $(CHOSEN)

check: setup    ## hold the last run, the outputs and the generated cells to the rules
	@$(COURSE) check $(CHOSEN)

release-check: $(TESTING)  ## what must hold of a release and not of a reader's copy
	@status=0; $(COURSE) check $(CHOSEN) --strict || status=1; \
	  $(VPY) -m pytest -m release || status=1; exit $$status

faults: $(TESTING)  ## plant faults, kill processes: the tests must notice, the data must live
	@status=0; $(VPY) -m tests.faults.planted || status=1; $(VPY) -m tests.faults.kills || status=1; exit $$status

sync: setup     ## write what is generated
	@$(COURSE) sync

clean:          ## remove everything a run made (the assets stay in COURSE_HOME)
	@rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
