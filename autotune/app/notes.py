"""The notes of runs, plans and checks for the user, one sentence each."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import attrgetter

from autotune.core.candidate import Choice
from autotune.core.documents.estimate import MemoryEstimate
from autotune.core.documents.rent import Offer
from autotune.core.documents.result import MeasuredCandidate
from autotune.core.gpu import Gpu
from autotune.core.machine import Hardware, Machine
from autotune.core.measurement import Measurement
from autotune.core.plan import ALLOCATOR_VARIABLES, Launch
from autotune.core.step_time import HOST_BOUND_ERROR, TIME_ERROR
from autotune.core.workload import Workload
from autotune.inspection.software import newer_than_tested
from autotune.planning.tracing.store import Traces
from autotune.planning.vllm import engine_assumptions
from autotune.techniques.attention import EAGER, UNEVEN_IMAGES, Attention, uneven_images
from autotune.techniques.base import OFF
from autotune.techniques.packing import never_separated
from autotune.techniques.vllm import COLOCATED, SERVER
from autotune.trainers import find_trainer
from autotune.trainers.generating import COMPLETIONS
from autotune.trainers.problem import TrainerProblem
from autotune.trainers.prompts import PLACEHOLDER_REWARD
from autotune.units import format_bytes, format_share, plural

VLLM_SERVER_CLAUSE = (
    "vLLM server on other GPUs generates the completions, and has to run before the training starts; the memory figures"
    " are for the GPUs that train."
)
"""The end of a note on a vLLM server, in plans and checks."""
_MAX_NAMED_ROWS = 5
"""Most rows named in a note."""


def notes_on_workload(workload: Workload, packages: Mapping[str, str]) -> Iterator[str]:
    """Yield the notes on trainer, model, rows and installed packages, which hold for every run and plan."""
    if find_trainer(workload.trainer).scores and not workload.rollouts.rewards:
        yield PLACEHOLDER_REWARD
    yield from notes_on_software(packages)
    yield from notes_on_prompts(workload)
    for profile in workload.profiles:
        yield from profile.remarks
    trainer = find_trainer(workload.trainer)
    yield from trainer.peculiarities
    if not workload.has_images:
        yield from trainer.text_peculiarities
    yield from filter(None, [workload.model.beyond_positions(workload.dataset.documents.longest)])
    if workload.evaluation is not None:
        yield "Speeds and times of an epoch leave evaluations out."


def notes_on_software(packages: Mapping[str, str]) -> Iterator[str]:
    """Yield a note if releases are installed that came after the newest tested ones."""
    tested = newer_than_tested(packages)
    if tested:
        newer = " and ".join(f"{name} {packages[name]}" for name in tested)
        known = ", ".join(f"{name} {version}" for name, version in tested.items())
        yield f"Installed is {newer}, and autotune was tested up to {known}: the stated errors may not hold."


def notes_on_images(attention: object, workload: Workload) -> Iterator[str]:
    """Yield a note if eager attention may need more memory for images of other sizes than those that run."""
    if attention == EAGER and uneven_images(workload):
        yield f"attention={EAGER} may need more memory than this: {UNEVEN_IMAGES}."


def few_documents_text(workload: Workload, batch: int) -> str:
    """Return a clause on a dataset with fewer documents than one global batch; empty if it has enough."""
    rows, noun = workload.dataset.documents.rows, find_trainer(workload.trainer).document_noun
    # Each row yields several completions.
    if rows >= batch or noun == COMPLETIONS:
        return ""
    return f"The dataset has {plural(rows, noun.removesuffix('s'))}, fewer than a global batch of {batch:,}"


def notes_on(problem: TrainerProblem) -> Iterator[str]:
    """Yield the notes on a run, the most important first."""
    setting = problem.setting
    workload = setting.workload
    yield from notes_on_workload(workload, setting.machine.packages)
    yield from notes_on_images(problem.baseline[Attention.name], workload)
    not_separated = None if workload.has_images else never_separated(setting)
    if not_separated and "packing" in problem.choices:
        yield f"Packing that keeps documents apart and padding-free were not tried: {not_separated}."
    few = few_documents_text(workload, setting.global_batch_size)
    if few:
        yield f"{few}: rows were repeated to measure whole steps."
    yield from notes_on_device(setting.machine)
    for name in ALLOCATOR_VARIABLES if setting.machine.hardware.kind == "cuda" else ():
        if os.environ.get(name):
            yield (
                f"Probes ran without {name}={os.environ[name]} of this environment. If the configuration sets no "
                f"{name}, unset it for the training too: it changes memory and speed."
            )
    if setting.machine.hardware.is_null:
        yield "Measured on a null GPU, whose kernels do nothing: times and speeds mean nothing."


def notes_on_device(machine: Machine) -> Iterator[str]:
    """Yield the notes on the device of probes, which are reported before the first probe as well."""
    hardware = machine.hardware
    if machine.device_reason:
        yield f"Runs on the CPU: {machine.device_reason}."
    if hardware.kind != "cuda":
        return
    if hardware.processes > 1:
        yield (
            f"{hardware.processes} processes train together, one on each GPU. autotune has run several processes on"
            " CPUs and on null GPUs, and not yet on several GPUs; --num-processes 1 probes on one."
        )
    if hardware.variables:
        yield (
            f"The GPUs of this machine differ. Train with {hardware.variables}, as in the printed command: GPU numbers"
            " are in the order of nvidia-smi here, and CUDA counts from the fastest, so that a number such as that in"
            " CUDA_VISIBLE_DEVICES=0 can name another GPU."
        )


_LOADING_SHARE = 0.1
"""Least share of loading data in a step that is worth a note."""


def notes_on_loading(measurement: Measurement, hardware: Hardware) -> Iterator[str]:
    """Yield a note if reading and collating data takes a large share of a measured step."""
    share = (measurement.loading_seconds or 0.0) / measurement.step_seconds if measurement.step_seconds else 0.0
    if share < _LOADING_SHARE:
        return
    sentence = f"Reading and collating rows takes {format_share(share)} of a step of the recommendation"
    if hardware.kind == "cpu":
        yield f"{sentence}."
    else:
        more = "a larger dataloader_num_workers moves this work to more processes"
        yield f"{sentence}, while the GPU waits: {more}."


def notes_on_launcher(chosen: MeasuredCandidate, hardware: Hardware) -> Iterator[str]:
    """Yield a note if the CUDA context of TRL's own command may not fit in the memory that training leaves free.

    The ``trl`` command parses the training arguments in its own process before it launches the training. That sets the
    current device (transformers 5.23, ``TrainingArguments._setup_devices``), which creates a CUDA context on the first
    GPU (torch 2.11, ``set_device``); the context stays until the training ends.
    """
    trainer = find_trainer(chosen.plan.trainer)
    if chosen.device_bytes is None or chosen.reserved_bytes is None or not trainer.has_command:
        return
    context_bytes = chosen.device_bytes - chosen.reserved_bytes
    free_bytes = max(0, hardware.available_bytes - chosen.device_bytes)
    if free_bytes < context_bytes:
        yield (
            f"`trl {trainer.name}` holds a second CUDA context on the first GPU while it trains, of up to "
            f"{format_bytes(context_bytes)}, and the recommendation leaves {format_bytes(free_bytes)} free: start "
            "train.py instead, or search with a --memory-budget that leaves room."
        )


TIME_ERROR_HELD = (
    "76 of 89 TRL steps measured on an H100 and an H200 (on the worst of 3 machines 21 of 32), to which the CPU's "
    "share of the time was fitted"
)
"""The probes that are within :data:`TIME_ERROR` of plans for them (`benchmarks/gpu/results`)."""


def notes_on_gpus(gpus: Collection[Gpu]) -> Iterator[str]:
    """Yield the unknown facts about planned GPUs; a fact about several is one note."""
    for gpu in gpus:
        if gpu.memory_kind == "total":
            yield f"Somewhat less than the {format_bytes(gpu.memory_bytes)} of {gpu.name} can be allocated."
        if not gpu.verified:
            yield f"Whether autotune's rules hold for {gpu.name} has not been verified."
    rates = {gpu.name: gpu.speeds.achieved for gpu in gpus if gpu.speeds is not None}
    if any(known.source for known in rates.values()):
        device, host = (f"{100 * error:.0f} %" for error in (TIME_ERROR, HOST_BOUND_ERROR))
        yield (
            f"Times are predicted within ±{device}, which held for {TIME_ERROR_HELD}. Those marked ~ may be off by "
            f"{host}: the CPU that launches the kernels limits them, and its time per operator is assumed."
        )
    lacking: dict[str, list[str]] = {}
    for name, known in rates.items():
        what = known.generation if known.source else "any operator; times follow from medians over other cards"
        if what:
            lacking.setdefault(what, []).append(name)
    for what, names in lacking.items():
        yield f"Not measured on {', '.join(names)}: {what}."


def notes_on_speed(gpu: Gpu) -> Iterator[str]:
    """Yield a note if nothing is known of a GPU's speed."""
    if gpu.speeds is None:
        yield f"The speed of {gpu.name} is not known, so no speed is predicted."


