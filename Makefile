# Every target sets up what it needs, in .venv, once. See CONTRIBUTING.md.

# The first Python that is new enough; `make PYTHON=/path/to/python` names another.
NEW_ENOUGH := import sys; sys.version_info >= (3, 11) and print(sys.executable)
PYTHON ?= $(firstword $(foreach name,python3 python3.11 python3.12 python3.13,$(shell $(name) -c '$(NEW_ENOUGH)' 2>/dev/null)))
# The lowest versions are tested with the lowest Python; `make test-lowest LOWEST_PYTHON=/path/to/python3.11` names it.
LOWEST := import sys; sys.version_info[:2] == (3, 11) and print(sys.executable)
LOWEST_PYTHON ?= $(firstword $(foreach name,python3 python3.11,$(shell $(name) -c '$(LOWEST)' 2>/dev/null)))
EXTRAS := dev,liger,quantization,deepspeed,postgres,grpc,images

BIN := .venv/bin
READY := .venv/ready
LOWEST_BIN := .venv-lowest/bin
LOWEST_READY := .venv-lowest/ready
# `make test-newest WITH='trl[vllm]'` installs that as well.
WITH ?=
NEWEST_BIN := .venv-newest/bin
NEWEST_READY := .venv-newest/ready
# `make test-trl TRL=1.16.0` names a release of TRL; without one, the newest is tested.
TRL ?=
TRL_BIN := .venv-trl/bin
TRL_READY := .venv-trl/ready
CUDA_BIN := .venv-cuda/bin
CUDA_READY := .venv-cuda/ready
NVIDIA_BIN := .venv-nvidia/bin
NVIDIA_READY := .venv-nvidia/ready
DOCS_BIN := .venv-docs/bin
DOCS_READY := .venv-docs/ready
# The examples whose reports the site shows.
REPORTED := sft dpo grpo
# The null GPU, and the minutes of the GPU suite on it.
NULL_GPU := H100-80GB
NULL_GPU_MINUTES := 30
on_null_gpu = $(CUDA_BIN)/python -m autotune.nullgpu --gpu $(NULL_GPU) --table .venv-cuda/table -- $(CURDIR)/$(1)

# The run that the README shows.
SMALL := examples/build/small
PROBE_BUDGET := 900MiB
PROBE_EFFORT := quick
PROBE_TIMEOUT := 360s
PROBE_OUTPUT := autotune-small

# A test that waits for a process leaves its core to the other worker. They take files in the order of
# `tests/conftest.py`: the longest first, so that both end at about the same time.
TWO_WORKERS := --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: probe test test-more test-wheel test-lowest test-newest test-trl test-cuda test-cuda-brief test-nvidia \
	can-test-cuda can-test-nvidia lint docs site gpu gpu-null clean

probe: $(READY) $(SMALL)/data.jsonl
	rm -rf $(PROBE_OUTPUT)
	$(BIN)/autotune probe $(SMALL)/model $(SMALL)/data.jsonl --memory-budget $(PROBE_BUDGET) --effort $(PROBE_EFFORT) --timeout $(PROBE_TIMEOUT) --output $(PROBE_OUTPUT)

test: $(READY)
	$(BIN)/python -m pytest --durations 40 $(TWO_WORKERS)

test-more: $(READY)
	$(BIN)/python -m pytest -m nightly --timeout 900 $(TWO_WORKERS)

test-wheel:
	PYTHON='$(PYTHON)' .ci/test-wheel

test-lowest: $(LOWEST_READY)
	$(LOWEST_BIN)/python -m pytest -m 'not slow and not nightly' $(TWO_WORKERS)

