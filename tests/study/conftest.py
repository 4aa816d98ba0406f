"""Fixtures of the study's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from optuna.storages import InMemoryStorage

from tests.study.running import Now, Run


@pytest.fixture
def run() -> Run:
    """A search of the replayed table in a study of its own, in SQLite's memory."""
    return Run("sqlite://")


@pytest.fixture
def durable(tmp_path: Path) -> Run:
    """A search of the replayed table in a study on disk, that can be resumed."""
    return Run(f"sqlite:///{tmp_path / 'study.db'}")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    """The clock of a search."""
    made = Now()
    monkeypatch.setattr("autotune.study.durations.time.monotonic", made)
    return made


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> InMemoryStorage:
    """A storage in memory, which every URL names."""
    made = InMemoryStorage()
    monkeypatch.setattr("autotune.study.storage.connected", lambda *_: (made, lambda: None))
    return made
