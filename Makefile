# `make demo` runs the main job from a fresh clone to its end, `make test` and `make test-engines` together run all tests. They set everything up first, once.
SHELL := /bin/bash
PYTHON := .venv/bin/python
ROLLMATCH := .venv/bin/rollmatch

# The stages of the tests (docs/testing.md). Unit tests wait for programs and servers for a quarter of their time: one worker and a half a core.
STYLE := $(PYTHON) -m ruff format --check --quiet . && $(PYTHON) -m ruff check --quiet .
TYPES := $(PYTHON) -m mypy
LINT := $(STYLE) && $(TYPES)
UNIT := $(PYTHON) -m pytest -q -n $$(($$(nproc) * 3 / 2)) --dist loadfile --no-loadscope-reorder --durations=15 -m
# Two files at a time, each with a Ray cluster and engines of its own. These stages get the files that have any of their tests: collecting all takes long.
WITH_PROCESSES := $(PYTHON) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=40 \
    $$(grep -rlE "mark.(engine|ray|processes|long)" tests --include="test_*.py" | sort) -m

# Nothing here needs a hub.
export HF_HUB_OFFLINE := 1
# Hundreds of processes import the same modules, which Python then need not compile each time, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup lock foreign demo demo-start control aligned check test test-engines test-all lint clean
.DEFAULT_GOAL := help

help:
	@echo "make setup         .venv with everything (does nothing where it is done; all others but clean begin with it)"
	@echo "make lock          resolve pyproject.toml again, into locks/cpu.txt and locks/gpu.txt (on PyPI, with hashes)"
	@echo "make foreign       interpreters with openenv and verifiers in .venv/foreign, for the tests of their environments (skipped without)"
	@echo "make demo          experiment=stage2_3v1 from a start that it makes, and a picture of held-out scenes before and after"
	@echo "make control       the same from the same start and in about the same time, by supervision only"
	@echo "make aligned       the other variant, after a warm-up: polygons, segments carried from step to step"
	@echo "make lint          format, ruff and types"
	@echo "make check         lint, then the quick tests: without Ray, engines, learners of several processes and what takes long by itself"
	@echo "make test          lint, unit tests, then the tests that share Ray clusters and engines"
	@echo "make test-engines  the tests that need servers, commands or engines of their own"
	@echo "make test-all      both, as CI"
	@echo "make demo-start    what the demo starts from, in outputs/demo/start (kept where it is there)"
	@echo "make clean         remove .venv and caches; outputs stay"

setup:
	@scripts/setup.sh

lock: setup
	@$(PYTHON) scripts/lock.py

foreign: setup
	@scripts/foreign.sh

# Kept where it is there; the experiments that start from it make it too.
demo-start: setup
	@$(ROLLMATCH) demo trained +experiment=demo_start data.val=null

# A run of an experiment under a name, and its picture. outputs/demo/last_NAME is a link to it. The second of the two is compared with the first.
RUN = run=outputs/$$(date +%F)/$$(date +%H-%M-%S) && \
    $(PYTHON) -m launch.train +experiment=$(1) telemetry.name=$(2) telemetry.run_dir=$$run && \
    ln -sfn ../../$$run outputs/demo/last_$(2) && \
    $(ROLLMATCH) demo picture --run $$run && \
    if [ -e outputs/demo/last_demo -a -e outputs/demo/last_control ]; then $(ROLLMATCH) demo compare outputs/demo/last_{demo,control}; fi

demo: setup
	@$(call RUN,stage2_3v1,demo)

control: setup
	@$(call RUN,control,control)

aligned: setup
	@$(PYTHON) -m launch.train +experiment=rollout_aligned_3v1 telemetry.name=aligned

lint: setup
	@$(LINT)

# The unit tests that the expression selects, with mypy beside them.
UNIT_WITH_TYPES = $(TYPES) & trap "kill $$! 2>/dev/null" EXIT; $(UNIT) "$(1)"; unit=$$?; wait $$! && exit $$unit
STAGE_STYLE := "style" '$(STYLE)'
STAGE_UNIT := "unit tests, with types beside them" '$(call UNIT_WITH_TYPES,not engine and not ray and not processes and not long)'
STAGE_SHARED := "Ray, processes and shared engines" '$(WITH_PROCESSES) "(engine or ray or processes) and not long"'
STAGE_ENGINES := "servers, commands and engines of their own, and what takes long" '$(WITH_PROCESSES) long'

check: setup
	@scripts/stages.sh --not-run "slow tests, Ray, processes and engines: make test" \
	    $(STAGE_STYLE) \
	    "quick tests, with types beside them" '$(call UNIT_WITH_TYPES,not engine and not ray and not processes and not long and not slow)'

test: setup
	@scripts/stages.sh --not-run "servers, commands and engines of their own, and what takes long: make test-engines" $(STAGE_STYLE) $(STAGE_UNIT) $(STAGE_SHARED)

test-engines: setup
	@scripts/stages.sh $(STAGE_ENGINES)

test-all: setup
	@scripts/stages.sh $(STAGE_STYLE) \
	    "unit tests, with types beside them" '$(call UNIT_WITH_TYPES,not engine and not ray and not processes)' \
	    "Ray, processes and engines" '$(WITH_PROCESSES) "engine or ray or processes"'

clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
