"""The sentences of a measured bundle: the recommendation and its measurements."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.core.bundle import Basis
from autotune.core.result import Choosable, Result
from autotune.emit.handover import Handover, software_text
from autotune.reporting.comparison import confirmed_text, headline
from autotune.units import format_bytes, format_rate


def measured(result: Result, chosen: Choosable) -> Handover:
    """Return the measured bundle of a result."""
    return Handover(
        plan=chosen.plan,
        workload=result.workload,
        hardware=result.hardware,
        basis=Basis.MEASURED,
        figures=tuple(filter(None, _figures(result, chosen))),
        threads=result.hardware.threads,
        base=result.base,
    )


def _figures(result: Result, chosen: Choosable) -> Iterator[str]:
    """Yield sentences, some of them empty."""
    workload, hardware = result.workload, result.hardware
    yield (
        f"Recommended by autotune for {workload.model.name} on {workload.dataset.name}, global batch "
        f"{result.global_batch_size}, budget {format_bytes(result.budget_bytes)}."
    )
    device = f"{hardware.name} ({format_bytes(hardware.memory_bytes)})"
    processes = "1 process" if hardware.processes == 1 else f"{hardware.processes} processes"
    software = software_text(result.environment)
    known = (device, processes, hardware.variables, software and f"with {software}")
    yield f"Measured on {', '.join(filter(None, known))}."
    parts = []
    if chosen.peak_bytes is not None:
        held, allocated = chosen.device_bytes, format_bytes(chosen.peak_bytes)
        memory = f"peak memory {allocated}" if held is None else f"needs {format_bytes(held)} ({allocated} allocated)"
        parts.append(f"{memory} on the worst batch")
    if chosen.tokens_per_second is not None:
        parts.append(f"{format_rate(chosen.tokens_per_second)} on typical ones{_expected(chosen)}")
    yield f"Result: {' and '.join(parts)}." if parts else ""
    yield headline(result, chosen)
    yield confirmed_text(result)
    yield "These figures hold for this model, dataset, device and software; for any other, run autotune again."
    yield result.base.withheld_text if result.base is not None else ""


def _expected(chosen: Choosable) -> str:
    low, high = chosen.tokens_per_second_low, chosen.tokens_per_second_high
    if low is None or high is None:
        return " in one run"
    return f" in {chosen.runs} runs; a further run is expected between {low:,.0f} and {high:,.0f}"
