"""Fixtures for plans, estimates and checks: a small model, and caches of traces outside the user's home."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.planning.stand_in import AnalyticTracer
from tests.small import write_small_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama of 64 positions, without weights."""
    return str(write_small_model(tmp_path_factory.mktemp("model"), weights=False, max_position_embeddings=64))


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the traces of a file of tests apart from those of others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def traces_by_formula(own_cache: None) -> Iterator[None]:
    """Trace by a formula, for tests of lengths, rules and written files."""
    tracer = AnalyticTracer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.probing.tracing.ServerTracer.__call__", lambda _, requests: tracer(requests))
        yield
