# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
FILES := sb3_flow tests examples

.PHONY: demo test suite lint type format clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(INSTALLED)  ## data, offline training, evaluation, online: one table and one picture
	MUJOCO_GL=disable $(BIN)/python examples/demo.py --out demo_output

test: $(INSTALLED) suite  ## our tests, after those of SB3 and sb3-contrib
	OMP_NUM_THREADS=1 MUJOCO_GL=disable SDL_VIDEODRIVER=dummy $(BIN)/python -m pytest

suite: $(INSTALLED)  ## the test suites of SB3 and sb3-contrib with our algorithms in the seats of theirs
	OMP_NUM_THREADS=1 SDL_VIDEODRIVER=dummy $(BIN)/python -m tests.sb3_suite.run RQL
	OMP_NUM_THREADS=1 SDL_VIDEODRIVER=dummy $(BIN)/python -m tests.sb3_suite.run FMQ
	OMP_NUM_THREADS=1 SDL_VIDEODRIVER=dummy $(BIN)/python -m tests.sb3_suite.run PPO
	OMP_NUM_THREADS=1 SDL_VIDEODRIVER=dummy $(BIN)/python -m tests.sb3_suite.run PPO-vtrace
	OMP_NUM_THREADS=1 SDL_VIDEODRIVER=dummy $(BIN)/python -m tests.sb3_suite.run RecurrentPPO
	OMP_NUM_THREADS=1 SDL_VIDEODRIVER=dummy $(BIN)/python -m tests.sb3_suite.run MaskablePPO

lint: $(INSTALLED)
	$(BIN)/ruff check $(FILES)
	$(BIN)/ruff format --check $(FILES)

type: $(INSTALLED)
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format $(FILES)
	$(BIN)/ruff check --fix $(FILES)

clean:
	rm -rf .venv .cache .mypy_cache .ruff_cache demo_output
