"""The input of a check (options, configuration, device), and the verdicts built from it."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass

from autotune.app.arguments import CheckArguments
from autotune.app.notes import notes_on_software
from autotune.confidential import hidden_words
from autotune.core.documents.verdict import Finding, Need, Outcome, Severity, Verdict, headline
from autotune.core.machine import Machine
from autotune.errors import AutotuneError
from autotune.inspection.command_line import CONFIG
from autotune.inspection.machine import environment
from autotune.nullgpu.devices import has_null_device
from autotune.trainers import find_trainer
from autotune.trainers.base import Trainer
from autotune.units import plural
from autotune.userconfig.written import WrittenConfig

DRY_RUN_CLAUSE = "runs the training itself for three steps on null GPUs, without a GPU."
"""The rest of a sentence that begins with the command of a dry run."""


@dataclass(frozen=True)
class Task:
    """The input of a check.

    Attributes:
        target: machine to check for; None if none was named and this one has no GPU (then the file is only read).
        absent: why there is no device.
        processes: number of started processes; None: unknown.
    """

    arguments: CheckArguments
    written: WrittenConfig
    target: Machine | None
    budget_bytes: int
    started: float
    absent: str = ""
    processes: int | None = None

    @property
    def trainer(self) -> Trainer:
        """The trainer of the command."""
        return find_trainer(self.written.trainer)

    @property
    def gpus(self) -> int | None:
        """Number of this machine's GPUs, if the check is for them; None otherwise."""
        if self.target is None or self.target.gpu is None or self.arguments.gpu is not None:
            return None
        return self.target.hardware.processes

    def verdict(
        self, outcome: Outcome, findings: tuple[Finding, ...], *, reason: str = "", need: Need | None = None
    ) -> Verdict:
        """Return a verdict with the check's device, budget, versions and time filled in."""
        if outcome is Outcome.UNKNOWN and self._dry_run is not None:
            findings = (*findings, Finding(Severity.NOTE, self._dry_run))
        if self.target is not None and need is not None:
            findings += tuple(Finding(Severity.NOTE, note) for note in notes_on_software(self.target.packages))
        return Verdict(
            outcome,
            headline(outcome, need, self.budget_bytes, reason),
            reason=reason,
            trainer=self.written.trainer,
            device=self.target.device.name if self.target is not None else "",
            budget_bytes=self.budget_bytes,
            need=need,
            findings=findings,
            processes=self.processes,
            environment=environment(self.target) if self.target is not None else {},
            settings=self.arguments.settings,
            passes=self.arguments.passes,
            wall_seconds=time.monotonic() - self.started,
        )

    def unknown(self, error: AutotuneError, findings: tuple[Finding, ...] = ()) -> Verdict:
        """Return the verdict ``unknown`` with the reason and hint of an error."""
        advice = (Finding(Severity.NOTE, error.hint),) if error.hint else ()
        return self.verdict(Outcome.UNKNOWN, (*findings, *advice), reason=error.message)

    @property
    def _dry_run(self) -> str | None:
        """Sentence that suggests a dry run; None without a command, or without a null GPU for the device."""
        words = hidden_words(self.arguments.command)
        if not words and self.written.own_command:
            words = (*self.written.own_command.split(), CONFIG, str(self.arguments.file))
        gpu = self.target.gpu if self.target is not None else None
        if not words or (self.target is not None and (gpu is None or not has_null_device(gpu))):
            return None
        name = gpu.name if gpu is not None else "NAME"
        command = shlex.join(("autotune", "dry-run", "--gpu", name, "--", *words))
        return f"`{command}` {DRY_RUN_CLAUSE}"

    def wrong(self, findings: tuple[Finding, ...]) -> Verdict:
        """Return the verdict that the configuration cannot run, with its findings."""
        count = sum(item.severity is Severity.ERROR for item in findings)
        return self.verdict(Outcome.CANNOT_RUN, findings, reason=plural(count, "thing is wrong", "things are wrong"))
