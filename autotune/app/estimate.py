"""The use case of ``autotune.estimate``: traces the step of one configuration object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.app.arguments import SearchArguments
from autotune.app.options import MAX_TOKENS, check_evaluation, checked_options
from autotune.app.planned import planned_machine, planned_workload, rows_of_length
from autotune.app.public import check_type, logging_listener
from autotune.app.requests import traces_of
from autotune.core.documents.estimate import MemoryEstimate
from autotune.core.events import TRACING, Listener
from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry, Layout, Shape, Typical, rounded_up
from autotune.core.setting import Setting
from autotune.core.workload import ModelProfile, Workload
from autotune.errors import AutotuneError, InputError
from autotune.inspection.model import model_source
from autotune.planning.single import PlanTracer, SizedPlan, UntraceableError, VllmError
from autotune.planning.tracing.cache import user_cache
from autotune.planning.vllm import engine_of
from autotune.probing.tracing import ServerTracer
from autotune.trainers import find_trainer
from autotune.trainers.prompts import Prompted
from autotune.userconfig.fields import user_plan, with_nulls
from autotune.userconfig.objects import as_started, configuration_of, peft_words
from autotune.userconfig.sources import teacher_of

if TYPE_CHECKING:
    import peft
    import transformers

_SIZES = 2
_ROWS = "per_device_train_batch_size"


def estimate(
    model: str | Path,
    config: transformers.TrainingArguments,
    peft_config: peft.PeftConfig | None = None,
    *,
    shape: tuple[int, int],
    gpu: str | int,
    eval_shape: tuple[int, int] | None = None,
    listener: Listener | None = None,
) -> MemoryEstimate:
    """Predict memory and time of training with a configuration, by tracing its step; no GPU is needed.

    Args:
        model: hub id, local directory, or ``config.json``; no weights are needed.
        config: configuration of one of TRL's trainers, such as a ``trl.DPOConfig``. Fields that change a step are
            traced; an unsupported field is an error.
        peft_config: the trainer's argument of that name; only LoRA is supported.
        shape: rows of the largest micro-batch, and tokens of its longest row, those of a generated completion included;
            they replace the configuration's sizes. One of several rows is a token shorter, so that padding adds an
            attention mask. With packing or padding-free, the rows are concatenated.
        gpu: name of a GPU, such as ``H100-80GB``, a size such as ``24GiB``, or ``cpu`` for the CPU's allocator.
        eval_shape: rows of the largest micro-batch of evaluation, and tokens of its longest; None: evaluation is left
            out.
        listener: receives the events of the run; None: they are lines in the log of ``autotune``, as for
            :func:`autotune.plan`.

    Raises:
        InputError: an argument cannot be used.
        AutotuneError: the step cannot be traced; the message names the operator. A probe shows whether it trains.
    """
    check_type("model", model, str | Path)
    check_type("gpu", gpu, str | int)
    check_type("shape", shape, Sequence[int])
    check_type("eval_shape", eval_shape, Sequence[int] | None)
    for sizes in (shape, shape if eval_shape is None else eval_shape):
        if len(sizes) != _SIZES:
            raise InputError(f"A shape has two numbers, and {sizes!r} has {len(sizes)}.", hint="Give (rows, tokens).")
        rows, tokens = sizes
        if rows < 1 or tokens < 1 or rows * tokens > MAX_TOKENS:
            raise InputError(
                f"A micro-batch of {rows} rows of {tokens} tokens is not possible.",
                hint=f"Both are at least 1, and together at most {MAX_TOKENS:,} tokens.",
            )
    found, _ = as_started(configuration_of(config), config)
    user = user_plan(found, peft_words(peft_config), evaluates=eval_shape is not None)
    plan, trainer = user.plan, find_trainer(user.plan.trainer)
    check_evaluation(trainer, evaluates=eval_shape is not None)
    source, planned = model_source(model, "random", tokenizes=False), planned_machine(gpu)
    options = checked_options(SearchArguments(trainer=plan.trainer, exclude=("attention",)))
    if options.trainer.has_teacher:
        options = replace(options, teacher=teacher_of(found))
    cache = user_cache()
    layout, traced = _traced_shape(plan, *shape)
    rows, tokens = shape[0], shape[1] if layout is Layout.FLAT else int(traced.tokens)
    listener = listener or logging_listener()
    with ServerTracer(planned.hardware.cores, listener) as tracer:
        workload = planned_workload(options, source, None, tracer, cache, listener)
        if trainer.generates:
            plan = trainer.completed(replace(plan, args={**plan.args, _ROWS: rows}), workload)
        geometry = _geometry(plan, workload, *shape).in_steps(plan.micro_batches, ranks=1)
        if eval_shape is not None:
            geometry = replace(geometry, evaluation=_geometry(plan, workload, *eval_shape, evaluated=True))
        setting = Setting(workload, planned, rows, 1.0)
        steps = PlanTracer(traces_of(workload, planned, tracer, cache), setting, planned.gpu)
        sized = SizedPlan(with_nulls(plan, found), geometry)
        listener(TRACING)
        try:
            memory = steps.memory(sized, whole=True)
        except UntraceableError as error:
            raise AutotuneError(
                f"{model} cannot be traced: {error}", hint="`autotune probe` shows whether it trains."
            ) from error
        except VllmError as error:
            raise AutotuneError(
                f"{model} cannot be trained with this configuration: {error}.",
                hint="Raise vllm_gpu_memory_utilization.",
            ) from error
    engine = engine_of(plan, setting)
    of_vllm = engine.assumptions() if engine is not None else ()
    about_sizes = _size_assumptions(rows, tokens, user.plan.args, workload.model)
    assumptions = (*user.assumptions, *about_sizes, *memory.assumptions, *of_vllm)
    return replace(memory, assumptions=assumptions)


def _geometry(
    plan: TrainingPlan, workload: Workload, rows: int, tokens: int, *, evaluated: bool = False
) -> BatchGeometry:
    """Return the micro-batches of rows of a length, of which a completion is a part if the trainer generates any.

    Raises:
        InputError: completions leave no prompt.
    """
    trainer, (layout, shape) = find_trainer(plan.trainer), _traced_shape(plan, rows, tokens)
    if not isinstance(trainer, Prompted):
        return BatchGeometry(layout, shape, (Typical(shape),), rows * tokens, rows, rows)
    most = plan.count(trainer.max_completion_field)
    if tokens <= most:
        raise InputError(
            f"Completions of up to {most} tokens ({trainer.max_completion_field}) leave no prompt in a row of"
            f" {tokens} tokens.",
            hint="Give the tokens of the longest prompt and a completion together.",
        )
    documents = rows_of_length(workload, tokens - most, rows).dataset.documents
    found = (trainer.evaluation_geometry if evaluated else trainer.micro_batch_geometry)(plan, documents, rows)
    return replace(found, layout=layout)


def _traced_shape(plan: TrainingPlan, rows: int, tokens: int) -> tuple[Layout, Shape]:
    """Return the layout and the shape with the collator's padding; concatenated rows are padded as one row."""
    layout = find_trainer(plan.trainer).layout(plan, rows)
    rows, tokens = (1, rows * tokens) if layout is Layout.FLAT else (rows, tokens)
    width = rounded_up(tokens, plan.pad_multiple)
    return Layout.PADDED if layout is not Layout.FLAT and width > tokens else layout, Shape(rows, width)


def _size_assumptions(rows: int, tokens: int, args: Mapping[str, object], model: ModelProfile) -> Iterator[str]:
    own_rows, length = args[_ROWS], args.get("max_length")
    if own_rows != rows:
        yield f"{rows} rows, as in the shape, instead of the configuration's {_ROWS}={own_rows}"
    if isinstance(length, int) and length < tokens:
        yield f"rows of {tokens} tokens, as in the shape, though the configuration's max_length={length} cuts them"
    if model.max_positions is not None and tokens > model.max_positions:
        yield f"rows of {tokens} tokens work, though the model was made for {model.max_positions} positions"
