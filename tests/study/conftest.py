"""Fixtures of the study's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.study.running import Run


@pytest.fixture
def run() -> Run:
    """A search of the replayed table in a study of its own, in SQLite's memory."""
    return Run("sqlite://")


@pytest.fixture
def durable(tmp_path: Path) -> Run:
    """A search of the replayed table in a study on disk, that can be resumed."""
    return Run(f"sqlite:///{tmp_path / 'study.db'}")
