"""The job ``trace``: traces training steps on the virtual accelerator and predicts their memory and time."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from autotune.core.gpu import GpuSpeeds
from autotune.core.jobs.traced import GpuFigures, Replayed, TracedOperator, TraceReply, TraceRequest
from autotune.core.plan import TrainingPlan
from autotune.core.program import SAVE, SAVE_ELSEWHERE, StepProgram
from autotune.core.step_time import Pace, usual_pace
from autotune.core.timeline import Occurrence, Section
from autotune.step.distributed.engines import Engine, engine_of
from autotune.step.job import JobContext
from autotune.step.models.loading import cached_vocabularies, load_config, processor_for
from autotune.step.models.shrink import first_layers
from autotune.step.run.traced_training import TraceFacts, capability_of, traced_training, world_of
from autotune.step.run.virtual_trainer import TracedRows
from autotune.step.trainers import find_adapter
from autotune.trainers.prompts import GENERATION, SYNCHRONISATION
from autotune.virtual import trace as run_virtually
from autotune.virtual.cost.roofline import Kind, operator_seconds, step_seconds
from autotune.virtual.ranks import World
from autotune.virtual.recording.records import OperatorRecord, Trace
from autotune.virtual.recording.replay import replay, short_of_memory, workspace_bytes
from autotune.virtual.steps.phases import micro_batches, step_name
from autotune.virtual.steps.sections import sections
from autotune.virtual.steps.steady import steady
from autotune.virtual.steps.varied import MicroBatch, steps_before, varied

_TIME_FIELDS = {
    Kind.MATMUL: "matmul_seconds",
    Kind.ATTENTION: "attention_seconds",
    Kind.ELEMENTWISE: "elementwise_seconds",
}
"""The field of :class:`StepTime` to which an operator's time is added, by kind."""


def trace(request: TraceRequest, context: JobContext) -> TraceReply:
    """Train on the virtual accelerator.

    The device stays registered with PyTorch for the rest of this process.

    Raises:
        InputError: the model's configuration or tokenizer cannot be used.
    """
    # Traces do not use a real GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    reply = _reply(request, context.folder)
    # Exclude surviving objects from later garbage collections, which accelerate runs in every training.
    gc.collect()
    gc.freeze()
    return reply


def _reply(request: TraceRequest, folder: Path) -> TraceReply:
    start_seconds = time.monotonic()
    facts, program = TraceFacts(), find_adapter(request.plan.trainer).specification.program(request.plan)
    traced = _traced(request, facts, folder, of_step=program.in_step)
    parts = sections(traced, traced.phase(step_name(1)), _with_synchronisation(program))
    timed_operators = [
        None if span is None else [each for each in traced.operators[span] if each.work.kind is not Kind.NOTHING]
        for _, span in parts
    ]
    gpus = tuple(_gpu_figures(traced, request, facts, timed_operators))
    operators, counts = _operators(timed_operators, request)
    return TraceReply(
        device=traced.device_peak,
        host=traced.host_peak,
        worst_rows=facts.worst_rows,
        worst_tokens=facts.worst_tokens,
        # The traced micro-batch that represents those between the first and the last of a step.
        between=Occurrence.FIRST if request.plan.in_group else Occurrence.FURTHER,
        tokens_per_step=request.plan.data_ranks * facts.micro_batches * facts.tokens,
        assumptions=traced.assumptions,
        seconds=time.monotonic() - start_seconds,
        sections=tuple(
            replace(section, time=time, operators=count, machine_bytes=_machine_bytes(traced, section, request.plan))
            for (section, _), time, count in zip(parts, gpus[0].times, counts, strict=True)
        ),
        gpus=gpus,
        operators=operators,
    )


def _with_synchronisation(program: StepProgram) -> StepProgram:
    """Return the program with the synchronisation of vLLM's weights before each generation."""
    in_step, leading = (
        (SYNCHRONISATION, *phases) if GENERATION in phases else phases for phases in (program.in_step, program.leading)
    )
    return replace(program, in_step=in_step, leading=leading)


def _traced(request: TraceRequest, facts: TraceFacts, folder: Path, *, of_step: Sequence[str]) -> Trace:
    """Return the trace of two whole optimizer steps.

    Args:
        of_step: names of phases that run once per step, before its micro-batches or at the start of the first one.
    """
    adapter = find_adapter(request.plan.trainer)
    model_config = load_config(request.model, adapter.head)
    whole = model_config.get_text_config().num_hidden_layers
    if request.layers is not None:
        model_config = first_layers(model_config, request.layers)
    # Engines exchange gradients only in the last micro-batch of a step. DeepSpeed's first step differs from later ones:
    # it allocates buffers for the update, and ZeRO-3 records the order in which to prefetch.
    alike, once = not request.plan.in_group, engine_of(request.plan) is not Engine.DEEPSPEED
    rows = TracedRows(
        request.worst, request.trainable, once, alike, chosen=request.chosen, again=request.compiled_again
    )
    processor = processor_for(request.model, adapter.processor)
    steps = traced_training(
        request.plan, model_config, processor, rows, facts, parent=folder, steps_alone=request.steps_alone
    )
    traced = _trace_worst(steps, request, facts, is_whole=(request.layers or whole) >= whole)
    if once:
        further = alike and facts.micro_batches > 1
        traced = steady(traced, step_name(0), step_name(1), further=further, of_step=of_step)
    return traced


