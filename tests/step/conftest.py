"""Traces of plans for the tests of a file, in processes that stay for the next ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from autotune.core.events import ignore
from autotune.core.jobs.traced import TraceReply, TraceRequest
from autotune.probing import JobServer
from autotune.probing.tracing import ServerTracer


@pytest.fixture(scope="module")
def traced_once(job_server: JobServer) -> Iterator[Callable[[TraceRequest], TraceReply]]:
    """A function that traces a request, once."""
    replies: dict[str, TraceReply] = {}
    with ServerTracer(1, ignore, job_server) as tracer:

        def run(request: TraceRequest) -> TraceReply:
            if repr(request) not in replies:
                (reply,) = tracer([request])
                assert isinstance(reply, TraceReply), reply
                replies[repr(request)] = reply
            return replies[repr(request)]

        yield run
