"""Requests and replies arrive whole, or not at all."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from autotune.core.files.codec import decode
from autotune.core.jobs.exchange import (
    ExchangeError,
    read_reply,
    read_request,
    write_document,
    write_reply,
    write_request,
)
from autotune.core.jobs.protocol import Failure, InputProblem, Job, ProbeRequest
from autotune.core.measurement import Measurement, OutOfMemory
from autotune.core.program import FORWARD
from autotune.core.status import ProbeStatus
from tests.probing.misbehaving import request


def test_a_request_arrives_as_it_was_sent(tmp_path: Path) -> None:
    before = time.monotonic()
    sent_seconds = write_request(tmp_path / "new" / "folder", Job.PROBE, request("behave", limit_bytes=7))
    found = read_request(tmp_path / "new" / "folder")
    assert found["job"] == Job.PROBE
    assert before <= found["sent_seconds"] == sent_seconds <= time.monotonic()
    assert decode(ProbeRequest, found["body"]) == request("behave", limit_bytes=7)


@pytest.mark.parametrize(
    "reply",
    [
        Measurement(ProbeStatus.OUT_OF_MEMORY, "x", out_of_memory=OutOfMemory(FORWARD, 1, None, 2)),
        InputProblem("the file is empty", "fill it"),
        Failure("KeyError", "'x'", "Traceback …"),
    ],
)
def test_a_reply_of_each_kind_arrives_as_it_was_sent(tmp_path: Path, reply: object) -> None:
    write_reply(tmp_path, reply)
    assert read_reply(tmp_path, Measurement) == reply


def test_a_document_that_cannot_be_written_leaves_the_old_one_and_nothing_beside_it(tmp_path: Path) -> None:
    write_document(tmp_path / "a.json", {"old": 1})
    with pytest.raises(TypeError):
        write_document(tmp_path / "a.json", {"new": object()})
    assert (tmp_path / "a.json").read_text() == '{"old": 1}'
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_request_that_is_no_document_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ExchangeError, match=r"request\.json has the wrong structure"):
        read_request(tmp_path)
