"""States the figures of a bundle in sentences: a result's measurements, or a plan's predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.core.documents.bundle import Basis, PlannedBundle, ServerSplit
from autotune.core.documents.result import MeasuredCandidate, Result
from autotune.core.machine import Hardware
from autotune.core.workload import Workload
from autotune.emit.handover import Handover
from autotune.emit.launch import ACCELERATE
from autotune.emit.serving import SERVE, TRAIN, serve_command, training_gpus
from autotune.reporting.comparison import confirmed_text, headline
from autotune.techniques.vllm import SERVER, SUPPORTED
from autotune.units import format_bytes, format_rate, format_seconds, plural

SERVER_TIMEOUT = 240
"""Seconds that TRL waits for the server: the default of ``vllm_server_timeout`` (TRL 1.16)."""
_SOFTWARE = ("torch", "transformers", "trl", "peft", "accelerate", "driver")


def measured(result: Result, chosen: MeasuredCandidate) -> Handover:
    """Return the measured bundle of a result."""
    return Handover(
        plan=chosen.plan,
        workload=result.workload,
        hardware=result.hardware,
        basis=Basis.MEASURED,
        figures=tuple(filter(None, _measured_sentences(result, chosen))),
        threads=result.hardware.threads,
        base=result.base,
    )


def _measured_sentences(result: Result, chosen: MeasuredCandidate) -> Iterator[str]:
    """Yield sentences, some of them empty."""
    workload, hardware = result.workload, result.hardware
    yield (
        f"Recommended by autotune for {workload.model.name} on {workload.dataset.name}, global batch "
        f"{result.global_batch_size}, budget {format_bytes(result.budget_bytes)}."
    )
    device = f"{hardware.name} ({format_bytes(hardware.memory_bytes)})"
    processes = plural(hardware.processes, "process", "processes")
    software = _software_text(result.environment)
    details = (device, processes, hardware.variables, software and f"with {software}")
    yield f"Measured on {', '.join(filter(None, details))}."
    parts = []
    if chosen.peak_bytes is not None:
        held, allocated = format_bytes(chosen.used_bytes or 0), format_bytes(chosen.peak_bytes)
        allocated_text = "" if held == allocated else f" ({allocated} allocated)"
        parts.append(f"memory used {held}{allocated_text} on the worst batch")
    if chosen.tokens_per_second is not None:
        parts.append(f"{format_rate(chosen.tokens_per_second)} on typical ones{_expected_text(chosen)}")
    yield f"Result: {' and '.join(parts)}." if parts else ""
    yield headline(result, chosen)
    yield confirmed_text(result)
    yield "These figures hold for this model, dataset, device and software; for any other, run autotune again."
    yield result.base.withheld_text if result.base is not None else ""


def _expected_text(chosen: MeasuredCandidate) -> str:
    low, high = chosen.tokens_per_second_low, chosen.tokens_per_second_high
    if low is None or high is None:
        return " in one run"
    return f" in {chosen.runs} runs, with a 95 % range of {low:,.0f} to {high:,.0f} for a single run"


def planned(
    document: PlannedBundle, workload: Workload, hardware: Hardware, *, max_tokens: int | None, threads: int | None
) -> Handover:
    """Return the content of a planned bundle.

    Args:
        hardware: the hardware that trains, without the server's GPUs.
        max_tokens: tokens of the longest prompt with its completion; None if the trainer has no such limit.
        threads: CPU threads of each process; None if the machine's cores are unknown.
    """
    return Handover(
        plan=document.plan,
        workload=workload,
        hardware=hardware,
        basis=document.basis,
        figures=tuple(_planned_sentences(document, workload, max_tokens)),
        timed=document.tokens_per_second is not None,
        threads=threads,
        server=document.server,
    )


def _planned_sentences(document: PlannedBundle, workload: Workload, max_tokens: int | None) -> Iterator[str]:
    plan, split, source = document.plan, document.server, workload.model_source
    yield (
        f"Planned by autotune for {document.model} on {document.dataset}, global batch {document.global_batch_size}, "
        f"budget {format_bytes(document.budget_bytes)}; it has not run, and nothing was measured."
    )
    each = f"{document.processes} x {document.device}" if document.processes > 1 else document.device
    software = _software_text(document.environment)
    software_text = f", with {software}" if software else ""
    yield f"Predicted for {each}{software_text}, by tracing TRL's own step without such a device."
    need = f"{format_bytes(document.needed_bytes)}{' of each' if document.processes > 1 else ''} on the worst batch"
    rate = document.tokens_per_second
    speed = f", and {format_rate(rate)} on typical ones" if rate is not None else ""
    yield f"Predicted: a need of {need}, give or take {100 * document.error:.0f} %{speed}."
    if document.host_bytes and plan.launch.processes > 1:
        yield f"A machine needs up to {format_bytes(document.host_bytes)} of host memory, for all processes on it."
    yield from document.doubts
    needs_server = plan.args.get("vllm_mode") == SERVER and bool(plan.args.get("use_vllm"))
    if split is not None:
        yield from _split_sentences(split)
    elif needs_server:
        yield (
            "A vLLM server on other GPUs, as many as it needs, has to run before the training starts: "
            f"{serve_command(source.name, None, max_tokens, source.revision)}; vllm_server_host is its address."
        )
    if needs_server:
        yield f"Server and training need {SUPPORTED} in addition to TRL. autotune probe starts no server."
    if plan.launch.machines > 1:
        yield (
            f"On each of {plan.launch.machines} machines, give --main_process_ip with the address of the first one, and"
            f" --machine_rank, from 0 on, to `trl` or, before train.py, to `accelerate launch`; or write both into"
            f" {ACCELERATE} there."
        )
    measures = "" if needs_server else "; autotune probe measures on the device itself"
    yield f"Predictions are for this model, dataset, device and software alone{measures}."
    yield "Paths are those of the machine that planned: change them in these files to train on another one."


def _split_sentences(split: ServerSplit) -> Iterator[str]:
    seconds = split.training_seconds
    step = f" A step is predicted to take {format_seconds(seconds)}, without the generation." if seconds else ""
    yield (
        f"{_gpus(range(split.generation), 'generates', 'generate')} in vLLM's server ({SERVE}), and"
        f" {_gpus(training_gpus(split), 'trains', 'train')} ({TRAIN}). Start {SERVE} first: the training waits"
        f" {SERVER_TIMEOUT} seconds for it (vllm_server_timeout)."
    )
    yield f"The server takes {server_text(split)}.{step}"


def server_text(split: ServerSplit) -> str:
    """Return a clause on a server's memory, and on the number of sequences in its cache."""
    held = f", and its cache holds {int(split.sequences):,} of the longest sequences" if split.sequences else ""
    return f"{format_bytes(split.server_bytes)} of each of its GPUs{held}"


def _gpus(numbers: range, alone: str, several: str) -> str:
    if len(numbers) == 1:
        return f"GPU {numbers[0]} {alone}"
    return f"GPUs {numbers[0]} to {numbers[-1]} {several}"


def _software_text(environment: Mapping[str, str]) -> str:
    """Return names and versions of the software that affects memory and speed the most; empty if unknown."""
    return ", ".join(f"{name} {environment[name]}" for name in _SOFTWARE if name in environment)
