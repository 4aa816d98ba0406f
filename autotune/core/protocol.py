"""The protocol between autotune and its isolated processes: the jobs, and their requests and replies as files.

A job has a folder. The parent writes ``request.json`` there and names the folder to the child. The child writes
``reply.json`` in the same folder, under another name first, then renamed, so that a reply is whole or absent. Standard
output and error of the child go to ``log.txt``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autotune.core.gpu import GpuSpeeds
from autotune.core.machine import DeviceKind
from autotune.core.measurement import Schedule
from autotune.core.plan import TrainingPlan
from autotune.core.workload import DatasetSource, ModelSource, PackingCheck, Rollouts

REQUEST_FILE = "request.json"
REPLY_FILE = "reply.json"
LOG_FILE = "log.txt"
RANK_FOLDER = "rank-{rank}"
"""The folder of a rank in the folder of a probe with several processes: each has request, reply and log of its own."""


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


@dataclass(frozen=True)
class PrepareRequest:
    """Read the model's configuration and tokenizer, load and tokenise the dataset, once per workload.

    The reply is a :class:`autotune.core.workload.Workload`, with no attention checked yet.

    Attributes:
        tokenized_directory: directory for the tokenised rows.
        rollouts: for trainers that generate completions.
        peft: a configuration in PEFT's own JSON, to be checked against the model; empty without one.
        evaluation: the rows that training is evaluated on, or None.
        evaluation_directory: directory for those, tokenised.
        teacher: the model that the trained one imitates; None for trainers without one.
        only_lengths: whether rows are not saved, and the processor is asked about smaller limits of its images.
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

    Attributes:
        trainer: the trainer whose class of model is checked.
        packs: whether rows may be packed; otherwise each attention only has to run.
    """

    trainer: str
    model: ModelSource
    device: DeviceKind
    attentions: tuple[str, ...]
    packs: bool = True


@dataclass(frozen=True)
class CheckPackingReply:
    """One check per attention implementation, in the order of the request."""

    checks: tuple[PackingCheck, ...]


@dataclass(frozen=True)
class ProbeRequest:
    """Run training steps of one plan. Each rank replies with a :class:`autotune.core.measurement.Measurement`.

    Attributes:
        tokenized_directory: where ``prepare`` saved the tokenised rows.
        limit_bytes: memory that the process may use on its device (context included), or None for no limit.
        seed: seed of the order in which typical batches are drawn.
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
        transient: whether another try may succeed: the process lacked memory, or a file could not be used.
        raised_at: of an error in a training, the line of TRL, or of a library below it that reads its arguments, and
            that of the caller; else empty.
    """

    kind: str
    message: str
    traceback: str
    transient: bool = False
    raised_at: str = ""


@dataclass(frozen=True)
class SpeedsRequest:
    """Measure how fast this CPU computes and moves bytes, with the threads that a training step has, or how fast the
    host has a GPU run operators.

    The reply is a :class:`autotune.core.gpu.GpuSpeeds`.

    Attributes:
        gpu: the speeds of the GPU that this process uses, to which the host's is added; None: those of the CPU.
        seconds: approximate time for which each figure is measured.
    """

    gpu: GpuSpeeds | None = None
    seconds: float = 0.05


@dataclass(frozen=True)
class OperatorsRequest:
    """Run operators of traces on the real device, each a few times, and time them.

    Attributes:
        calls: as :class:`autotune.core.traced.TracedOperator` has them.
        seconds: time after which no further call is begun.
        limit_bytes: memory that the process may use on the device, or None for no limit.
    """

    calls: tuple[str, ...]
    device: DeviceKind
    seconds: float
    limit_bytes: int | None = None


@dataclass(frozen=True)
class OperatorsReply:
    """The seconds of one run of each call, None where it cannot be run by itself; without those of which none began."""

    seconds: Mapping[str, float | None]


@dataclass(frozen=True)
class ReadCommandRequest:
    """Read a user's command with TRL's own parser. The reply is a :class:`autotune.core.configuration.ReadCommand`.

    Attributes:
        words: the words after ``trl NAME``, with ``--config FILE``.
        given: the keys and values of that file, without those that a parser outside of the classes takes.
        device: the kind of device that the training is for.
        capability: CUDA's compute capability of that device; None where it is not known.
        processes: how many read the words together, each in its place: TRL's classes share sizes out among them. With
            ``trl`` and ``accelerate launch``, accelerate determines the number.
        launcher: the program that starts the processes.
        launch: its options before the script.
        gpus: number of the machine's GPUs.
        default_file: the file that accelerate reads where none is named; empty if there is none.
        own: options among the words that the user's script names, so that they may be no abbreviations of TRL's.
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
        unread: whether the training may well run, and asks for something that autotune does not read.
    """

    message: str
    hint: str = ""
    unread: bool = False
