# kv-translator: every job a developer or CI needs. `make help` lists them.
#
# Needs Python 3.11 or newer, make and a C compiler; everything else goes into one
# virtual environment, .venv in this folder. A stamp in .venv marks each finished
# install, so a second call starts at once; a change of pyproject.toml or of
# deploy/constraints.txt installs again.
#
#   make PYTHON=python3.12 ...     another interpreter
#   make TORCH_INDEX=URL ...       an extra package index that holds CPU builds of torch
#   make serve ARGS="--port 9000"  more options for the command behind the target
#   make VLLM_CACHE=FOLDER ...     where test-vllm, test-lmcache, test-sglang keep their environments

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--constraint deploy/constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

VLLM_CACHE ?= $(HOME)/.cache/kv-translator
# Named by what it is made from, so that every clone finds the one that fits it.
VLLM := $(VLLM_CACHE)/vllm-$(shell cat tests/vllm/install.sh tests/vllm/requirements.txt \
	| sha256sum | cut -c1-12)
LMCACHE := $(VLLM_CACHE)/lmcache-$(shell cat tests/lmcache/install.sh | sha256sum | cut -c1-12)
SGLANG := $(VLLM_CACHE)/sglang-$(shell cat tests/sglang/install.sh | sha256sum | cut -c1-12)

PACKAGING := pyproject.toml deploy/constraints.txt
CREATED := $(VENV)/.created
RUNTIME := $(VENV)/.runtime
DEVELOP := $(VENV)/.develop

.DEFAULT_GOAL := help
.PHONY: help install demo serve test test-slow test-vllm vllm-environment test-lmcache \
	test-sglang bench fit-demo clean

DEMO := mappers/demo
ARTIFACTS := $(DEMO)/artifacts
FIT_DEMO := --calibration $(DEMO)/text/calibration.jsonl --root $(ARTIFACTS)
EVALUATE_DEMO := --held-out in_domain=$(DEMO)/text/held_out.jsonl \
	--held-out out_of_domain=$(DEMO)/text/out_of_domain.jsonl --documents 80 \
	--tasks $(DEMO)/text/word_again.jsonl
GROW := --source $(DEMO)/small --target $(DEMO)/large
SHRINK := --source $(DEMO)/large --target $(DEMO)/small

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(RUNTIME)  ## Install the service into .venv

demo: $(RUNTIME)  ## Start a real server, translate a prompt both ways, print the comparison
	$(BIN)/kvt demo $(ARGS)

serve: $(RUNTIME)  ## Run the service with the embedded mappers until Ctrl-C
	$(BIN)/kvt serve $(ARGS)

test: $(DEVELOP)  ## Lint, format check, types, and every test that takes seconds
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-slow: $(DEVELOP)  ## The tests that take minutes
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

test-vllm: $(RUNTIME) $(VLLM)/.ready  ## Two real vLLM servers, the service and the router between them
	KVT_PYTHON=$(abspath $(BIN)/python) PYTHONPATH=$(CURDIR) $(VLLM)/bin/python -m pytest \
		-o filterwarnings=default tests/vllm $(ARGS)

vllm-environment: $(VLLM)/.ready  ## What test-vllm runs in; fails on machines that cannot have it

test-lmcache: $(LMCACHE)/.ready  ## kvt bridge lmcache against a real LMCache server
	PYTHONPATH=$(CURDIR) $(LMCACHE)/bin/python -m pytest -o filterwarnings=default \
		tests/lmcache $(ARGS)

test-sglang: $(SGLANG)/.ready  ## kvt bridge sglang, and our storage backend, in SGLang's own storage code
	PYTHONPATH=$(CURDIR) $(SGLANG)/bin/python -m pytest -o filterwarnings=default \
		tests/sglang $(ARGS)

bench: $(DEVELOP)  ## Translation against the bare matrix multiplies and the target's prefill
	$(BIN)/python tests/bench/bench_translate.py $(ARGS)

fit-demo: $(DEVELOP)  ## Fit and measure both embedded mappers again
	$(BIN)/kvt fit $(GROW) --recipe full_head --k 4 $(FIT_DEMO)
	$(BIN)/kvt fit $(SHRINK) --recipe full_head --k 8 $(FIT_DEMO)
	$(BIN)/kvt evaluate $(ARTIFACTS)/small-to-large-* $(GROW) $(EVALUATE_DEMO) \
		--reverse $(ARTIFACTS)/large-to-small-*
	$(BIN)/kvt evaluate $(ARTIFACTS)/large-to-small-* $(SHRINK) $(EVALUATE_DEMO) \
		--reverse $(ARTIFACTS)/small-to-large-*

clean:  ## Remove .venv and every cache
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(RUNTIME): $(PACKAGING) | $(CREATED)
	@echo "Installing into $(VENV): the first time this takes minutes (torch is large)"
	$(PIP) --editable .
	@touch $@

$(VLLM)/.ready: | $(CREATED)
	@echo "Installing vLLM's CPU build into $(VLLM): 1.5 GB"
	rm -rf $(VLLM)
	tests/vllm/install.sh $(VLLM) $(PYTHON) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	@touch $@

$(LMCACHE)/.ready: | $(CREATED)
	@echo "Installing LMCache into $(LMCACHE): the first time this takes minutes"
	rm -rf $(LMCACHE)
	tests/lmcache/install.sh $(LMCACHE) $(PYTHON) \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	@touch $@

$(SGLANG)/.ready: | $(CREATED)
	@echo "Installing SGLang without CUDA into $(SGLANG): 2.2 GB"
	rm -rf $(SGLANG)
	tests/sglang/install.sh $(SGLANG) $(PYTHON) \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	@touch $@

$(DEVELOP): $(RUNTIME)
	$(PIP) --editable '.[dev,gguf,tasks,train]'
	@touch $@
