"""A server of jobs that misbehave."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autotune.probing import JobServer
from tests.probing import misbehaving, without_libraries


@pytest.fixture(scope="session")
def misbehaving_server() -> Iterator[JobServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.probing.channel._SERVER", without_libraries.MODULE)
        server = JobServer("cpu", jobs_module=misbehaving.MODULE)
    with server:
        yield server