def _trace_worst(steps: Callable[[Any], None], request: TraceRequest, facts: TraceFacts, *, is_whole: bool) -> Trace:
    """Return the trace of the rank that needs the most memory.

    With ZeRO-2, candidates are the last rank, whose gradients arrive first, the rank with the largest share of
    gradients, and the first rank: if its gradients find no free block, it reserves more than a rank that holds as much
    (KTO on two processes: 580 MiB and 496, also with PyTorch's allocator on null GPUs).

    Args:
        is_whole: whether all layers are traced. If not, other ranks are not compared: with ZeRO-2, the rank that needs
            the most depends on the number of layers.
    """

    def trace_as(world: World | None) -> Trace:
        with cached_vocabularies():
            return run_virtually(
                steps,
                target=request.target,
                capability=capability_of(request.gpu),
                others=[capability_of(gpu) for gpu in request.others],
                world=world,
            )

    def reserved_bytes(traced: Trace) -> tuple[int, int]:
        if request.target == "cpu":
            return 0, traced.device_peak.bytes
        replayed = replay(traced, capability=capability_of(request.gpu), emptied=request.emptied)
        return replayed.peak_reserved_bytes, replayed.peak_allocated_bytes

    world = world_of(request.plan)
    traced = trace_as(world)
    if world is None or not facts.gradients or not is_whole:
        return traced
    others = dict.fromkeys((world_of(request.plan, facts.gradients), replace(world, rank=0)))
    return max([traced, *(trace_as(other) for other in others if other != world)], key=reserved_bytes)


def _operators(
    timed_operators: Sequence[Sequence[OperatorRecord] | None], request: TraceRequest
) -> tuple[tuple[TracedOperator, ...], Sequence[Mapping[int, int]]]:
    """Return the distinct operators that can be measured, and their numbers of executions in each section.

    Empty if operators were not requested, or the GPU's speeds are unknown.

    Args:
        timed_operators: the operators of each section that take time, or None if it has none.
    """
    gpu = request.gpu
    if not request.operators or gpu is None or gpu.speeds is None:
        return (), ({},) * len(timed_operators)
    pace = _pace(request, gpu.speeds)
    operators: dict[str, tuple[int, TracedOperator]] = {}
    counts: list[Counter[int]] = []
    for records in timed_operators:
        counts.append(Counter())
        for record in records or ():
            if record.call not in operators:
                time_field = _TIME_FIELDS.get(record.work.kind)
                if not record.call or time_field is None:
                    continue
                # Operators are measured with a cold cache.
                cold = replace(record.work, reused=())
                seconds = operator_seconds(cold, gpu.speeds, pace, request.plan.launch)
                operators[record.call] = len(operators), TracedOperator(record.call, seconds, time_field)
            counts[-1][operators[record.call][0]] += record.work.times
    return tuple(operator for _, operator in operators.values()), counts


def _gpu_figures(
    traced: Trace, request: TraceRequest, facts: TraceFacts, timed_operators: Sequence[Sequence[OperatorRecord] | None]
) -> Iterator[GpuFigures]:
    """Yield the figures of the request's GPU, and of the other GPUs for which the trace is valid.

    Args:
        timed_operators: the operators of each section that take time, or None if it has none.
    """
    works = [None if records is None else [record.work for record in records] for records in timed_operators]
    replays: dict[int, tuple[Replayed, ...]] = {}
    alike = [gpu for gpu in request.others if capability_of(gpu) in traced.alike]
    for gpu in dict.fromkeys((request.gpu, *alike)):
        capability = gpu.compute_capability if gpu is not None else None
        workspace = workspace_bytes(capability)
        if workspace not in replays:
            replays[workspace] = tuple(_replay_peaks(traced, request, facts, capability))
        if gpu is None or gpu.speeds is None:
            yield GpuFigures(capability, None, replays[workspace], (None,) * len(timed_operators))
            continue
        launch, pace = request.plan.launch, _pace(request, gpu.speeds)
        times = tuple(None if each is None else step_seconds(each, gpu, pace, launch) for each in works)
        yield GpuFigures(capability, gpu.speeds, replays[workspace], times)


def _pace(request: TraceRequest, speeds: GpuSpeeds) -> Pace:
    pace = replace(usual_pace(request.target), allow_tf32=bool(request.plan.args.get("tf32")))
    return replace(pace, launch_seconds=speeds.launch_seconds) if speeds.launch_seconds else pace


def _machine_bytes(traced: Trace, section: Section, plan: TrainingPlan) -> int:
    """Return the host peak of all ranks of a machine together: equal, except in a save, which the first rank writes."""
    others = section.host_bytes
    if section.part.phase == SAVE and plan.launch.processes > 1:
        others = traced.phase(SAVE_ELSEWHERE).host_peak.bytes
    return section.host_bytes + (plan.launch.per_machine - 1) * others


def _replay_peaks(
    traced: Trace, request: TraceRequest, facts: TraceFacts, capability: tuple[int, int] | None
) -> Iterator[Replayed]:
    """Yield the peaks of the caching allocator with fixed segments, then with expandable segments."""
    if request.target == "cpu" or request.steps_alone:
        return
    after = _with_shorter_steps(traced, facts) if request.varied else None
    for expandable in (False, True):
        run = partial(replay, capability=capability, expandable_segments=expandable, emptied=request.emptied)
        result = run(traced)
        yield Replayed(
            result.peak_allocated_bytes,
            result.peak_reserved_bytes,
            short_of_memory(result, partial(run, traced)).peak_reserved_bytes,
            max(0, run(after).peak_reserved_bytes - result.peak_reserved_bytes) if after is not None else None,
        )


def _with_shorter_steps(traced: Trace, facts: TraceFacts) -> Trace:
    """Return the trace with steps on shorter micro-batches inserted before its second step."""
    batch = MicroBatch(facts.worst_rows, facts.worst_tokens // facts.worst_rows)
    step = traced.phase(step_name(1))
    return varied(traced, step, batch, steps_before(batch.tokens, len(micro_batches(traced, step))))
