"""Fixtures that several parts of the tests need."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest

# Before anything imports a Hugging Face library: tests never reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# Nor do they read or write the user's caches and settings; workers of pytest-xdist share those of the first process.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHES = tempfile.TemporaryDirectory(prefix="autotune-tests-", ignore_cleanup_errors=True)
    os.environ["XDG_CACHE_HOME"] = _CACHES.name
    for _name in ("HF_HOME", "HF_DATASETS_CACHE", "AUTOTUNE_CACHE_LIMIT"):
        os.environ.pop(_name, None)
# Threads that wait for one another by spinning are many times slower where several test processes share the cores.
os.environ["OMP_NUM_THREADS"] = "1"

# A pipeline started in the background ignores Ctrl-C, and one under nohup SIGHUP; so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

from autotune.core.events import ignore
from autotune.core.jobs.protocol import PrepareRequest
from autotune.core.workload import DatasetSource, ModelSource, Workload
from autotune.probing import JobServer, prepare
from autotune.probing.server import Worker
from autotune.probing.tracing import ServerTracer
from tests.small import long_tailed_texts, text_rows, write_rows, write_small_model

TESTS = Path(__file__).parent
LONGEST = (
    "end_to_end/test_probe.py", "app/check/test_configurations.py", "virtual/test_against_cpu.py",
    "step/test_trace.py", "app/check/test_check.py", "step/test_trace_ranks.py", "app/check/test_ended.py",
    "trainers/test_conformance_steps.py", "trainers/test_conformance_geometry.py", "virtual/test_images_against_cpu.py",
    "reporting/test_page_in_browser.py", "step/test_probe.py", "step/test_grpo.py", "virtual/test_cuda_target.py",
    "app/check/test_scripts.py", "trainers/test_adversarial.py",
)  # fmt: skip
"""Files that take the longest, of which most tests are short, by their seconds (``make test`` shows the longest)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, then those with slow tests, so that all workers are busy until the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    first = {TESTS / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (first.get(item.path, len(first)), item.path not in slow))


def pytest_collectstart() -> None:
    """Collect no garbage until the tests are collected: it would take an eighth of the time of their imports."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking at what the tests import: accelerate calls it at the end of a training.

    It would take a third of the time of the tests that train. Processes of jobs do the same after their imports.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Do so again after each file, whose tests import what they need of models, engines and kernels themselves."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        pytest_collection_finish()
    return result


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Restore the environment after each test: a job that runs in the test's process hides all GPUs from it."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def small_vocabulary_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 128 words: TRL's, of 32,768, would be most of a small model's peak and hide every error in the rest."""
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 128)
    monkeypatch.setattr("trl.kernels.chunked_divergence.VOCAB_CHUNK_SIZE", 128)


@pytest.fixture(scope="session")
def small_model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 2-layer Llama with weights and a tokenizer that has a chat template."""
    return write_small_model(tmp_path_factory.mktemp("models") / "small-llama", "llama")


@pytest.fixture(scope="session")
def small_dataset_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 long-tailed rows of text as JSON lines."""
    return write_rows(tmp_path_factory.mktemp("data") / "small.jsonl", text_rows(long_tailed_texts(120)))


@pytest.fixture(scope="session")
def job_server() -> Iterator[JobServer]:
    """A server of real jobs on the CPU, one for all tests; it starts on first use."""
    # Named, not imported: what it does before the first job is of use in the server alone.
    with JobServer("cpu", threads=1, jobs_module="tests.virtual.warm") as server:
        yield server


@pytest.fixture
def worker(job_server: JobServer) -> Iterator[Worker]:
    """A process of the server above that runs jobs one after another, as a plan's traces of one engine are."""
    with closing(Worker(job_server)) as started:
        yield started


@pytest.fixture(scope="session")
def tracer(job_server: JobServer) -> Iterator[ServerTracer]:
    """Processes of the server above that trace; one stays for the next traces of its model and engine."""
    with ServerTracer(1, ignore, job_server) as started:
        yield started


@pytest.fixture(scope="session", autouse=True)
def traces_on_one_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let what is traced in the tests' own process share the server above: imports take seconds of each that starts."""

    def shared(tracer: ServerTracer) -> JobServer:
        if tracer._server is None:
            tracer._server = request.getfixturevalue("job_server")
        return tracer._server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerTracer, "server", property(shared))
        yield


@pytest.fixture(scope="session")
def small_workload(
    job_server: JobServer,
    small_model_directory: Path,
    small_dataset_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Workload:
    """The small model and the small dataset, tokenised by a real ``prepare`` job."""
    folder = tmp_path_factory.mktemp("workload")
    request = PrepareRequest(
        model=ModelSource(str(small_model_directory)),
        dataset=DatasetSource(small_dataset_file.name, "json", str(small_dataset_file)),
        trainer="sft",
        tokenized_directory=str(folder / "tokenized"),
    )
    return prepare(job_server, request, folder / "prepare")