def notes_on_traces(traces: Traces) -> Iterator[str]:
    """Yield why traces are not cached, and why operators were not measured."""
    if traces.cache.failure:
        yield f"Traces are not cached: {traces.cache.failure}."
    if traces.times is not None and traces.times.failure:
        yield f"Some predicted times follow from the device's peak speeds: {traces.times.failure}"


def notes_on_workers(hardware: Hardware, further: int) -> Iterator[str]:
    """Yield a note if each worker had a share of a CPU: the figures do not hold for the whole CPU.

    Args:
        hardware: the device as each worker had it.
        further: number of workers in addition to the first.
    """
    if hardware.kind == "cpu" and further:
        share = f"{plural(hardware.cores, 'core')} and {format_bytes(hardware.memory_bytes * hardware.processes)}"
        yield f"Each of the {further + 1} workers had {share}; all figures are for such a share."


def notes_on_prompts(workload: Workload) -> Iterator[str]:
    """Yield the rows that --prompt-coverage drops, the longest prompts, or that it drops none."""
    share = workload.rollouts.prompt_coverage
    for profile in workload.profiles if share < 1 else ():
        kept, dropped = profile.lengths, profile.dropped
        if dropped is None:
            yield (
                f"--prompt-coverage {share:g} drops none of the {kept.rows:,} prompts of {profile.name}: too many of "
                f"them have {kept.longest:,} tokens, and none has more."
            )
            continue
        named = [f"row {number:,} ({tokens:,} tokens)" for number, tokens in dropped.longest[:_MAX_NAMED_ROWS]]
        others = [f"{dropped.rows - len(named):,} more"] if dropped.rows > len(named) else []
        yield (
            f"--prompt-coverage {share:g} drops {dropped.rows:,} of the {dropped.rows + kept.rows:,} prompts of "
            f"{profile.name}, over {dropped.longest_kept:,} tokens: {', '.join([*named, *others])}."
        )


