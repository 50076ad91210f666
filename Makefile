# Transformers, End to End. Every target is one call of the program `course`, so that nobody needs make:
# `make run ONLY=05` is `.venv/bin/course run --only 05`. `make` alone lists the targets.
PROFILE ?= smoke
ONLY    ?=
FRESH   ?=
JOBS    ?=
PYTHON  ?= python3
ifeq ($(OS),Windows_NT)
VPY := .venv/Scripts/python.exe
else
VPY := .venv/bin/python
endif
COURSE  := $(VPY) -m course
CHOSEN  := --profile $(PROFILE) $(if $(ONLY),--only "$(ONLY)")

.DEFAULT_GOAL := help
.PHONY: help setup doctor assets run lab work test slow-tests style bench report check release-check faults sync site site-serve clean
.PHONY: .venv/.installed-for-tests

help:           ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22
	@echo "  variables: PROFILE=smoke|laptop|gpu|cluster|auto  ONLY=05 or 04-07  FRESH=1  JOBS=2  PYTHON=python3.12"

setup:          ## create .venv and install what a run needs
	@$(PYTHON) -m course setup

.venv/.installed-for-tests:
	@$(PYTHON) -m course setup --tests

doctor:         ## say what this machine has and what it lacks; nothing is installed
	@$(PYTHON) -m course doctor

lab: setup      ## open lesson 00 in JupyterLab, or ONLY=07 that one
	@$(COURSE) lab --only "$(ONLY)"

work: setup     ## copy the lessons into work/ for yourself, or bring those copies up to date
	@$(COURSE) work

assets: setup   ## fetch the weights and data of the chosen lessons
	@$(COURSE) fetch --for "$(ONLY)"

run: setup      ## run the chosen lessons headlessly and write a report
	@JOBS="$(JOBS)" $(COURSE) run $(CHOSEN) $(if $(FRESH),--fresh)

test: setup     ## the tests of the code, on all cores; the lessons are run by `make run`
	@$(COURSE) test

slow-tests: setup  ## those that start kernels, launchers and whole trainings
	@$(COURSE) slow-tests

style: setup    ## style, format, types, who imports whom, and spelling
	@$(COURSE) style

bench: setup    ## side by side against named peers, a table and build/bench.json
	@$(COURSE) bench

report: setup   ## write the report of the last run again
	@$(COURSE) report $(CHOSEN)

check: setup    ## hold the last run, the outputs and the generated cells to the rules
	@$(COURSE) check $(CHOSEN)

release-check: setup  ## what must hold of a release and not of a reader's copy
	@$(COURSE) release-check $(CHOSEN)

faults: setup   ## plant faults, kill processes: the tests must notice, the data must live
	@$(COURSE) faults

sync: setup     ## write what is generated
	@$(COURSE) sync

site: setup     ## build the pages from the committed lessons: build/site
	@$(COURSE) site

site-serve: setup  ## the same, and show them on this machine
	@$(COURSE) site --serve

clean:          ## remove everything a run made (the assets stay in COURSE_HOME)
	@$(PYTHON) -m course clean
