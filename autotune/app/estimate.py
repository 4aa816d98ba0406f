"""The use case behind ``autotune.estimate``: traces the step of a user's existing configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autotune.app.options import check_evaluation, checked_options
from autotune.app.planned import MOST_TOKENS, planned_machine, planned_workload
from autotune.app.requests import traces_of
from autotune.app.user_plan import user_plan
from autotune.core.batch_geometry import Layout, Shape
from autotune.core.estimate import MemoryEstimate
from autotune.core.events import Listener
from autotune.core.plan import TrainingPlan
from autotune.core.program import EVALUATE
from autotune.core.setting import Setting
from autotune.core.workload import ModelProfile
from autotune.errors import AutotuneError, InputError
from autotune.inspection.model import model_source
from autotune.planning.extrapolation.fit import Fit, points
from autotune.planning.extrapolation.memory import TRACED_ERROR, memory_estimate
from autotune.planning.extrapolation.shape import Anchors, Basis
from autotune.planning.planner import depths_of
from autotune.planning.requests import trace_request
from autotune.planning.tracing.cache import user_cache
from autotune.planning.varied import varied_bytes
from autotune.planning.vllm import assumed, engine_of, with_vllm
from autotune.probing.tracing import ServerTracer, Untraceable
from autotune.trainers import find_trainer


def estimate(
    model: str,
    config: object,
    peft_config: object | None,
    shape: tuple[int, int],
    gpu: str,
    listener: Listener,
    eval_shape: tuple[int, int] | None = None,
) -> MemoryEstimate:
    """Return the memory and time of a configuration; see :func:`autotune.estimate`."""
    for rows, tokens in (shape, eval_shape or shape):
        if rows < 1 or tokens < 1 or rows * tokens > MOST_TOKENS:
            raise InputError(
                f"A micro-batch of {rows} rows of {tokens} tokens is not possible.",
                hint=f"Both are at least 1, and together at most {MOST_TOKENS:,} tokens.",
            )
    user = user_plan(config, peft_config, evaluates=eval_shape is not None)
    plan = user.plan
    check_evaluation(find_trainer(plan.trainer), evaluates=eval_shape is not None)
    source, planned = model_source(model, "random"), planned_machine(gpu)
    options = checked_options(trainer=plan.trainer, exclude=("attention",))
    cache = user_cache()
    rows, tokens = shape[0], _padded(shape[1], plan.args)
    layout, traced = _traced_shape(plan, rows, tokens)
    micro_batches = int(str(plan.args["gradient_accumulation_steps"]))
    with ServerTracer(planned.cores, listener) as tracer:
        workload = planned_workload(options, source, None, tracer, cache, listener)
        setting = Setting(workload, planned.machine, rows, 1.0)
        traces = traces_of(workload, planned.machine, tracer, cache)
        layers = len(workload.model.layer_kinds)

        def fitted(layout: Layout, at: Shape) -> Fit:
            anchors = Anchors(Basis.CONSTANT, (at,))
            wanted = points(depths_of(plan, workload.model.layer_kinds), anchors)
            allocators = (plan.allocator,)
            requests = [trace_request(plan, layout, at, depth, setting, planned.gpu, allocators) for depth, _ in wanted]
            replies = traces.get(requests)
            failed = next((reply for reply in replies if isinstance(reply, Untraceable)), None)
            if failed is not None:
                raise AutotuneError(
                    f"{model} cannot be traced: {failed.reason}", hint="`autotune probe` can measure it."
                )
            found = [reply for reply in replies if not isinstance(reply, Untraceable)]
            return Fit(anchors, dict(zip(wanted, found, strict=True)))

        fit = fitted(layout, traced)
        forecast = worst = fit.forecast(layers, traced, micro_batches, plan.allocator)
        if eval_shape is not None:
            evaluated = _traced_shape(plan, eval_shape[0], _padded(eval_shape[1], plan.args))
            beside = fitted(*evaluated).forecast(layers, evaluated[1], 1, plan.allocator)
            worst = forecast.taking(EVALUATE, beside, per_step=0.0)
        added_bytes = varied_bytes(traces, plan, layout, traced, layers, setting, planned.gpu)
    memory = memory_estimate(worst, forecast, micro_batches, planned.gpu, TRACED_ERROR)
    shared = with_vllm(memory, plan, setting)
    if isinstance(shared, str):
        raise AutotuneError(
            f"{model} cannot be trained like that: {shared}.", hint="Raise vllm_gpu_memory_utilization."
        )
    engine = engine_of(plan, workload.model)
    of_vllm = assumed(engine, workload.model) if engine is not None else ()
    about_sizes = _size_assumptions(rows, tokens, plan.args, workload.model)
    assumptions = (*user.assumptions, *about_sizes, *sorted(fit.assumptions), *of_vllm)
    return replace(shared, varied_bytes=added_bytes, assumptions=assumptions)


def _traced_shape(plan: TrainingPlan, rows: int, tokens: int) -> tuple[Layout, Shape]:
    layout = find_trainer(plan.trainer).layout(plan, rows)
    return layout, Shape(1, rows * tokens) if layout is Layout.FLAT else Shape(rows, tokens)


def _padded(tokens: int, args: Mapping[str, object]) -> int:
    """Return the tokens of a row with the padding that a collator adds; rows end to end are padded as a whole."""
    multiple = args.get("pad_to_multiple_of")
    return -(-tokens // multiple) * multiple if isinstance(multiple, int) else tokens


def _size_assumptions(rows: int, tokens: int, args: Mapping[str, object], model: ModelProfile) -> Iterator[str]:
    own_rows, length = args["per_device_train_batch_size"], args.get("max_length")
    if own_rows != rows:
        yield f"{rows} rows, as the shape says, and not the configuration's per_device_train_batch_size={own_rows}"
    if isinstance(length, int) and length < tokens:
        yield f"rows of {tokens} tokens, as the shape says, though the configuration's max_length={length} cuts them"
    if model.max_positions is not None and tokens > model.max_positions:
        yield f"rows of {tokens} tokens work, though the model was made for {model.max_positions} positions"
