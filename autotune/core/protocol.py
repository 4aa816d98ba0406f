"""The protocol between autotune and its isolated processes: the jobs, and their requests and replies as files.

A job has a folder. The parent writes ``request.json`` there and names the folder to the job server. The child writes
``reply.json`` in the same folder, under another name first, then renamed, so that a reply is whole or absent. Standard
output and error of the child go to ``log.txt``. ``version`` is checked by both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autotune.core.batch_geometry import Recompiled
from autotune.core.gpu import Gpu
from autotune.core.images import ChosenRows
from autotune.core.machine import DeviceKind
from autotune.core.measurement import Measurement, Schedule
from autotune.core.plan import AllocatorUse, TrainingPlan
from autotune.core.step_time import StepTime
from autotune.core.timeline import Occurrence, Section
from autotune.core.traced import GpuFigures, Replayed, TracedOperator, TracedPeak
from autotune.core.workload import DatasetProfile, DatasetSource, ModelProfile, ModelSource, PackingCheck, Rollouts

VERSION = 1
REQUEST_FILE = "request.json"
REPLY_FILE = "reply.json"
LOG_FILE = "log.txt"
RANK_FOLDER = "rank-{rank}"
"""The folder of a rank in the folder of a job with several processes: it has request, reply and log of its own."""
COMMANDS_FIFO, EVENTS_FIFO = "commands", "events"
"""Named pipes of a process that runs one job after another: see :mod:`autotune.step.__main__`."""
TRACED_FILE = "traced"
"""A job that traces writes a byte to it after each trace."""


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

    Attributes:
        tokenized_directory: directory for the tokenised rows.
        rollouts: for trainers that generate completions.
        peft: a configuration in PEFT's own JSON, to be checked against the model; empty without one.
        evaluation: the rows that training is evaluated on, or None.
        evaluation_directory: directory for those, tokenised.
        teacher: the model that the trained one imitates; None for trainers without one.
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


@dataclass(frozen=True)
class PrepareReply:
    """Profiles of the model, of the dataset, and of the rows that training is evaluated on.

    Attributes:
        absent: plan entries of the trainer's techniques for which the installed TRL has no field.
        teacher: profile of the teacher, or None without one.
    """

    model: ModelProfile
    dataset: DatasetProfile
    evaluation: DatasetProfile | None = None
    absent: tuple[str, ...] = ()
    teacher: ModelProfile | None = None


@dataclass(frozen=True)
class CheckPackingRequest:
    """Compare packed with separate logits on a shrunken copy of the model, for each attention implementation.

    Attributes:
        trainer: the trainer whose class of model is checked.
    """

    trainer: str
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
class ProbeReply:
    """The measurement of the probe, as far as the child can make it.

    Attributes:
        ranks: the measurement of each process of the training, in the order of their ranks.
    """

    ranks: tuple[Measurement, ...]


@dataclass(frozen=True)
class RankEnding:
    """How the process of one rank ended.

    Attributes:
        code: its exit status, or None.
        signal: the number of the signal that ended it, or None.
        ended_with_group: whether it was killed because another rank had failed.
    """

    code: int | None = None
    signal: int | None = None
    ended_with_group: bool = False


@dataclass(frozen=True)
class RanksReply:
    """The reply of a job with several processes; what each of them replied is in a folder of its own.

    Attributes:
        endings: by rank.
        first_failed: the rank whose failure ended the group; None if there was none.
    """

    endings: tuple[RankEnding, ...]
    first_failed: int | None = None


@dataclass(frozen=True)
class TraceRequest:
    """Run training steps of one plan on the virtual accelerator, with no GPU and no storage.

    The rows are dataset rows as ``prepare`` returns them: the trainer truncates, packs and pads them. Each is given by
    the tokens of its parts, in the trainer's order: ``(100, 50, 80)`` for prompt, chosen and rejected.

    Attributes:
        target: the device that is simulated: ``cuda``, or ``cpu`` for the CPU's allocator and kernels.
        worst: the rows that make the largest micro-batch. Without packing: the longest rows of the dataset,
            as many as a micro-batch has (fewer are repeated). With packing: enough rows to fill one.
        trainable: share of the tokens, the last of each row, that the loss counts if the parts do not determine it.
        layers: number of the model's first layers to trace, or None for all.
        gpu: the device that is planned for; its speeds give the time of a step, its compute capability the kernels. A
            CPU whose speeds were measured is described in the same way. None: no time is predicted.
        allocator: how the caching allocator is used, for the figures of the reply outside of its ``replays``.
        allocators: further ways to use it that the trace is replayed for.
        varied: whether to trace what micro-batches of varied lengths add, with the target ``cuda``.
        others: further GPUs that the reply may stand for, if their kernels are the same.
        operators: whether the reply has the operators of the steps.
        chosen: the rows with images that take the place of ``worst``; None for text.
        compiled_again: see :func:`autotune.trainers.recompiled.compiled_again`.
    """

    plan: TrainingPlan
    model: ModelSource
    target: DeviceKind
    worst: tuple[tuple[int, ...], ...]
    trainable: float = 1.0
    layers: int | None = None
    gpu: Gpu | None = None
    allocator: AllocatorUse = field(default_factory=AllocatorUse)
    varied: bool = False
    allocators: tuple[AllocatorUse, ...] = ()
    others: tuple[Gpu, ...] = ()
    operators: bool = False
    chosen: ChosenRows | None = None
    compiled_again: Recompiled = field(default_factory=Recompiled)

    @property
    def replayed(self) -> tuple[AllocatorUse, ...]:
        """The ways to use the caching allocator that the trace is replayed for; a CPU has none."""
        return tuple(dict.fromkeys((self.allocator, *self.allocators))) if self.target == "cuda" else ()


@dataclass(frozen=True)
class TraceReply:
    """The traced memory of training, and the predicted time of an optimizer step.

    Attributes:
        layers: number of layers that were traced.
        device: peak on the device, from building the model to the end of the second step on the worst micro-batch.
            With the target ``cpu`` everything is on the device. With several processes, all peaks are those of the
            rank that holds the most.
        host: peak of tensors on the host (offloaded activations, batches).
        allocated_bytes: CUDA: peak of what the caching allocator would count as allocated (rounding and library
            workspaces included, context excluded). CPU: the peak of tensor bytes.
        reserved_bytes: CUDA: peak of what it would reserve. CPU: None.
        varied_bytes: bytes that it would reserve beyond that after micro-batches of other lengths; None if that was not
            requested.
        worst_rows, worst_tokens: rows and tokens, padding included, of the largest micro-batch that was run.
        step: time of an optimizer step on that micro-batch; None without a GPU whose speeds are known.
        tokens_per_step: dataset tokens of that optimizer step on all ranks, padding excluded.
        between: the occurrence of a micro-batch that stands for those between the first and the last of a step. Several
            processes exchange gradients in the last one alone.
        assumptions: assumptions where the step depends on the values of real data, with counts.
        seconds: time that the trace took.
        sections: memory over the second step on the worst micro-batch, part by part.
        replays: allocated and reserved bytes for the ways to use the caching allocator that were asked for, without a
            limit; empty with the target ``cpu``, which has none.
        gpus: the figures of all GPUs that the trace stands for; those of the request's own are repeated above.
        operators: the different operators of the sections, if they were requested.
    """

    layers: int
    device: TracedPeak
    host: TracedPeak
    allocated_bytes: int
    reserved_bytes: int | None
    worst_rows: int
    worst_tokens: int
    step: StepTime | None
    tokens_per_step: float
    between: Occurrence = Occurrence.FURTHER
    assumptions: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    sections: tuple[Section, ...] = ()
    varied_bytes: int | None = None
    replays: tuple[Replayed, ...] = ()
    gpus: tuple[GpuFigures, ...] = ()
    operators: tuple[TracedOperator, ...] = ()

    def replayed(self, allocator: AllocatorUse) -> Replayed:
        """Return the figures for one way to use the caching allocator, or the reply's own where there is no choice.

        Raises:
            LookupError: the trace was not replayed for it.
        """
        if not self.replays:
            return Replayed(allocator, self.allocated_bytes, self.reserved_bytes)
        for found in self.replays:
            if found.allocator == allocator:
                return found
        raise LookupError(f"the trace was not replayed for {allocator}")


@dataclass(frozen=True)
class TraceRequests:
    """Run several traces in one process, one after another.

    Attributes:
        requests: requests whose plans make libraries patch the model's classes in the same way, since patches persist.
    """

    requests: tuple[TraceRequest, ...]


@dataclass(frozen=True)
class Failure:
    """A reply to any job, or part of one: an error other than unusable input, such as an unsupported combination.

    Attributes:
        kind: name of the exception's class.
        message: its text.
        traceback: for ``--debug``.
    """

    kind: str
    message: str
    traceback: str


@dataclass(frozen=True)
class TraceReplies:
    """The replies to :class:`TraceRequests`, in the order of the requests, up to the first failure.

    Attributes:
        failure: the failure of the next request, after which no more were run; None if all were traced.
    """

    replies: tuple[TraceReply, ...]
    failure: Failure | None = None


@dataclass(frozen=True)
class SpeedsRequest:
    """Measure how fast this CPU computes and moves bytes, with the threads that a training step has.

    The reply is a :class:`autotune.core.gpu.GpuSpeeds`.

    Attributes:
        seconds: approximate time for which each figure is measured.
    """

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
        processes: how many read the words together, each in its place: TRL's classes share sizes out among them.
    """

    trainer: str
    words: tuple[str, ...]
    given: Mapping[str, object]
    device: DeviceKind
    capability: tuple[int, int] | None = None
    processes: int = 1


@dataclass(frozen=True)
class BuildRequest:
    """Build the trainer of a plan on the virtual device. The reply is a :class:`autotune.core.configuration.Built`.

    Attributes:
        rows, chosen: rows of the dataset, as in :class:`TraceRequest`.
        capability: CUDA's compute capability of the device that is planned for, or None.
    """

    plan: TrainingPlan
    model: ModelSource
    target: DeviceKind
    rows: tuple[tuple[int, ...], ...]
    capability: tuple[int, int] | None = None
    chosen: ChosenRows | None = None


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
