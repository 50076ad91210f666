# Transformers, End to End. `make` alone lists the targets.
PROFILE ?= smoke
ONLY    ?=
FRESH   ?=
PYTHON  ?= python3
SHELL   := /bin/bash
ifeq ($(OS),Windows_NT)
VPY := .venv/Scripts/python.exe
else
VPY := .venv/bin/python
endif
COURSE := $(VPY) -m course
ARGS   := --profile $(PROFILE) $(if $(ONLY),--only "$(ONLY)") $(if $(FRESH),--fresh)
STAMP  := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup assets run test lab bench report check sync clean

help:           ## list the targets
	@grep -hE '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18
	@echo "  variables: PROFILE=smoke|laptop|gpu|cluster|auto  ONLY=05 or 04-07  FRESH=1  PYTHON=python3.12"

$(STAMP): requirements.txt constraints.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON) here: install Python 3.11 or newer, or make PYTHON=…"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the course needs Python 3.11 or newer: make PYTHON=python3.12")'
	@$(VPY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "installing into .venv (once, and when a requirement file changes)"
	@$(VPY) -m pip install -q --disable-pip-version-check -c constraints.txt -r requirements.txt
	@touch $@

setup: $(STAMP)  ## create .venv and install
assets: setup   ## fetch the weights and data of the chosen lessons
	@$(VPY) -m course.fetch fetch --for "$(ONLY)"

run: assets     ## run the course headlessly, write build/report/index.html
	@status=0; $(COURSE) run $(ARGS) || status=$$?; [ $$status = 2 ] || $(COURSE) report $(ARGS) || status=$$?; exit $$status

test: assets    ## the tests
	@$(VPY) -m pytest

lab: assets     ## open the course in JupyterLab
	@$(VPY) -m jupyterlab --notebook-dir=. notebooks

bench: setup    ## side by side against named peers, a table and build/bench.json
	@$(VPY) -m benchmarks

report: setup   ## write the report of the last run again
	@$(COURSE) report $(ARGS)

check: setup    ## hold run, outputs and generated cells to the rules
	@$(COURSE) check $(ARGS)

sync: setup     ## write what is generated
	@$(COURSE) sync

clean:          ## remove everything a run made (the assets stay in COURSE_HOME)
	@rm -rf build .pytest_cache && find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
