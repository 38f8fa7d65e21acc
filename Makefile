# `make demo` and `make test` do all set-up by themselves, also on a fresh Debian that has only python3 and make.
PYTHON ?= python3
RECORDING ?= gated_delta_net_prefill-recorded
BIN := .venv/bin
export PYTHON

.NOTPARALLEL:
.PHONY: setup demo test test-all test-engines test-gpu lint bench clean-venv

setup:
	@./setup.sh

# Plays the recorded run: every tool call is made again in a real sandbox, every solution is judged again here.
demo: setup
	$(BIN)/justgoal run gated_delta_net_prefill --model recorded:$(RECORDING)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -m "not slow and not thorough"

test-all: lint
	$(BIN)/pytest -m "not thorough"

# What test-all leaves out for its time: whole runs and every judgement once more, in Docker, and what takes a minute each.
test-engines: setup
	CI=true $(BIN)/pytest -m thorough

# On a machine with an NVIDIA GPU, torch for CUDA and nvcc.
test-gpu: setup
	CI=true $(BIN)/pytest tests/test_cuda.py tests/test_cuda_window.py

# Half an hour on an idle machine.
bench: setup
	$(BIN)/python benchmarks/tool_call.py
	$(BIN)/python benchmarks/worker_protocol.py clock
	$(BIN)/python benchmarks/evaluation.py
	$(BIN)/python benchmarks/worker_protocol.py improvements
	$(BIN)/python benchmarks/worker_protocol.py gains -n 10

clean-venv:
	rm -rf .venv