def notes_on_processes(
    processes: int, machines: int, network: float | None, gpus: Collection[Gpu], *, at_most: bool = False
) -> Iterator[str]:
    """Yield notes on unknown or easily overlooked effects of several processes.

    Args:
        network: Gbit/s of each machine's network, or None.
        gpus: those planned for, each process having one; none for a CPU.
        at_most: whether fewer processes are planned for as well.
    """
    if processes > 1:
        each = f"{'up to ' if at_most else ''}{plural(processes // machines, 'process', 'processes')}"
        yield f"A machine runs {each}: host memory is the sum over them at its peak."
        if gpus:
            yield "NCCL's buffers on each GPU are not in these figures; probes on such GPUs measure them."
        together = processes // machines
        speeds = {gpu.name: gpu.speeds for gpu in gpus if gpu.speeds is not None}
        unlinked = [name for name, own in speeds.items() if own.nvlink is None or (own.bridged or together) < together]
        if unlinked and together > 1:
            yield (
                f"Between {', '.join(unlinked)} of a machine, data goes over PCIe, whose speed depends on the machine:"
                " in three published measurements, 4 GPUs reached 15, 55 and 74 % of its rate. The median is assumed."
            )
    if machines > 1 and network is None:
        yield (
            "The network between machines is not known: communication is timed as if all GPUs were in one machine,"
            " which is a lower bound. --network names its Gbit/s."
        )
    elif machines > 1:
        yield (
            f"Between machines, communication is timed at the full rate of a network of {network:g} Gbit/s for each"
            " machine, without latency, which is a lower bound."
        )


