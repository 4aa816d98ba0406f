"""The protocol between autotune and the isolated processes that it starts: jobs, requests and replies, by files.

A job has a folder. The parent writes ``request.json`` there and names the folder to the job server. The child writes
``reply.json`` beside it, under another name first, then renamed, so that a reply is whole or absent. Standard output
and error of the child go to ``log.txt``. ``version`` is checked by both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autotune.core.gpu import Gpu, GpuSpeeds
from autotune.core.machine import DeviceKind
from autotune.core.measurement import Measurement, Schedule
from autotune.core.plan import TrainingPlan
from autotune.core.step_time import Factors, StepTime
from autotune.core.timeline import Section
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
    TRACE = "trace"
    MEASURE_SPEEDS = "measure_speeds"


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
    """What the probe showed, as far as the child itself can tell.

    Attributes:
        ranks: what each process of the training showed, in the order of their ranks.
    """

    ranks: tuple[Measurement, ...]


@dataclass(frozen=True)
class TraceRequest:
    """Run training steps of one plan on the virtual accelerator, with no GPU and no storage.

    The rows are dataset rows as ``prepare`` would give them: the trainer truncates, packs and pads them by itself. Each
    is the tokens of its parts, as the trainer names them: ``(512,)``, or ``(100, 50, 80)`` for prompt, chosen and
    rejected.

    Attributes:
        target: what is stood in for: ``cuda``, or ``cpu`` for the CPU's allocator and kernels.
        worst: the rows that make the largest micro-batch. Without packing: the longest rows of the dataset,
            as many as a micro-batch has (fewer are repeated). With packing: rows enough to fill one.
        typical: rows drawn as the trainer draws them, for the time of a step: those of one micro-batch,
            which stands for all of a step (fewer are repeated). Empty: a typical step is one on ``worst``.
        trainable: share of the tokens, the last of each row, that the loss counts where the parts do not say it.
        layers: how many of the model's layers to trace, or None for all. Layers of alternating kinds keep their order:
            the first so many are traced.
        gpu: what is planned for; its speeds give the time of a step, its compute capability the kernels. A CPU whose
            speeds were measured is told in the same way. None: no time.
        factors: how much longer than the roofline things take on that GPU.
        limit_bytes: what the caching allocator may reserve, or None; a request beyond it makes it give back its cache
            first, as a real one does.
        expandable_segments: PyTorch's setting of the caching allocator.
        varied: whether to say what micro-batches of other lengths add, with the target ``cuda``.
    """

    plan: TrainingPlan
    model: ModelSource
    target: DeviceKind
    worst: tuple[tuple[int, ...], ...]
    typical: tuple[tuple[int, ...], ...] = ()
    trainable: float = 1.0
    layers: int | None = None
    gpu: Gpu | None = None
    factors: Factors = field(default_factory=Factors)
    limit_bytes: int | None = None
    expandable_segments: bool = False
    varied: bool = False


@dataclass(frozen=True)
class TracedPeak:
    """The most bytes that tensors held at once, without any allocator's rounding.

    Attributes:
        bytes: sum of the parts.
        categories: the parts, in PyTorch's words: ``parameter``, ``buffer``, ``gradient``, ``optimizer state``,
            ``activation``, ``temporary``, ``other``. What is zero is left out.
    """

    bytes: int
    categories: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TraceReply:
    """What training would do to memory, and how long an optimizer step would take.

    Attributes:
        layers: how many layers were traced.
        device: peak on the device, from building the model to the end of the second step on the worst micro-batch.
            With the target ``cpu`` everything lies on the device.
        host: peak of what lies on the host beside it (offloaded activations, batches).
        allocated_bytes: CUDA: peak of what the caching allocator would count as allocated (rounding and library
            workspaces included, context excluded). CPU: the peak of tensor bytes.
        reserved_bytes: CUDA: peak of what it would reserve. CPU: None.
        varied_bytes: what it would reserve beyond that, had micro-batches of other lengths come before; None where that
            was not asked for.
        fits_limit: whether the caching allocator stayed within the limit; True without one. Where it did not, the
            peaks are those of an allocator without a limit.
        worst_rows, worst_tokens: rows and tokens, padding included, of the largest micro-batch that was run.
        step: time of a typical optimizer step; None without a GPU whose speeds are known.
        tokens_per_step: dataset tokens of that optimizer step, padding excluded.
        assumptions: what was assumed where the step looked at values that only real data has, with how often.
        seconds: what the trace took.
        sections: the course of memory through the second step on the worst micro-batch, part by part.
    """

    layers: int
    device: TracedPeak
    host: TracedPeak
    allocated_bytes: int
    reserved_bytes: int | None
    fits_limit: bool
    worst_rows: int
    worst_tokens: int
    step: StepTime | None
    tokens_per_step: float
    assumptions: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    sections: tuple[Section, ...] = ()
    varied_bytes: int | None = None


@dataclass(frozen=True)
class TraceRequests:
    """Run several traces in one process, one after another.

    Attributes:
        requests: of plans for which libraries change a model's classes in the same way, since what is changed stays so.
    """

    requests: tuple[TraceRequest, ...]


@dataclass(frozen=True)
class Failure:
    """A reply to any job, or part of one: an error that is nobody's input, such as an unsupported combination.

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
    """What they showed, in the order of the requests.

    Attributes:
        failure: of the next one, after which no more were run; None where there was none.
    """

    replies: tuple[TraceReply, ...]
    failure: Failure | None = None


@dataclass(frozen=True)
class SpeedsRequest:
    """Measure how fast this CPU computes and moves bytes, with the threads that a training step has.

    Attributes:
        seconds: about how long each figure is measured.
    """

    seconds: float = 0.05


@dataclass(frozen=True)
class SpeedsReply:
    """What was measured, in the terms in which a GPU's speeds are told."""

    speeds: GpuSpeeds


@dataclass(frozen=True)
class InputProblem:
    """A reply to any job: the user's input cannot be used.

    Attributes:
        message: one sentence that names the thing.
        hint: what to do about it.
    """

    message: str
    hint: str = ""
