# Every target sets up its own environment first; the second time that takes a second or two.
PYTHON ?= python3
VENV ?= .venv
# make demo MODEL=... HEAD=...: other checkpoints (folders with a Hugging Face model and its EAGLE-3 head)
MODEL ?=
HEAD ?=
# more options for `adaptivespec demo`, `bench/run.py` or pytest: make demo ARGS="--prompts 4 --eager"
ARGS ?=

PYTEST = $(VENV)/bin/python -m pytest -n 2 --dist loadfile
SETUP = $(PYTHON) vllm_adaptivespec/cli/bootstrap.py $(VENV)
CHECKPOINTS = $(if $(MODEL),--model "$(MODEL)") $(if $(HEAD),--head "$(HEAD)")

.PHONY: demo env test lint bench clean

demo:
	$(SETUP) --extras demo
	$(VENV)/bin/adaptivespec demo $(CHECKPOINTS) $(ARGS)

env:
	$(SETUP) --extras demo,dev

# An engine freezes vLLM's environment variables for its process, and a kernel is interpreted or not for its process, so
# the tests of either do not share one with the others.
test: env
	$(PYTEST) --ignore tests/engine --ignore tests/kernels --ignore tests/runner_v2 $(ARGS)
	$(PYTEST) tests/kernels $(ARGS)
	$(PYTEST) tests/engine $(ARGS)
	$(PYTEST) tests/runner_v2 $(ARGS)

lint: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: env
	$(VENV)/bin/python bench/run.py $(CHECKPOINTS) $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks demo-out
