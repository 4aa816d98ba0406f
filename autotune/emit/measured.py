"""The sentences of a measured bundle: the recommendation and its measurements."""

from __future__ import annotations

from autotune.core.bundle import Basis
from autotune.core.result import Choosable, Result
from autotune.emit.handover import Handover, software_text
from autotune.reporting.comparison import confirmed_text, headline
from autotune.units import format_bytes, format_rate


def measured(result: Result, chosen: Choosable) -> Handover:
    """Return the measured bundle of a result."""
    figures = (
        _recommended_text(result),
        _where(result),
        _measured(chosen),
        headline(result, chosen),
        confirmed_text(result),
        "These figures hold for this model, dataset, device and software; for any other, run autotune again.",
        result.base.withheld_text if result.base is not None else "",
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


def _recommended_text(result: Result) -> str:
    workload = result.workload
    return (
        f"Recommended by autotune for {workload.model.name} on {workload.dataset.name}, global batch "
        f"{result.global_batch_size}, budget {format_bytes(result.budget_bytes)}."
    )


def _where(result: Result) -> str:
    hardware = result.hardware
    processes = "1 process" if hardware.processes == 1 else f"{hardware.processes} processes"
    software = software_text(result.environment)
    device = f"{hardware.name} ({format_bytes(hardware.memory_bytes)})"
    known = ", ".join(part for part in (device, processes, hardware.variables, software and f"with {software}") if part)
    return f"Measured on {known}."


def _measured(chosen: Choosable) -> str:
    parts = []
    if chosen.peak_bytes is not None:
        parts.append(f"peak memory {format_bytes(chosen.peak_bytes)} on the worst batch")
    if chosen.tokens_per_second is not None:
        parts.append(f"{format_rate(chosen.tokens_per_second)} on typical ones{_expected(chosen)}")
    return f"Result: {' and '.join(parts)}." if parts else ""


def _expected(chosen: Choosable) -> str:
    low, high = chosen.tokens_per_second_low, chosen.tokens_per_second_high
    if low is None or high is None:
        return " in one run"
    return f" in {chosen.runs} runs; a further run is expected between {low:,.0f} and {high:,.0f}"
