# Every target sets up what it needs, in .venv, once. See CONTRIBUTING.md.

# The first Python that is new enough; `make PYTHON=/path/to/python` names another.
NEW_ENOUGH := import sys; sys.version_info >= (3, 11) and print(sys.executable)
PYTHON ?= $(firstword $(foreach name,python3 python3.11 python3.12 python3.13,$(shell $(name) -c '$(NEW_ENOUGH)' 2>/dev/null)))
# The lowest versions are tested with the lowest Python; `make test-lowest LOWEST_PYTHON=/path/to/python3.11` names it.
LOWEST := import sys; sys.version_info[:2] == (3, 11) and print(sys.executable)
LOWEST_PYTHON ?= $(firstword $(foreach name,python3 python3.11,$(shell $(name) -c '$(LOWEST)' 2>/dev/null)))
EXTRAS := dev,liger,quantization,deepspeed,postgres,grpc

BIN := .venv/bin
READY := .venv/ready
LOWEST_BIN := .venv-lowest/bin
LOWEST_READY := .venv-lowest/ready
# `make test-trl TRL=1.16.0` names a release of TRL; without one, the newest is tested.
TRL ?=
TRL_BIN := .venv-trl/bin
TRL_READY := .venv-trl/ready
CUDA_BIN := .venv-cuda/bin
CUDA_READY := .venv-cuda/ready

# The run that the README shows.
SMALL := examples/build/small
PROBE_BUDGET := 900MiB
PROBE_EFFORT := quick
PROBE_TIMEOUT := 240s
PROBE_OUTPUT := autotune-small

.PHONY: probe test test-more test-wheel test-lowest test-trl test-cuda test-cuda-more lint docs gpu clean

probe: $(READY) $(SMALL)/data.jsonl
	rm -rf $(PROBE_OUTPUT)
	$(BIN)/autotune probe $(SMALL)/model $(SMALL)/data.jsonl --memory-budget $(PROBE_BUDGET) --effort $(PROBE_EFFORT) --timeout $(PROBE_TIMEOUT) --output $(PROBE_OUTPUT)

# Two workers: a test that waits for a process leaves its core to the other. They take files in the order of
# `tests/conftest.py`: the longest first, so that both end at about the same time.
test: $(READY)
	$(BIN)/python -m pytest --durations 40 --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-more: $(READY)
	$(BIN)/python -m pytest -m nightly --timeout 900 --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-wheel:
	PYTHON='$(PYTHON)' .ci/test-wheel

test-lowest: $(LOWEST_READY)
	$(LOWEST_BIN)/python -m pytest -m 'not slow and not nightly' --numprocesses 2 --dist loadfile --no-loadscope-reorder

# What autotune says of TRL, held to another release: pip replaces the pinned TRL, and what it needs along with it.
test-trl: $(TRL_READY)
	$(TRL_BIN)/python -m pip install --quiet --upgrade 'trl$(addprefix ==,$(TRL))'
	$(TRL_BIN)/python -m pytest tests/contract tests/techniques --numprocesses 2 --dist loadfile --no-loadscope-reorder

# PyTorch's CUDA build on null GPUs (autotune/nullgpu/README.md), then what is tested on GPUs, on such. It needs Linux on
# x86-64 and g++.
test-cuda: $(CUDA_READY)
	$(CUDA_BIN)/python -m pytest -m 'cuda_build and not nightly' tests/nullgpu
	$(CUDA_BIN)/python -m autotune.nullgpu --gpu H100-80GB --table .venv-cuda/table -- \
		$(abspath $(CUDA_BIN))/python -m pytest -m gpu tests/inspection tests/step tests/trainers

# The cases that take minutes, such as a checkpoint of 70B parameters.
test-cuda-more: $(CUDA_READY)
	$(CUDA_BIN)/python -m pytest -m 'cuda_build and nightly' tests/nullgpu

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/lint-imports --config importlinter-fences.toml

docs: $(READY)
	$(BIN)/python -W ignore -m tests.docs.write

gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu.suite

clean:
	rm -rf .venv .venv-lowest .venv-trl .venv-cuda examples/build autotune-small dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(SMALL)/data.jsonl: examples/small_workload.py | $(READY)
	$(BIN)/python examples/small_workload.py $(SMALL)

# torch goes first, in a call of its own: a CPU build that is offered beside the default one is taken, and stays.
define install
$(1) -m venv $(2)
$(2)/bin/python -m pip install --quiet --constraint $(3) torch
$(2)/bin/python -m pip install --quiet --constraint $(3) --editable '.[$(EXTRAS)]'
touch $(2)/ready
endef

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python' >&2; exit 1; }
	$(call install,$(PYTHON),.venv,constraints.txt)

$(TRL_READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python' >&2; exit 1; }
	$(call install,$(PYTHON),.venv-trl,constraints.txt)

# `===` takes the version as it is written, which is the CUDA build's; a CPU build is called 2.13.0+cpu. Without
# dependencies, NVIDIA's libraries (2.5 GB) are left out; constraints.txt lists all else, apart from Triton, of which
# each build of torch names its own.
TORCH = $(shell sed -n 's/^torch==//p' constraints.txt)
TRITON := from importlib.metadata import requires; \
	print(next(each.partition(";")[0] for each in requires("torch") if each.startswith("triton==")))
$(CUDA_READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python' >&2; exit 1; }
	@command -v g++ > /dev/null || { echo 'g++ is needed: apt-get install g++' >&2; exit 1; }
	$(PYTHON) -m venv .venv-cuda
	$(CUDA_BIN)/python -m pip install --quiet --no-deps 'torch===$(TORCH)'
	$(CUDA_BIN)/python -m pip install --quiet --no-deps --requirement constraints.txt
	$(CUDA_BIN)/python -m pip install --quiet --no-deps "$$($(CUDA_BIN)/python -c '$(TRITON)')"
	$(CUDA_BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

$(LOWEST_READY): pyproject.toml constraints-lowest.txt
	@test -n "$(LOWEST_PYTHON)" || { echo 'Python 3.11 is needed: make LOWEST_PYTHON=/path/to/python3.11' >&2; exit 1; }
	$(call install,$(LOWEST_PYTHON),.venv-lowest,constraints-lowest.txt)
