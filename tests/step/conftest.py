"""Traces of plans for the tests of a file, in processes that stay for the next ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autotune.core.jobs.traced import TraceReply, TraceRequest
from autotune.probing.tracing import ServerTracer


@pytest.fixture(scope="module")
def traced_once(tracer: ServerTracer) -> Callable[[TraceRequest], TraceReply]:
    """A function that traces a request, once."""
    replies: dict[str, TraceReply] = {}

    def run(request: TraceRequest) -> TraceReply:
        if repr(request) not in replies:
            (reply,) = tracer([request])
            assert isinstance(reply, TraceReply), reply
            replies[repr(request)] = reply
        return replies[repr(request)]

    return run
