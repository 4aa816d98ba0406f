"""Fixtures of null GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nullgpu.machine import NullMachine


@pytest.fixture
def machine(tmp_path: Path) -> NullMachine:
    """Null GPUs that no other test uses."""
    return NullMachine(tmp_path / "table")
