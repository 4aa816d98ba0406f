"""The results of a plan as sentences and figures, before rendering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from autotune.core.candidate import Candidate
from autotune.core.estimate import Change, Estimate, Plan
from autotune.core.rent import Rent
from autotune.reporting.outlook import allow_lines, more_memory_text
from autotune.reporting.words import BASELINE_NAME, bytes_or_dash, rate_or_dash, written
from autotune.units import counted, format_bytes, format_duration


def workload_and_gpus_text(found: Plan | Rent, target: str) -> str:
    """Return the subject of a plan: the workload with its fixed choices, and the target."""
    fixed = found.settings.get("fix")
    words = f", with {written(fixed)}" if isinstance(fixed, Mapping) and fixed else ""
    return f"{found.model} on {found.dataset}, global batch {found.global_batch_size}{words}, planned for {target}"


def traces_text(found: Plan | Rent, shown: Iterable[Estimate] = ()) -> str:
    """Return the number of traces of a plan, how long it took, and the largest error of the estimates shown."""
    traces = f"{found.trace_count} traces ({found.new_trace_count} new) in {format_duration(found.wall_seconds)}"
    error = max((one.memory.error for one in shown if one.memory is not None), default=0.0)
    return f"{traces}; memory may be off by {_percent(error)}" if error else traces


def workload_and_gpu_text(plan: Plan) -> str:
    """Return the workload, and the GPU that is planned for."""
    part = plan.budget_bytes < plan.gpu.memory_bytes
    several = plan.processes > 1
    name = f"{plan.processes} x {plan.gpu.name}" if several else plan.gpu.name
    memory = f"{format_bytes(plan.budget_bytes)} of {'each of ' if several else ''}{name}" if part else name
    has = "" if part else f", {'each of which' if several else 'which'} has {format_bytes(plan.budget_bytes)}"
    return workload_and_gpus_text(plan, f"{memory}{has}")


def choices_text(candidate: Candidate, plan: Plan) -> str:
    """Return a candidate's differences from TRL's default, without the fixed choices."""
    return (
        written(candidate.differences(plan.baseline.candidate))
        or f"{BASELINE_NAME}{' otherwise' if plan.settings.get('fix') else ''}"
    )


def headline(plan: Plan) -> str:
    """Return the candidate predicted to be best in one sentence."""
    best, alone = plan.fastest, len(plan.estimates) == 1
    if best is not None:
        spare = f"with {bytes_or_dash(best.spare_bytes)} to spare"
        if best.tokens_per_second is None:
            if alone:
                return f"It fits: {spare}"
            return f"Largest margin: {bytes_or_dash(best.spare_bytes)} to spare; no speed is predicted"
        each = f" ({best.tokens_per_second / plan.processes:,.0f} per GPU)" if plan.processes > 1 else ""
        return (
            f"{'It fits' if alone else 'The fastest that fits'}: {rate_or_dash(best.tokens_per_second)}{each}, {spare}"
        )
    least = plan.best
    if least is None or least.memory is None:
        return "Nothing can be predicted here: autotune probe can measure it."
    what = "It does not fit" if alone else "Nothing is predicted to fit"
    return (
        f"{what} in {format_bytes(plan.budget_bytes)}: {'it' if alone else 'the least'} needs "
        f"{format_bytes(least.memory.device_bytes)}."
    )


def doubt_text(plan: Plan) -> str:
    """Return why the best might not fit, with the alternatives; an empty text where it is sure to fit."""
    best = plan.fastest
    if best is None:
        return ""
    safer = () if best.sure else (_safer_text(plan),)
    return " ".join((*doubts(best, plan.host_bytes), *safer))


def doubts(estimate: Estimate, host_bytes: int | None) -> tuple[str, ...]:
    """Return why an estimate that fits might not, in sentences: for its device's memory, and for its host's."""
    memory, found = estimate.memory, list[str]()
    if memory is not None and not estimate.sure:
        off = f"±{_percent(memory.error)}, {format_bytes(memory.error * memory.device_bytes)}"
        varied_bytes = memory.varied_bytes
        more = f"; batches of varied lengths may add {format_bytes(varied_bytes)}" if varied_bytes else ""
        found.append(f"The margin is below the stated error ({off}{more}): it may not fit.")
    if memory is not None and host_bytes is not None and memory.host_need_bytes > host_bytes:
        needed = f"up to {format_bytes(memory.host_need_bytes)} are needed there"
        found.append(
            f"The host may run out of memory: {needed}, and the machine planned for has {format_bytes(host_bytes)}."
        )
    return tuple(found)


def _safer_text(plan: Plan) -> str:
    safe = next((estimate for estimate in plan.estimates if estimate.fits and estimate.sure), None)
    if safe is None:
        return "Nothing fits with its error to spare."
    rate = f"{rate_or_dash(safe.tokens_per_second)}, " if safe.tokens_per_second is not None else ""
    return (
        f"The fastest that fits with its error to spare: {rate}{bytes_or_dash(safe.spare_bytes)} to spare: "
        f"{choices_text(safe.candidate, plan)}"
    )


def change_text(change: Change) -> str:
    """Return in a few words the change that makes a candidate fit."""
    words = written(change.instead.candidate.differences(change.candidate))
    return f"fits with {words}, {bytes_or_dash(change.instead.spare_bytes)} to spare"


def way_out_lines(plan: Plan) -> tuple[str, ...]:
    """Return changes outside of the plan that might make a candidate fit; none where no need is known."""
    if plan.best is None:
        return ()
    shorter = () if plan.limit is None else (f"a --max-length below {plan.limit.max_length:,}",)
    return (*allow_lines(plan.unlockable), *shorter, more_memory_text(plan.budget_bytes, plan.gpu.memory_bytes))


def candidate_counts_text(plan: Plan) -> str:
    """Return how many candidates were traced, and how many of them fit."""
    number = plan.counted
    counts = {"fitting": number.fitting, "not fitting": number.too_large, "unknown": number.unknown}
    parts = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return f"{counted(len(plan.estimates), 'candidate')}: {parts or 'none legal'}."


def unknown_lines(plan: Plan) -> tuple[str, ...]:
    """Return why estimates are missing, the most frequent reasons first, each with its count."""
    reasons = Counter(estimate.reason for estimate in plan.estimates if estimate.reason)
    return tuple(f"{count:,} unknown: {reason}" for reason, count in reasons.most_common())


def _percent(error: float) -> str:
    """Return an error, given as a share that may exceed 1, in per cent."""
    return f"{100 * error:.0f} %"
