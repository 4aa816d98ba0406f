"""Fixtures: a server of misbehaving jobs, and servers that start quickly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autotune.probing import JobServer
from tests.probing import misbehaving
from tests.probing.processes import quick_servers


@pytest.fixture(scope="session")
def misbehaving_server() -> Iterator[JobServer]:
    with quick_servers():
        server = JobServer("cpu", jobs_module=misbehaving.MODULE)
    with server:
        yield server


@pytest.fixture
def quick_start() -> Iterator[None]:
    """Servers that a test starts import no libraries."""
    with quick_servers():
        yield
