"""The public function ``autotune.check``, which raises an error if a training cannot run or will not fit."""

from __future__ import annotations

from autotune.app.arguments import CheckArguments
from autotune.app.check.check import check as checked
from autotune.app.check.task import DRY_RUN_CLAUSE
from autotune.app.public import signature_from
from autotune.core.documents.verdict import EXIT_CODES, Outcome, Severity, Verdict, WillNotFit

DRY_RUN = f"`autotune dry-run -- COMMAND` {DRY_RUN_CLAUSE}"
"""How to find a need that no trace has."""
_UNSURE = {Outcome.TOO_CLOSE: "Free memory, or train on smaller micro-batches.", Outcome.UNKNOWN: DRY_RUN}
"""Remedies where no change of the configuration is one."""


@signature_from(CheckArguments)
def check(args: CheckArguments) -> Verdict:
    """Check a configuration before training: its keys, its silent behaviour, and whether its worst batch fits.

    Returns:
        The verdict: it fits, is too close to call, or is unknown.

    Raises:
        WillNotFit: it will not fit, or cannot run at all. The error has the verdict.
        InputError: an argument cannot be used.
        AutotuneError: processes cannot be started.
    """
    verdict = checked(args)
    if verdict.exit_code in (EXIT_CODES[Outcome.DOES_NOT_FIT], EXIT_CODES[Outcome.CANNOT_RUN]):
        raise will_not_fit(verdict)
    return verdict


def will_not_fit(verdict: Verdict) -> WillNotFit:
    """Return the error for a verdict, with the reason and a remedy."""
    # The headline has the reason already.
    errors = (item.message for item in verdict.findings if item.severity is Severity.ERROR)
    hints = [error for error in errors if error != verdict.reason]
    if verdict.remedy is not None:
        hints.append(f"It would fit with {', '.join(verdict.remedy.lines)}.")
    elif verdict.outcome in _UNSURE:
        hints.append(_UNSURE[verdict.outcome])
    return WillNotFit(f"{verdict.headline}.", verdict, hint=" ".join(hints))
