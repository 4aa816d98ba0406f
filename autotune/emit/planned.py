"""The sentences of a planned bundle: the recommendation and its predictions; none claims a measurement."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.core.bundle import PlannedBundle, ServerSplit
from autotune.core.machine import Hardware
from autotune.core.workload import Workload
from autotune.emit.handover import Handover, software_text
from autotune.emit.launch import ACCELERATE
from autotune.emit.serving import SERVE, TRAIN, serve_command, training_gpus
from autotune.techniques.vllm import SERVER, SUPPORTED
from autotune.units import format_bytes, format_rate, format_seconds

SERVER_TIMEOUT = 240
"""Seconds that TRL waits for the server: the default of ``vllm_server_timeout`` (TRL 1.16)."""


def planned(
    document: PlannedBundle, workload: Workload, hardware: Hardware, *, max_tokens: int | None, threads: int | None
) -> Handover:
    """Return the content of a planned bundle.

    Args:
        hardware: the hardware that trains, without the server's GPUs.
        max_tokens: of the longest prompt with its completion; None where the trainer names no such limit.
        threads: CPU threads of each process; None where the machine's cores are not known.
    """
    return Handover(
        plan=document.plan,
        workload=workload,
        hardware=hardware,
        basis=document.basis,
        figures=tuple(_figures(document, workload, max_tokens)),
        timed=document.tokens_per_second is not None,
        threads=threads,
        server=document.server,
    )


def _figures(document: PlannedBundle, workload: Workload, max_tokens: int | None) -> Iterator[str]:
    plan, split, source = document.plan, document.server, workload.model_source
    yield (
        f"Planned by autotune for {document.model} on {document.dataset}, global batch {document.global_batch_size}, "
        f"budget {format_bytes(document.budget_bytes)}; it has not run, and nothing was measured."
    )
    each = f"{document.processes} x {document.device}" if document.processes > 1 else document.device
    software = software_text(document.environment)
    by = f", with {software}" if software else ""
    yield f"Predicted for {each}{by}, by tracing TRL's own step without such a device."
    need = f"{format_bytes(document.needed_bytes)}{' of each' if document.processes > 1 else ''} on the worst batch"
    rate = document.tokens_per_second
    speed = f", and {format_rate(rate)} on typical ones" if rate is not None else ""
    yield f"Predicted: a need of {need}, give or take {100 * document.error:.0f} %{speed}."
    asks = plan.args.get("vllm_mode") == SERVER and bool(plan.args.get("use_vllm"))
    if split is not None:
        yield from _of_split(split)
    elif asks:
        yield (
            "A vLLM server on further GPUs has to run before the training starts, on as many as it needs: "
            f"{serve_command(source.name, None, max_tokens, source.revision)}; vllm_server_host is its address."
        )
    if asks:
        yield f"Server and training need {SUPPORTED} in addition to TRL. autotune probe starts no server."
    if plan.launch.machines > 1:
        yield (
            f"{ACCELERATE} is for the first of {plan.launch.machines} machines: set main_process_ip in it, and"
            " machine_rank on each of the others."
        )
    measures = "" if asks else "; autotune probe measures on the device itself"
    yield f"Predictions are for this model, dataset, device and software alone{measures}."
    yield "Paths are those of the machine that planned: change them in these files to train on another one."


def _of_split(split: ServerSplit) -> Iterator[str]:
    seconds = split.training_seconds
    step = f" A step is predicted to take {format_seconds(seconds)}, without the generation." if seconds else ""
    yield (
        f"{_gpus(range(split.generation), 'generates', 'generate')} in vLLM's server ({SERVE}), and"
        f" {_gpus(training_gpus(split), 'trains', 'train')} ({TRAIN}). Start {SERVE} first: the training waits"
        f" {SERVER_TIMEOUT} seconds for it (vllm_server_timeout)."
    )
    yield f"The server takes {server_text(split)}.{step}"


def server_text(split: ServerSplit) -> str:
    """Return the memory of a server, and the sequences that its cache holds, in words."""
    held = f", and its cache holds {int(split.sequences):,} of the longest sequences" if split.sequences else ""
    return f"{format_bytes(split.server_bytes)} of each of its GPUs{held}"


def _gpus(numbers: range, alone: str, several: str) -> str:
    if len(numbers) == 1:
        return f"GPU {numbers[0]} {alone}"
    return f"GPUs {numbers[0]} to {numbers[-1]} {several}"
