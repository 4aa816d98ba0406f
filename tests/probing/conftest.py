"""A server of jobs that misbehave."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autotune.probing import JobServer
from tests.probing import misbehaving


@pytest.fixture(scope="session")
def misbehaving_server() -> Iterator[JobServer]:
    with JobServer("cpu", jobs_module=misbehaving.MODULE) as server:
        yield server