def notes_on_plans(
    workload: Workload, vllm: Collection[Choice], gpus: Collection[Gpu], traces: Traces
) -> Iterator[str]:
    """Yield the assumptions and gaps of plans.

    Args:
        vllm: the planned choices of vLLM; empty for a trainer without it.
        gpus: those planned for; none for a CPU.
    """
    if any(choice != OFF for choice in vllm):
        yield "The speed of vLLM's generation cannot be traced: candidates with vllm have no predicted speed."
    if SERVER in vllm:
        yield f"With vllm={SERVER}, a {VLLM_SERVER_CLAUSE}"
    if not COLOCATED.isdisjoint(vllm):
        assumed = "; ".join(engine_assumptions(workload.model))
        yield f"No plan with vLLM has been compared with a GPU yet. Assumed of vLLM: {assumed}."
    if workload.has_images:
        yield "Predicted times leave out reading and resizing images, for which the device may wait."
    yield from notes_on_gpus(gpus)
    yield from notes_on_traces(traces)


def notes_on_assumptions(assumptions: Collection[str]) -> Iterator[str]:
    """Yield the assumptions of traces, if they made any."""
    places: dict[str, list[str]] = {}
    for what, _, place in (each.partition(" (in ") for each in assumptions):
        places.setdefault(what, []).extend([place.removesuffix(")")] if place else [])
    grouped = (f"{what} (in {', '.join(found)})" if found else what for what, found in places.items())
    if assumptions:
        yield f"Traces have no data, and compile nothing. They assumed: {'; '.join(grouped)}."


def host_notes(memory: MemoryEstimate | None, launch: Launch, host_bytes: int | None) -> Iterator[str]:
    """Yield a sentence on the host's memory, unless a single process is on a machine that has enough.

    Args:
        memory: None if it is not known: nothing is yielded.
        host_bytes: memory of the machine; None if it is not known.
    """
    if memory is None or (launch.processes == 1 and not memory.lacks_host(host_bytes)):
        return
    each = launch.per_machine
    whose = "its process" if each == 1 else f"the {each} processes on it together"
    needed = f"needs up to {format_bytes(memory.machine_bytes)} of host memory per machine, for {whose}"
    has = f"; this machine has {format_bytes(host_bytes)}" if host_bytes is not None else ""
    yield f"It {needed}{has}: the peak while the model is loaded, in a step, or while a checkpoint is saved."


def close_calls(offers: Sequence[Offer]) -> Iterator[str]:
    """Yield the offers within the error of predicted times of the cheapest, and of the fastest."""
    for best, figure in (("cheap as the cheapest", attrgetter("cost")), ("fast as the fastest", attrgetter("seconds"))):
        known = sorted((offer for offer in offers if figure(offer) is not None), key=figure)
        errors = [max(offer.time_error, known[0].time_error) for offer in known]
        near = {
            offer.gpus: error
            for offer, error in zip(known[1:], errors[1:], strict=True)
            if figure(offer) <= (1 + error) * figure(known[0])
        }
        if near:
            most = 100 * max(near.values())
            yield f"May be as {best}, since predicted times may be off by up to {most:.0f} %: {', '.join(near)}."