# The newest versions that pip finds today; the environment may be older.
test-newest: $(NEWEST_READY)
	$(NEWEST_BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[$(EXTRAS)]' $(if $(WITH),'$(WITH)')
	$(NEWEST_BIN)/python -m pytest -m 'not slow and not nightly' $(TWO_WORKERS)

# The contract tests with another release of TRL: pip replaces the pinned TRL and its requirements.
test-trl: $(TRL_READY)
	$(TRL_BIN)/python -m pip install --quiet --upgrade 'trl$(addprefix ==,$(TRL))'
	$(TRL_BIN)/python -m pytest -m 'not gpu' --timeout 900 tests/contract tests/techniques $(TWO_WORKERS)

# PyTorch's CUDA build on null GPUs (autotune/nullgpu/README.md): their own tests, then the tests for GPUs.
test-cuda: test-cuda-brief
	$(CUDA_BIN)/python -m pytest -m 'cuda_build and nightly' --timeout 900 tests/nullgpu $(TWO_WORKERS)
	$(call on_null_gpu,$(CUDA_BIN)/python -m pytest -m gpu --timeout 900)

test-cuda-brief: $(CUDA_READY)
	$(CUDA_BIN)/python -m pytest -m 'cuda_build and not nightly' tests/nullgpu $(TWO_WORKERS)

# Null GPUs with NVIDIA's own libraries installed, as by pip's default, and rows with images with torchvision installed.
test-nvidia: $(NVIDIA_READY)
	$(NVIDIA_BIN)/python -m pytest -m cuda_build tests/nullgpu/test_preload.py tests/nullgpu/test_training.py
	$(NVIDIA_BIN)/python -m pytest -m 'not gpu and not nightly' -k image $(TWO_WORKERS) \
		tests/app tests/contract tests/planning tests/step tests/techniques tests/trainers tests/virtual
	$(NVIDIA_BIN)/python -m pytest -m nightly --timeout 900 -k 'images and qwen' tests/end_to_end/test_rows.py

# These fail, and print the reason, if the targets above cannot run here.
can-test-cuda: $(READY)
	@test "$$(uname -sm)" = 'Linux x86_64' || { echo "needs Linux on x86-64, and this is $$(uname -sm)"; exit 1; }
	@command -v g++ > /dev/null || { echo 'needs g++: apt-get install g++'; exit 1; }
	@$(BIN)/python -m pip install --quiet --dry-run --ignore-installed --no-deps $(CUDA_TORCH) > /dev/null 2>&1 || \
		{ echo "needs PyTorch's CUDA build, and pip has none"; exit 1; }

can-test-nvidia: can-test-cuda $(CUDA_READY)
	@$(CUDA_BIN)/python -m pip install --quiet --dry-run --constraint constraints.txt $(CUDA_TORCH) > /dev/null 2>&1 || \
		{ echo "needs NVIDIA's libraries, and pip has not all of them"; exit 1; }


lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@# mypy has one core for a minute; the other checks imports meanwhile.
	$(BIN)/mypy & types=$$!; failed=; \
	$(BIN)/lint-imports --no-cache || failed=1; \
	$(BIN)/lint-imports --no-cache --config importlinter-fences.toml || failed=1; \
	wait $$types && test -z "$$failed"

docs: $(READY)
	$(BIN)/python -W ignore -m tests.docs.write

# The pages that GitHub shows, the Python API, and the reports of a few examples, which are run if they are missing.
site: $(DOCS_READY) $(REPORTED:%=examples/build/%/found/report.html)
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/python -m mkdocs build --strict --clean
	$(DOCS_BIN)/python docs/site/check.py site

examples/build/%/found/report.html: | $(READY)
	$(BIN)/python examples/run.py $*

gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu.suite

# The same on a null GPU, where times mean nothing.
gpu-null: $(CUDA_READY)
	$(call on_null_gpu,$(CUDA_BIN)/python -m benchmarks.gpu.suite --minutes $(NULL_GPU_MINUTES))

clean:
	rm -rf .venv .venv-lowest .venv-newest .venv-trl .venv-cuda .venv-nvidia .venv-docs site examples/build autotune-small dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(SMALL)/data.jsonl: examples/small_workload.py | $(READY)
	$(BIN)/python examples/small_workload.py $(SMALL)

# torch is installed first, in a separate call: if pip finds a CPU build next to the default one, it takes and keeps that.
# pip would compile the modules on one core, for most of a minute; some files of packages are no modules.
define install
$(1) -m venv $(2)
$(2)/bin/python -m pip install --quiet --no-compile --constraint $(3) torch
$(2)/bin/python -m pip install --quiet --no-compile --constraint $(3) --editable '.[$(EXTRAS)]'
$(2)/bin/python -m compileall -qq -j 0 $(2)/lib > /dev/null 2>&1 || true
touch $(2)/ready
endef

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python' >&2; exit 1; }
	$(call install,$(PYTHON),.venv,constraints.txt)

# Without autotune and its requirements: the site is built from the sources alone.
DOCS_NEEDS := import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")
$(DOCS_READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python' >&2; exit 1; }
	$(PYTHON) -m venv .venv-docs
	$(PYTHON) -c '$(DOCS_NEEDS)' | $(DOCS_BIN)/python -m pip install --quiet --constraint constraints.txt --requirement /dev/stdin
	touch $@

$(TRL_READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python' >&2; exit 1; }
	$(call install,$(PYTHON),.venv-trl,constraints.txt)

# A copy of an environment, in which packages can be replaced: files are hard links if the file system supports them, and
# pip unlinks a file before it writes another.
define copied
rm -rf $(2)
$(1)/bin/python -m venv --without-pip $(2)
rm -r $(2)/bin
cp --archive $$(cp --link $(1)/ready $(2)/linked 2> /dev/null && echo --link) $(1)/lib $(1)/bin $(2)
grep --directories=skip --files-with-matches --binary-files=without-match '$(CURDIR)/$(1)' $(2)/bin/* | \
	xargs sed --in-place 's#$(CURDIR)/$(1)\b#$(CURDIR)/$(2)#g'
endef

# `===` takes the version as it is written, which is the CUDA build's; a CPU build is called 2.13.0+cpu. Without
# dependencies, NVIDIA's libraries (2.5 GB) are left out. Each build of torch names a Triton of its own.
CUDA_TORCH = 'torch===$(shell sed -n 's/^torch==//p' constraints.txt)'
TRITON := from importlib.metadata import requires; \
	print(next(each.partition(";")[0] for each in requires("torch") if each.startswith("triton")))
$(CUDA_READY): $(READY)
	$(call copied,.venv,.venv-cuda)
	$(CUDA_BIN)/python -m pip install --quiet --no-deps --no-compile $(CUDA_TORCH)
	$(CUDA_BIN)/python -m pip install --quiet --no-deps --no-compile "$$($(CUDA_BIN)/python -c '$(TRITON)')"
	touch $@

# pip adds NVIDIA's libraries, which torch needs and the environment lacks. Each build of torch has one of torchvision.
$(NVIDIA_READY): $(CUDA_READY)
	$(call copied,.venv-cuda,.venv-nvidia)
	$(NVIDIA_BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt $(CUDA_TORCH) torchvision
	touch $@

$(LOWEST_READY): pyproject.toml constraints-lowest.txt
	@test -n "$(LOWEST_PYTHON)" || { echo 'Python 3.11 is needed: make LOWEST_PYTHON=/path/to/python3.11' >&2; exit 1; }
	$(call install,$(LOWEST_PYTHON),.venv-lowest,constraints-lowest.txt)

$(NEWEST_READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python' >&2; exit 1; }
	$(call install,$(PYTHON),.venv-newest,/dev/null)
