"""The verdict of ``autotune check``: whether a configuration runs, its silent behaviour, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autotune.core.estimate import MemoryEstimate
from autotune.core.plan import TrainingPlan
from autotune.core.yaml_text import yaml_line
from autotune.errors import AutotuneError
from autotune.units import counted, format_bytes

SCHEMA = 1


class Outcome(StrEnum):
    """The answer of a check.

    ``FITS``, ``DOES_NOT_FIT``: the need is below or above the budget by more than the figures may be off, or a real
    run showed it. ``TOO_CLOSE``: the budget lies within the error. ``UNKNOWN``: the need is not known, with a reason.
    ``CANNOT_RUN``: the configuration cannot be read, or TRL refuses it. ``READ``: it can be read, and whether it fits
    was not asked.
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
        key: the key that it is about, or empty.
        file: the file that has the key, as the user wrote its name, or empty.
        line: the line of the key in that file, from 1 on; None where there is none.
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
    """The memory that the training needs on its device, at its worst micro-batch.

    Attributes:
        source: source of the figures.
        bytes: the need; of a run that ran out of memory, what it held and then asked for.
        least_bytes, most_bytes: bounds of it, by the stated error; equal to ``bytes`` if it was measured. The upper one
            also has ``varied_bytes``, and on a CPU what a process holds outside tensors.
        rows, tokens: of the largest micro-batch; one row of all tokens where rows are laid end to end.
        phase: the phase of the run that was the largest, or in which memory ran out; empty where it is not known.
        memory: the parts of a traced need; None if it was measured.
        tokens_per_second: dataset tokens per second; None where it is not known.
        varied_bytes: bytes of ``most_bytes`` that the caching allocator may reserve after micro-batches of many
            lengths; without room for it, it frees cached blocks, which takes time. None if it was not traced.
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
        keys: the keys to change, with their new values; None drops the key.
        diff: the change of the file, as a unified diff; empty if there is no file.
        bytes: the traced need afterwards.
        most_bytes: upper bound of it, by the stated error.
        slower: time of a step of the largest micro-batches afterwards, divided by that of now; None where it is not
            known.
    """

    keys: Mapping[str, object]
    diff: str
    bytes: int
    most_bytes: int
    slower: float | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """The changed keys as lines of YAML, and ``no KEY`` for one that is dropped."""
        return tuple(f"no {key}" if value is None else f"{key}: {yaml_line(value)}" for key, value in self.keys.items())


@dataclass(frozen=True)
class Verdict:
    """The result of a check. Encoded by ``core.codec``, this is the document of ``autotune check --json``.

    Attributes:
        outcome: the answer.
        headline: the answer in one line.
        reason: why the need is not known, or why it cannot run; empty otherwise.
        trainer: name of the trainer; empty where it could not be found out.
        model, dataset: as the configuration names them; empty where it names none.
        device: name of the device that it was checked for; empty without one.
        budget_bytes: memory that the training may need; 0 without a device.
        need: None if it is not known.
        findings: errors, silent behaviour and notes, in the order of the file.
        remedy: the smallest change that fits, if the need does not; None if none of up to three techniques was found.
        plan: the training plan that was checked; None if the configuration could not be read.
        documents_per_step: documents of an optimizer step over all processes; None where it is not known.
        processes: training processes that would be started; None where it is not known.
        environment: versions of the software that the verdict holds for.
        settings: the options of the check.
        from_cache: whether an earlier check of the same files and versions gave this answer.
        cacheable: whether it holds until one of these changes; False where rows name the files of their images.
        passes: for ``TOO_CLOSE`` and ``UNKNOWN``: what ``--when-unsure`` turns it into; None: unchanged.
        wall_seconds: time that the check took.
    """

    schema: int
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
    """A configuration was checked, and will not run or not fit.

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
    """The result of rewriting the keys of a file that TRL no longer has.

    Attributes:
        file: the file that was written, or the one that was read if nothing changed.
        diff: the change, as a unified diff; empty if there is none.
        left: changes that only the user can decide.
    """

    file: str
    diff: str
    left: tuple[Finding, ...]


def judged(need: Need, budget_bytes: int) -> Outcome:
    """Return whether a need fits a budget, by more than it may be off."""
    if need.most_bytes <= budget_bytes:
        return Outcome.FITS
    return Outcome.DOES_NOT_FIT if need.least_bytes > budget_bytes else Outcome.TOO_CLOSE


def headline(outcome: Outcome, need: Need | None, budget_bytes: int, reason: str) -> str:
    """Return the verdict in one line, such as ``fits: 61.2 of 79.1 GiB at the worst batch, 4 rows of 4,096 tokens``."""
    if outcome is Outcome.READ:
        reason = "no error was found, and memory was not checked"
    if need is None:
        return f"{outcome.value}: {reason.removesuffix('.')}" if reason else outcome.value
    held, spread = f"{format_bytes(need.bytes)} of {format_bytes(budget_bytes)}", ""
    if outcome is Outcome.TOO_CLOSE:
        spread = f" ({format_bytes(need.least_bytes)} to {format_bytes(need.most_bytes)})"
        if need.most_bytes <= budget_bytes:
            held = f"the host may have too little memory; on the device {held}"
    batch = f"{counted(need.rows, 'row')} of {need.tokens:,} tokens"
    return f"{outcome.value}: {held}{spread} at the worst batch, {batch}, {need.source.value}"


def fatal(found: Iterable[Finding]) -> bool:
    """Return whether something that was found keeps the training from starting."""
    return any(item.severity is Severity.ERROR for item in found)
