"""Reads and writes the request and reply files of a job, atomically; parent and child use it.

``request.json`` is ``{"job", "sent_seconds", "body"}``; ``reply.json`` is ``{"kind", "body"}``, where ``kind`` is
``reply``, ``input_problem`` or ``failure``.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from autotune.core.files.atomic import written_atomically
from autotune.core.files.codec import decode, encode
from autotune.core.jobs.protocol import REPLY_FILE, REQUEST_FILE, Failure, InputProblem

R = TypeVar("R")

_REPLY_BYTES = 65_536
"""Bytes that a reply may need: more than that of a probe (1 to 8 kB)."""


class ExchangeError(ValueError):
    """A request or reply is absent, is not JSON, or has the wrong structure; the message names the file."""


def write_document(file: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON document atomically.

    Raises:
        OSError: the disk is full, or the directory cannot be written.
    """
    with written_atomically(file) as part:
        part.write_text(json.dumps(document), encoding="utf-8")


def write_request(folder: Path, job: str, request: object) -> float:
    """Write a request into a job's folder, remove an earlier reply, and return the time of :func:`time.monotonic`.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REPLY_FILE).unlink(missing_ok=True)
    sent_seconds = time.monotonic()
    write_document(folder / REQUEST_FILE, {"job": job, "sent_seconds": sent_seconds, "body": encode(request)})
    return sent_seconds


def read_request(folder: Path) -> Mapping[str, Any]:
    """Return the document of a request in a job's folder.

    ``sent_seconds`` is of :func:`time.monotonic`, which all processes of a Linux machine share.

    Raises:
        ExchangeError: it is absent or cannot be read.
    """
    return _read(folder / REQUEST_FILE)


def write_reply(folder: Path, reply: object) -> None:
    """Write a reply of any kind into a job's folder.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    kinds: dict[type, str] = {InputProblem: "input_problem", Failure: "failure"}
    kind = kinds.get(type(reply), "reply")
    write_document(folder / REPLY_FILE, {"kind": kind, "body": encode(reply)})


def check_reply_fits(folder: Path) -> None:
    """Check that a job could write its reply: the folder exists, and the disk has room.

    Raises:
        FileNotFoundError: the folder is gone.
        OSError: the disk is full, or the folder cannot be written.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_REPLY_BYTES))


def read_reply(folder: Path, expected: type[R]) -> R | InputProblem | Failure:
    """Return the reply in a job's folder, decoded as ``expected`` unless it reports a problem.

    Raises:
        ExchangeError: it is absent or cannot be read.
    """
    document = _read(folder / REPLY_FILE)
    kinds: dict[str, type[Any]] = {"reply": expected, "input_problem": InputProblem, "failure": Failure}
    if document.get("kind") not in kinds:
        raise ExchangeError(f"{REPLY_FILE} is of unknown kind {document.get('kind')!r}")
    try:
        decoded: R | InputProblem | Failure = decode(kinds[document["kind"]], document.get("body"))
    except (ValueError, TypeError) as error:
        raise ExchangeError(f"{REPLY_FILE} has the wrong structure: {error}") from error
    return decoded


def _read(file: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExchangeError(f"{file.name} is absent") from error
    except ValueError as error:
        raise ExchangeError(f"{file.name} is not JSON") from error
    if not isinstance(document, dict):
        raise ExchangeError(f"{file.name} has the wrong structure")
    return document
