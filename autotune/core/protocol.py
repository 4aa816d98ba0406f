"""The protocol between autotune and the isolated processes that it starts: jobs, requests and replies, by files.

A job has a folder. The parent writes ``request.json`` there and names the folder to the job server. The child writes
``reply.json`` beside it, under another name first, then renamed, so that a reply is whole or absent. Standard output
and error of the child go to ``log.txt``. ``version`` is checked by both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from autotune.core.machine import DeviceKind
from autotune.core.measurement import Measurement, Schedule
from autotune.core.plan import TrainingPlan
from autotune.core.workload import DatasetProfile, DatasetSource, ModelProfile, ModelSource, PackingCheck

VERSION = 1
REQUEST_FILE = "request.json"
REPLY_FILE = "reply.json"
LOG_FILE = "log.txt"


class Job(StrEnum):
    """What a child process can be asked to do."""

    PREPARE = "prepare"
    CHECK_PACKING = "check_packing"
    PROBE = "probe"


@dataclass(frozen=True)
class PrepareRequest:
    """Read the model's configuration and tokenizer, load and tokenise the dataset, once per workload.

    Attributes:
        tokenized_directory: where to save the tokenised rows.
    """

    model: ModelSource
    dataset: DatasetSource
    trainer: str
    tokenized_directory: str


@dataclass(frozen=True)
class PrepareReply:
    """Profiles of the model and of the dataset."""

    model: ModelProfile
    dataset: DatasetProfile


@dataclass(frozen=True)
class CheckPackingRequest:
    """Compare packed with separate logits on a shrunken copy of the model, for each attention implementation."""

    model: ModelSource
    device: DeviceKind
    attentions: tuple[str, ...]


@dataclass(frozen=True)
class CheckPackingReply:
    """One check per attention implementation, in the order of the request."""

    checks: tuple[PackingCheck, ...]


@dataclass(frozen=True)
class ProbeRequest:
    """Run training steps of one plan.

    Attributes:
        tokenized_directory: where ``prepare`` saved the tokenised rows.
        limit_bytes: memory that the process may use on its device (context included), or None for all there is.
        seed: of the order in which typical batches are drawn.
    """

    plan: TrainingPlan
    model: ModelSource
    device: DeviceKind
    tokenized_directory: str
    schedule: Schedule
    limit_bytes: int | None = None
    seed: int = 42


@dataclass(frozen=True)
class ProbeReply:
    """What the probe showed, as far as the child itself can tell."""

    measurement: Measurement


@dataclass(frozen=True)
class InputProblem:
    """A reply to any job: the user's input cannot be used.

    Attributes:
        message: one sentence that names the thing.
        hint: what to do about it.
    """

    message: str
    hint: str = ""


@dataclass(frozen=True)
class Failure:
    """A reply to any job: the child met an error that is nobody's input, such as an unsupported combination.

    Attributes:
        kind: name of the exception's class.
        message: its text.
        traceback: for ``--debug``.
    """

    kind: str
    message: str
    traceback: str
