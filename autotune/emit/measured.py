"""What ``autotune probe`` hands over, and what it measured of that, in sentences."""

from __future__ import annotations

from autotune.core.bundle import Basis
from autotune.core.result import Choosable, Result
from autotune.core.speeds import Speeds, compared
from autotune.core.status import RunStatus
from autotune.emit.handover import Handover
from autotune.emit.software import said_software
from autotune.units import format_bytes, format_rate


def measured(result: Result, chosen: Choosable) -> Handover:
    """Return what a result recommends."""
    figures = (
        _what(result),
        _where(result),
        _measured(chosen),
        _beside(result, chosen),
        f"It is {result.compared}." if result.compared and compared(result, chosen) is not Speeds.OWN else "",
        _confirmed(result),
        "These figures hold for this model, dataset, device and software; for any other, run autotune again.",
        result.base.said_withheld if result.base is not None else "",
    )
    return Handover(
        plan=chosen.plan,
        workload=result.workload,
        hardware=result.hardware,
        basis=Basis.MEASURED,
        figures=tuple(sentence for sentence in figures if sentence),
        threads=result.hardware.threads,
        base=result.base,
    )


def _what(result: Result) -> str:
    workload = result.workload
    return (
        f"Recommended by autotune for {workload.model.name} on {workload.dataset.name}, global batch "
        f"{result.global_batch_size}, budget {format_bytes(result.budget_bytes)}."
    )


def _where(result: Result) -> str:
    hardware = result.hardware
    processes = "1 process" if hardware.processes == 1 else f"{hardware.processes} processes"
    software = said_software(result.environment)
    device = f"{hardware.name} ({format_bytes(hardware.memory_bytes)})"
    known = ", ".join(part for part in (device, processes, hardware.openmp, software and f"with {software}") if part)
    return f"Measured on {known}."


def _measured(chosen: Choosable) -> str:
    parts = []
    if chosen.peak_bytes is not None:
        parts.append(f"peak memory {format_bytes(chosen.peak_bytes)} on the worst batch")
    if chosen.tokens_per_second is not None:
        parts.append(f"{format_rate(chosen.tokens_per_second)} on typical ones{_expected(chosen)}")
    return f"It showed {' and '.join(parts)}." if parts else ""


def _expected(chosen: Choosable) -> str:
    low, high = chosen.tokens_per_second_low, chosen.tokens_per_second_high
    if low is None or high is None:
        return " in one run"
    return f" in {chosen.runs} runs, of which a further one is expected between {low:,.0f} and {high:,.0f}"


def _beside(result: Result, chosen: Choosable) -> str:
    baseline, speeds, name = result.baseline, compared(result, chosen), _name(result)
    if speeds is Speeds.OWN:
        if result.status is RunStatus.INTERRUPTED:
            return f"Nothing faster than {name} was found."
        return f"{name} is {result.compared or 'already the fastest candidate that fits'}."
    if result.speedup is not None and baseline is not None and baseline.tokens_per_second is not None:
        return f"{name} did {format_rate(baseline.tokens_per_second)}: {_said_speed(result, result.speedup, speeds)}."
    if baseline is not None and baseline.reason:
        return f"{name} did not run: {baseline.reason.rstrip('.')}."
    return ""


def _said_speed(result: Result, speedup: float, speeds: Speeds) -> str:
    """Return how much slower or faster the baseline is, as far as the two can be told apart."""
    low, high = result.speedup_low, result.speedup_high
    if speeds is Speeds.EQUAL:
        return "as fast as this"
    if speeds is Speeds.SLOWER:
        speedup, low, high = 1 / speedup, 1 / high if high else None, 1 / low if low else None
    factor = f"{speedup:.2f}" + (f" ({low:.2f} to {high:.2f})" if low is not None and high is not None else "")
    if speeds is Speeds.NOT_TOLD_APART:
        return f"that speed cannot be told apart from this one's, which is {factor} times as high"
    return f"{factor} times {'faster' if speeds is Speeds.SLOWER else 'slower'}"


def _name(result: Result) -> str:
    return result.base.file if result.base is not None else "TRL's default"


def _confirmed(result: Result) -> str:
    if result.status is RunStatus.INTERRUPTED:
        longer = "a longer run confirmed it" if result.confirmed else "no longer run has confirmed it"
        return f"The search was interrupted: this was the best so far, and {longer}."
    return "A longer run confirmed it." if result.confirmed else "No longer run has confirmed it."
