# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
# `make VERSIONS= ...` takes the newest versions
VERSIONS := --constraint constraints.txt
BIN := .venv/bin
INSTALLED := .venv/.installed
FILES := sb3_flow tests examples
FETCHED := .venv/.suites
SEATS := RQL HerReplayBuffer PPO PPO-torch PPO-vtrace RecurrentPPO MaskablePPO
# seats of which `make test` runs a part, since their plumbing is that of RQL; `make suite` runs them as a whole
LONG_SEATS := FMQ FQL DSRL QAM RLPD
SHORT := test_run or test_deterministic or test_continuous
# what runs once more with compiled code off
WITHOUT_COMPILED := ppo grpo kernels_advantages kernels_groups policies rql_parity fmq fmq_parity fql_parity rlpd_parity dsrl_parity qam_parity gaussian_actor offline_to_online keyed_noise
# one thread each: two jobs run at a time
ENVIRONMENT := OMP_NUM_THREADS=1 MUJOCO_GL=disable SDL_VIDEODRIVER=dummy

.PHONY: demo test unit without-compiled suite lint type gpu doc format clean dist test-wheel test-lowest

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(VERSIONS) torch
	$(BIN)/python -m pip install --quiet $(VERSIONS) --editable '.[dev]'
	touch $@

demo: $(INSTALLED)  ## data, offline training, evaluation, online: one table and one picture
	$(ENVIRONMENT) $(BIN)/python examples/demo.py --out demo_output

test: $(FETCHED)  ## the test suites of SB3 and sb3-contrib with our algorithms in the seats of theirs, and ours
	$(MAKE) --jobs 2 --output-sync=target unit-a-n unit-o-z without-compiled $(SEATS:%=seat-%) $(LONG_SEATS:%=part-of-seat-%)

unit: $(INSTALLED)  ## our own tests alone
	$(ENVIRONMENT) $(BIN)/python -m pytest

unit-%: $(INSTALLED)  ## those of our test files whose names begin with these letters
	$(ENVIRONMENT) $(BIN)/python -m pytest tests/test_[$*]*.py

without-compiled: $(INSTALLED)  ## part of them in plain Python and torch
	NUMBA_DISABLE_JIT=1 $(ENVIRONMENT) $(BIN)/python -m pytest $(WITHOUT_COMPILED:%=tests/test_%.py)

suite: $(FETCHED)  ## the suites of SB3 and sb3-contrib alone, all seats as a whole
	$(MAKE) --jobs 2 --output-sync=target $(SEATS:%=seat-%) $(LONG_SEATS:%=seat-%)

seat-%: $(FETCHED)  ## one seat; without the tests that sb3-contrib marks as slow (test_ppo_lstm_performance, minutes)
	$(ENVIRONMENT) $(BIN)/python -m tests.sb3_suite.run $* -m "not slow"

part-of-seat-%: $(FETCHED)
	$(ENVIRONMENT) $(BIN)/python -m tests.sb3_suite.run $* -m "not slow" -k "$(SHORT)"

$(FETCHED): $(INSTALLED)
	$(BIN)/python -c "from tests.sb3_suite.run import fetch; fetch('stable_baselines3'); fetch('sb3_contrib')"
	touch $@

dist:  ## the source distribution, and the wheel from it
	$(PYTHON) -m venv .cache/build
	.cache/build/bin/python -m pip install --quiet $(VERSIONS) build
	rm -rf dist sb3_flow.egg-info
	.cache/build/bin/python -m build

test-wheel: dist  ## both, as strangers use them: installed away from this folder, with and without extras
	$(ENVIRONMENT) $(PYTHON) -m tests.release.wheel dist

test-lowest:  ## our tests with the lowest versions that pyproject.toml allows (LOWEST=--torch: of torch, too)
	$(PYTHON) -m venv .cache/lowest
	$(PYTHON) -m tests.release.lowest $(LOWEST) > .cache/lowest.txt
	.cache/lowest/bin/python -m pip install --quiet --constraint .cache/lowest.txt torch
	.cache/lowest/bin/python -m pip install --quiet --constraint .cache/lowest.txt --editable '.[dev,envpool]'
	.cache/lowest/bin/python -m pip check
	$(ENVIRONMENT) .cache/lowest/bin/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check $(FILES)
	$(BIN)/ruff format --check $(FILES)

type: $(INSTALLED)
	$(BIN)/mypy

gpu:  ## what only a GPU can show, with a PYTHON that has torch with CUDA; without a GPU a dry run
	MUJOCO_GL=disable $(PYTHON) -m tests.benchmarks.gpu

doc: $(INSTALLED)  ## the manual and the docstrings as web pages; a warning is an error
	$(BIN)/python -m pip install --quiet $(VERSIONS) --editable '.[doc]'
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -d .cache/doc/doctrees docs .cache/doc/html
	@echo "open .cache/doc/html/index.html"

format: $(INSTALLED)
	$(BIN)/ruff format $(FILES)
	$(BIN)/ruff check --fix $(FILES)

clean:
	rm -rf .venv .cache dist docs/reference .mypy_cache .ruff_cache demo_output
