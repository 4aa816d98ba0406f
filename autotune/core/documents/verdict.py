"""The document of ``autotune check``: whether a configuration runs and fits, and its silent behaviour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autotune.core.documents.estimate import MemoryEstimate
from autotune.core.documents.short_repr import ShortRepr
from autotune.core.files.yaml_text import yaml_line
from autotune.core.plan import TrainingPlan
from autotune.core.program import OUTSIDE_MICRO_BATCHES
from autotune.errors import AutotuneError
from autotune.units import format_bytes, plural


class Outcome(StrEnum):
    """The answer of a check.

    ``FITS``, ``DOES_NOT_FIT``: the need is below or above the budget by more than its error, or a real run showed it.
    ``TOO_CLOSE``: the budget lies within the error. ``UNKNOWN``: the need is not known, with a reason. ``CANNOT_RUN``:
    the configuration cannot be read, or TRL refuses it. ``READ``: it can be read, and memory was not checked.
    """

    FITS = "fits"
    DOES_NOT_FIT = "does not fit"
    TOO_CLOSE = "too close to call"
    UNKNOWN = "unknown"
    CANNOT_RUN = "cannot run"
    READ = "reads"


EXIT_CODES: Mapping[Outcome, int] = {
    Outcome.FITS: 0,
    Outcome.READ: 0,
    Outcome.DOES_NOT_FIT: 1,
    Outcome.CANNOT_RUN: 2,
    Outcome.TOO_CLOSE: 3,
    Outcome.UNKNOWN: 3,
}
"""The exit code of ``autotune check`` for each outcome."""


class Severity(StrEnum):
    """The severity of a finding.

    ``ERROR``: the training cannot start. ``SILENT``: it starts, but differs from the configuration. ``NOTE``:
    worth knowing.
    """

    ERROR = "error"
    SILENT = "silent"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """A finding about the configuration.

    Attributes:
        message: a sentence.
        key: the key, or empty.
        file: the file with the key, as the user wrote its name, or empty.
        line: the line of the key in that file, from 1; None without one.
    """

    severity: Severity
    message: str
    key: str = ""
    file: str = ""
    line: int | None = None


class Source(StrEnum):
    """The source of the figures: ``TRACED`` without a device, ``PROBED`` now, or ``STUDIED`` by an earlier study."""

    TRACED = "traced"
    PROBED = "probed"
    STUDIED = "measured by a study"


@dataclass(frozen=True)
class Need:
    """The memory that the training needs on its device.

    Attributes:
        source: source of the figures.
        bytes: the need; after an out-of-memory error, the memory in use plus the failed request.
        least_bytes, most_bytes: bounds of the need, by the stated error; equal to ``bytes`` if it was measured. The
            upper bound includes ``varied_bytes``, and on a CPU the process's memory outside tensors.
        rows, tokens: size of the largest micro-batch; one row of all tokens if rows are laid end to end.
        phase: the phase with the peak, or in which memory ran out; empty if it is not known.
        memory: the estimate of a traced need; None if it was measured.
        tokens_per_second: dataset tokens per second; None if it is not known.
        varied_bytes: bytes of ``most_bytes`` that the caching allocator may reserve after micro-batches of many
            lengths; without room for them, it frees cached blocks, which takes time. None if it was not traced.
    """

    source: Source
    bytes: int
    least_bytes: int
    most_bytes: int
    rows: int
    tokens: int
    phase: str = ""
    memory: MemoryEstimate | None = None
    tokens_per_second: float | None = None
    varied_bytes: int | None = None


@dataclass(frozen=True)
class Remedy:
    """The smallest change of the configuration that makes it fit.

    Attributes:
        keys: the keys to change, with their new values; None removes the key.
        diff: the change of the file, as a unified diff; empty without a file.
        bytes: the traced need after the change.
        most_bytes: its upper bound, by the stated error.
        slower: time of a step of the largest micro-batches after the change, divided by the time before; None if it is
            not known.
    """

    keys: Mapping[str, object]
    diff: str
    bytes: int
    most_bytes: int
    slower: float | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """The changed keys as lines of YAML; ``no KEY`` for a removed key."""
        return tuple(f"no {key}" if value is None else f"{key}: {yaml_line(value)}" for key, value in self.keys.items())


@dataclass(frozen=True, repr=False)
class Verdict(ShortRepr):
    """The result of a check. Encoded by ``core.codec``, this is the document of ``autotune check --json``.

    Attributes:
        outcome: the answer.
        headline: the answer in one line.
        reason: why the need is not known, or why the training cannot run; else empty.
        trainer: name of the trainer; empty if it is not known.
        model, dataset: as named in the configuration; empty without them.
        device: name of the device; empty without one.
        budget_bytes: memory that the training may need; 0 without a device.
        need: the need; None if it is not known.
        findings: errors, silent behaviour and notes, in the order of the file.
        remedy: the smallest change that makes the training fit, if it does not; None if no change of up to three
            techniques was found.
        plan: the training plan; None if the configuration could not be read.
        documents_per_step: documents of an optimizer step over all processes; None if not known.
        processes: number of training processes; None if not known.
        environment: versions of the software, by package.
        settings: the options of the check.
        from_cache: whether this is the verdict of an earlier check of the same files and versions.
        cacheable: whether it holds until one of these changes; False if rows have paths of image files.
        passes: for ``TOO_CLOSE`` and ``UNKNOWN``: whether ``--when-unsure`` passes or fails; None: neither.
        wall_seconds: duration of the check.
    """

    schema: int = field(default=1, kw_only=True)
    outcome: Outcome
    headline: str
    reason: str = ""
    trainer: str = ""
    model: str = ""
    dataset: str = ""
    device: str = ""
    budget_bytes: int = 0
    need: Need | None = None
    findings: tuple[Finding, ...] = ()
    remedy: Remedy | None = None
    plan: TrainingPlan | None = None
    documents_per_step: float | None = None
    processes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    from_cache: bool = False
    cacheable: bool = True
    passes: bool | None = None
    wall_seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self.passes is not None and self.outcome in (Outcome.TOO_CLOSE, Outcome.UNKNOWN):
            return EXIT_CODES[Outcome.FITS if self.passes else Outcome.DOES_NOT_FIT]
        return EXIT_CODES[self.outcome]


class WillNotFit(AutotuneError):  # noqa: N818 (what a caller catches reads as what it means)
    """A checked configuration will not run or will not fit.

    Attributes:
        verdict: the :class:`autotune.Verdict`.
    """

    exit_code = 1

    def __init__(self, message: str, verdict: Verdict, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.verdict = verdict


@dataclass(frozen=True)
class Verdicts:
    """The verdicts on several configurations, in the order in which they were named."""

    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Fixed:
    """The result of replacing a file's removed keys.

    Attributes:
        file: the written file, or the file that was read if nothing changed.
        diff: the change, as a unified diff; empty without one.
        left: findings that the user has to resolve by hand; notes are about deprecated keys, which still work.
    """

    file: str
    diff: str
    left: tuple[Finding, ...]

    @property
    def is_done(self) -> bool:
        """Whether no removed key is left."""
        return all(item.severity is Severity.NOTE for item in self.left)


def outcome_for(need: Need, budget_bytes: int) -> Outcome:
    """Return the outcome for a need and a budget, by the bounds of the need."""
    if need.most_bytes <= budget_bytes:
        return Outcome.FITS
    return Outcome.DOES_NOT_FIT if need.least_bytes > budget_bytes else Outcome.TOO_CLOSE


def headline(outcome: Outcome, need: Need | None, budget_bytes: int, reason: str) -> str:
    """Return the verdict in one line, such as ``fits: 61.2 of 79.1 GiB at the worst batch, 4 rows of 4,096 tokens``.

    A phase that does not depend on the batch takes its place.
    """
    if outcome is Outcome.READ:
        reason = "no error was found, and memory was not checked"
    if need is None:
        return f"{outcome.value}: {reason.removesuffix('.')}" if reason else outcome.value
    size, bounds = f"{format_bytes(need.bytes)} of {format_bytes(budget_bytes)}", ""
    if outcome is Outcome.TOO_CLOSE:
        bounds = f" ({format_bytes(need.least_bytes)} to {format_bytes(need.most_bytes)})"
        if need.most_bytes <= budget_bytes:
            size = f"the host may have too little memory; on the device {size}"
    place = f"at the worst batch, {plural(need.rows, 'row')} of {need.tokens:,} tokens"
    place = f"in {need.phase}" if need.phase in OUTSIDE_MICRO_BATCHES else place
    return f"{outcome.value}: {size}{bounds} {place}, {need.source.value}"


def has_error(findings: Iterable[Finding]) -> bool:
    """Return whether a finding is an error, so that the training cannot start."""
    return any(item.severity is Severity.ERROR for item in findings)
