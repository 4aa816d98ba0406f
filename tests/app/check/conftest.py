"""Fixtures that all tests of checks share: a real model, rows of every trainer, and processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.app.arguments import CheckArguments
from autotune.app.check.check import check, check_options, check_written
from autotune.core.documents.verdict import Verdict
from autotune.probing.tracing import ServerTracer
from autotune.trainers import find_trainer
from tests.app.check.beginning import beginning
from tests.small import write_rows, write_small_model
from tests.trainers.samples import sample_rows

Write = Callable[..., Path]
Checked = Callable[..., Verdict]


def cache_of(factory: pytest.TempPathFactory) -> Path:
    """Return the cache of traces that all tests of a session share, whichever worker runs them."""
    folder = factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "check-cache"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("check") / "model", "llama", weights=False)


@pytest.fixture(scope="session")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tensors are most of what a process holds."""
    folder = tmp_path_factory.mktemp("larger") / "model"
    return write_small_model(folder, weights=False, hidden_size=512, intermediate_size=2048, num_hidden_layers=6)


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("rows")

    def written(trainer: str) -> Path:
        file = folder / f"{trainer}.jsonl"
        return file if file.exists() else write_rows(file, sample_rows(trainer, find_trainer(trainer).formats[-1].name))

    return written


@pytest.fixture
def write(model: Path, rows: Callable[[str], Path], tmp_path: Path) -> Write:
    """Write a configuration: the head that all have, and a body."""

    def written(trainer: str, body: str, name: str = "config.yaml") -> Path:
        file = tmp_path / name
        head = beginning(trainer, model, rows(trainer))
        file.write_text(head + body, encoding="utf-8")
        return file

    return written


@pytest.fixture
def checked(tracer: ServerTracer, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Checked:
    """Check with processes that are there already, and the cache of these tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_of(tmp_path_factory)))
    # This machine's own default file for accelerate is no part of any test.
    monkeypatch.delenv("HF_HOME", raising=False)

    def of(config: object = (), **asked: Any) -> Verdict:
        arguments = CheckArguments(asked.pop("command", config), **asked)
        if not (arguments.file or arguments.command):
            return check(arguments)
        check_options(arguments)
        return check_written(arguments, tracer)

    return of


@pytest.fixture
def script(tmp_path: Path) -> str:
    """Return a script of one's own that trains by TRL's parser."""
    file = tmp_path / "train.py"
    file.write_text("from trl import SFTConfig, SFTTrainer, TrlParser\n", encoding="utf-8")
    return str(file)
