"""The protocol between autotune and its child processes: the jobs, their requests and their replies.

Each job has a folder. The parent writes ``request.json`` there and sends the folder's path to the child. The child
writes ``reply.json`` there, atomically, so that a reply is whole or absent. Its stdout and stderr go to ``log.txt``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autotune.core.gpu import GpuSpeeds
from autotune.core.machine import DeviceKind
from autotune.core.measurement import Schedule
from autotune.core.plan import TrainingPlan
from autotune.core.workload import DatasetSource, ModelSource, Rollouts

REQUEST_FILE = "request.json"
REPLY_FILE = "reply.json"
LOG_FILE = "log.txt"
RANK_FOLDER = "rank-{rank}"
"""The folder of a rank in the folder of a probe with several processes, with its own request, reply and log."""


class Job(StrEnum):
    """The jobs of a child process."""

    PREPARE = "prepare"
    CHECK_PACKING = "check_packing"
    PROBE = "probe"
    TRACE = "trace"
    MEASURE_SPEEDS = "measure_speeds"
    MEASURE_OPERATORS = "measure_operators"
    READ_COMMAND = "read_command"
    BUILD = "build"
    SMOKE_TEST = "smoke_test"


@dataclass(frozen=True)
class PrepareRequest:
    """Read the model's configuration and tokenizer, load and tokenise the dataset, once per workload.

    The reply is a :class:`autotune.core.workload.Workload`, with no attention checked yet.

    Attributes:
        tokenized_directory: directory for the tokenised rows.
        rollouts: prompts and completions, for trainers that generate.
        peft: a configuration in PEFT's own JSON, to be checked against the model; empty without one.
        evaluation: the rows to evaluate on, or None.
        evaluation_directory: directory for these rows, tokenised.
        teacher: the teacher model; None for trainers without one.
        only_lengths: whether only lengths are needed: rows are not saved, and smaller image limits are tried.
    """

    model: ModelSource
    dataset: DatasetSource
    trainer: str
    tokenized_directory: str
    evaluation: DatasetSource | None = None
    evaluation_directory: str = ""
    rollouts: Rollouts = field(default_factory=Rollouts)
    peft: Mapping[str, object] = field(default_factory=dict)
    teacher: ModelSource | None = None
    only_lengths: bool = False


@dataclass(frozen=True)
class CheckPackingRequest:
    """Compare packed with separate logits on a shrunken copy of the model, for each attention implementation.

    The reply is a tuple of :class:`autotune.core.workload.PackingCheck`, in the order of the request.

    Attributes:
        trainer: the trainer, which determines the model's class.
        packs: whether rows may be packed; otherwise it is only checked that each attention runs.
    """

    trainer: str
    model: ModelSource
    device: DeviceKind
    attentions: tuple[str, ...]
    packs: bool = True


@dataclass(frozen=True)
class ProbeRequest:
    """Run training steps of one plan. Each rank replies with a :class:`autotune.core.measurement.Measurement`.

    Attributes:
        tokenized_directory: where ``prepare`` saved the tokenised rows.
        limit_bytes: memory that the process may use on its device (context included), or None for no limit.
        seed: seed by which typical batches are drawn.
        evaluation_directory: where ``prepare`` saved the tokenised rows to evaluate on, or None without evaluation.
    """

    plan: TrainingPlan
    model: ModelSource
    device: DeviceKind
    tokenized_directory: str
    schedule: Schedule
    limit_bytes: int | None = None
    seed: int = 42
    evaluation_directory: str | None = None


@dataclass(frozen=True)
class Failure:
    """A reply to any job: an error other than unusable input, such as an unsupported combination.

    Attributes:
        kind: name of the exception's class.
        message: its text.
        traceback: for ``--debug``.
        transient: whether a retry may succeed: the process lacked memory, or a file could not be used.
    """

    kind: str
    message: str
    traceback: str
    transient: bool = False


@dataclass(frozen=True)
class SpeedsRequest:
    """Measure the compute and memory speeds of this CPU with the threads of a training step, or a GPU's launch time.

    The reply is a :class:`autotune.core.gpu.GpuSpeeds`.

    Attributes:
        gpu: the known speeds of the GPU, to which the host's launch time is added; None: measure the CPU.
        seconds: approximate time for which each figure is measured.
    """

    gpu: GpuSpeeds | None = None
    seconds: float = 0.05


@dataclass(frozen=True)
class OperatorsRequest:
    """Run operators of traces on the real device, each a few times, and time them.

    The reply is a dictionary of the seconds of one run of each call that started; None if it cannot be run by itself.

    Attributes:
        calls: operators with their arguments (:attr:`autotune.core.jobs.traced.TracedOperator.call`).
        seconds: time after which no further call starts.
        limit_bytes: memory that the process may use on the device, or None for no limit.
    """

    calls: tuple[str, ...]
    device: DeviceKind
    seconds: float
    limit_bytes: int | None = None


@dataclass(frozen=True)
class ReadCommandRequest:
    """Read a user's command with TRL's own parser. The reply is a :class:`autotune.core.configuration.ReadCommand`.

    Attributes:
        words: the words after ``trl NAME``, with ``--config FILE``.
        given: the keys and values of that file, without those for parsers other than TRL's classes.
        device: the kind of device of the training.
        capability: its compute capability; None if it is not known.
        processes: number of processes, by which TRL's classes divide sizes. With ``trl`` and ``accelerate launch``,
            accelerate determines it.
        launcher: the program that launches the processes.
        launch: its options before the script.
        gpus: number of the machine's GPUs.
        default_file: the file that accelerate reads by default; empty without one.
        own: options among the words that the user's script names, which need not be abbreviations of TRL's.
    """

    trainer: str
    words: tuple[str, ...]
    given: Mapping[str, object]
    device: DeviceKind
    capability: tuple[int, int] | None = None
    processes: int = 1
    launcher: str = ""
    launch: tuple[str, ...] = ()
    gpus: int = 1
    default_file: str = ""
    own: tuple[str, ...] = ()


@dataclass(frozen=True)
class InputProblem:
    """A reply to any job: the user's input cannot be used.

    Attributes:
        message: one sentence that names the input.
        hint: advice for the user.
        unread: whether the training may run, but autotune does not support a part of it (:class:`UnreadError`).
    """

    message: str
    hint: str = ""
    unread: bool = False


@dataclass(frozen=True)
class SmokeTestRequest:
    """Train a tiny model with a user's arguments on the CPU.

    The reply is a dictionary of the arguments that end the training, each with the error.

    Attributes:
        arguments: fields of the trainer's configuration that the user set.
        processes: number of processes of the user's training.
        has_evaluation_rows: whether the trainer has rows to evaluate on even if the arguments do not evaluate.
    """

    trainer: str
    arguments: Mapping[str, object]
    processes: int = 1
    has_evaluation_rows: bool = False
