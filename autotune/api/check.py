"""``autotune.check``: whether a configuration runs, its silent behaviour, and whether it fits."""

from __future__ import annotations

from autotune.app.arguments import CheckArguments
from autotune.app.check.check import check as checked
from autotune.app.public import taking
from autotune.core.verdict import EXIT_CODES, Outcome, Severity, Verdict, WillNotFit


@taking(CheckArguments)
def check(asked: CheckArguments) -> Verdict:
    """Check a configuration before training: its keys, its silent behaviour, and whether its worst batch fits.

    Returns:
        The verdict: it fits, or the answer is too close to call or unknown.

    Raises:
        WillNotFit: it will not fit, or cannot run at all. The error has the verdict.
        InputError: an argument cannot be used.
        AutotuneError: processes cannot be started.
    """
    found = checked(asked)
    if found.exit_code in (EXIT_CODES[Outcome.DOES_NOT_FIT], EXIT_CODES[Outcome.CANNOT_RUN]):
        raise stopped(found)
    return found


def stopped(found: Verdict) -> WillNotFit:
    """Return the error with the reason why a training should not start, and a remedy."""
    # The headline has the reason already.
    errors = (item.message for item in found.findings if item.severity is Severity.ERROR)
    hints = [hint for error in errors if (hint := error.removeprefix(found.reason).strip())]
    if found.remedy is not None:
        hints.append(f"It would fit with {', '.join(found.remedy.lines)}.")
    return WillNotFit(f"{found.headline}.", found, hint=" ".join(hints))
