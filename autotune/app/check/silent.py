"""Reports silent behaviour of a training: dropped rows, mixed documents, rounded updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.app.epoch import rows_of_epoch
from autotune.app.notes import VLLM_SERVER_CLAUSE, notes_on_images
from autotune.core.configuration import DISPATCHING, Configuration
from autotune.core.documents.verdict import Finding, Severity
from autotune.core.files.nested import mapping
from autotune.core.plan import BEST_METRIC, TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry, Layout
from autotune.core.setting import Setting
from autotune.core.workload import DatasetProfile, DatasetSource, Workload
from autotune.techniques import max_length
from autotune.techniques.base import CrashReason, UnsearchedReason, facts, refused_or_ignored
from autotune.techniques.packing import CUTTING, NONE, PACKED_AT_ONCE, SEPARATING, SHUFFLED
from autotune.techniques.sharding import TIMING, ZERO_STAGES, zero_of, zero_stage
from autotune.techniques.vllm import SERVER
from autotune.trainers.base import Trainer
from autotune.units import format_share, plural
from autotune.userconfig.candidate import NearestCandidate
from autotune.userconfig.fields import BY_LENGTH, ORDER

_HALF = ("bfloat16", "float16")
# Keys, by their beginnings, that are read only if another one is true.
_SWITCHED = {
    "use_peft": ("lora_", "use_rslora", "use_dora"),
    "load_in_4bit": ("bnb_4bit_", "use_bnb_nested_quant"),
    "fsdp": ("fsdp_config",),
}
_ANSWERS, _DROPS, _BEST = "completion_only_loss", "dataloader_drop_last", "load_best_model_at_end"
_READING = (_BEST, "resume_from_checkpoint")
_GATHERS = "stage3_gather_16bit_weights_on_model_save"
# Its older name, which DeepSpeed 0.19 still reads.
_GATHERED = "stage3_gather_fp16_weights_on_model_save"
_ENGINES, _MIXED = ("deepspeed", "fsdp"), ("bf16", "fp16")


def silent_findings(
    plan: TrainingPlan,
    geometry: BatchGeometry,
    trainer: Trainer,
    setting: Setting,
    nearest: NearestCandidate,
    keys_set: Mapping[str, object],
    *,
    drops_last: bool = False,
) -> Iterator[Finding]:
    """Yield the behaviour of a training that its configuration does not show.

    Args:
        nearest: the plan as a candidate.
        keys_set: the keys that the user wrote.
        drops_last: the configuration's ``dataloader_drop_last``.
    """
    epoch = rows_of_epoch(plan, geometry, trainer, setting.workload)
    yield Finding(Severity.NOTE, _step(plan, geometry, trainer, epoch, drops_last=drops_last))
    if drops_last:
        yield from _without_micro_batch(plan, geometry, epoch, trainer, setting.workload, keys_set)
    yield from _left_out(plan, trainer, setting.workload)
    for profile, whose in zip(setting.workload.profiles, ("", " of the evaluation"), strict=False):
        yield from (Finding(Severity.SILENT, remark) for remark in profile.remarks)
        if not facts(max_length.MaxLength, trainer.name).changes:
            yield from _rows(plan, profile, whose)
    rows = setting.workload.dataset
    if keys_set.get(_ANSWERS) is True and rows.trainable_tokens == rows.documents.tokens:
        message = f"{_ANSWERS} has no effect on rows without a separate prompt: the loss counts every token."
        yield Finding(Severity.SILENT, message, _ANSWERS)
    if rows.images is not None and keys_set.get(ORDER) == BY_LENGTH:
        message = f"{ORDER}={BY_LENGTH} fails: it needs tokenised rows, and TRL tokenises rows with images only in"
        yield Finding(Severity.ERROR, f"{message} micro-batches. Leave {ORDER} out.", ORDER)
    yield from _mixing(plan, setting)
    if plan.args.get("use_vllm") and plan.args.get("vllm_mode") == SERVER:
        yield Finding(Severity.NOTE, f"A {VLLM_SERVER_CLAUSE}", "vllm_mode")
    yield from _weights(plan, keys_set, setting.workload.model.dtype)
    yield from _of_engine(plan)
    yield from _without_switch(plan, keys_set)
    yield from _positions(geometry, trainer, setting)
    images = notes_on_images(plan.model.get("attn_implementation"), setting.workload)
    yield from (Finding(Severity.NOTE, note) for note in images)
    yield from _rules(plan, trainer, setting, nearest)


def _without_micro_batch(
    plan: TrainingPlan,
    geometry: BatchGeometry,
    epoch: int,
    trainer: Trainer,
    workload: Workload,
    keys_set: Mapping[str, object],
) -> Iterator[Finding]:
    """Yield whether ``dataloader_drop_last`` drops all rows of an epoch, or of an evaluation.

    Args:
        epoch: rows of an epoch.
    """
    at_once = plan.rows * plan.data_ranks
    if epoch < at_once:
        message = f"{_DROPS} drops all {plural(epoch, 'row')} of an epoch: a micro-batch of all processes has"
        yield Finding(Severity.ERROR, f"{message} {at_once:,}.", _DROPS)
    if workload.evaluation is None or geometry.evaluation is None or trainer.generates:
        return
    every = workload.evaluation.documents.rows
    rows = round(geometry.evaluation.rows * (workload.documents_split_off or every) / every)
    at_once = plan.count("per_device_eval_batch_size") * plan.data_ranks
    if rows < at_once:
        # transformers looks for the metric of the best checkpoint after each evaluation (`_determine_best_metric`).
        fails = any(keys_set.get(name) for name in (_BEST, BEST_METRIC))
        message = f"{_DROPS} drops all {plural(rows, 'row')} of an evaluation, so that it has no loss: a micro-batch"
        severity = Severity.ERROR if fails else Severity.SILENT
        yield Finding(severity, f"{message} of all processes has {at_once:,}.", _DROPS)


def dispatch_findings(
    plan: TrainingPlan,
    geometry: BatchGeometry,
    trainer: Trainer,
    workload: Workload,
    config: Configuration,
) -> Iterator[Finding]:
    """Yield an error if accelerate's first process reads the micro-batches of all processes, and cannot join them.

    It joins tensors along their rows (accelerate 1.15, ``DataLoaderDispatcher._fetch_batches``).
    """
    if plan.data_ranks == 1 or not config.dispatches:
        return
    name, key = DISPATCHING
    packs = plan.args.get("packing") or geometry.layout is Layout.FLAT
    if trainer.generates or packs or len(trainer.widths(plan, workload.dataset.documents)[0]) > 1:
        message = f"{key} fails: one process reads all micro-batches, and accelerate joins them only if all are as"
        yield Finding(Severity.ERROR, f"{message} wide. Leave it out.", name)


def checkpoint_findings(plan: TrainingPlan, config: Configuration) -> Iterator[Finding]:
    """Yield that memory is without the reading of a checkpoint at the start or the end, if DeepSpeed reads it.

    It reads optimizer state too, for the best model as well (deepspeed 0.19, ``DeepSpeedEngine.load_checkpoint``);
    PyTorch copies it to the device before it drops the former state. Other engines read no more than they hold later.
    """
    names = [name for name in _READING if config.values.get(name)]
    if names and plan.args.get("deepspeed"):
        # ZeRO-3 restores weights from their float32 copies.
        weights = "" if zero_stage(plan) == ZERO_STAGES["zero3"] else "all weights and "
        message = f"Assumed: memory is without the checkpoint that {' and '.join(names)} reads: each process reads"
        rest = f"{weights}its share of optimizer state to the host, and copies that to its device, which then has both"
        yield Finding(Severity.NOTE, f"{message} {rest} the old and the new state.", names[0])


def row_findings(source: DatasetSource, trainer: Trainer, *, streams: bool) -> Iterator[Finding]:
    """Yield the assumptions about rows that TRL splits or streams.

    Args:
        streams: whether TRL streams them; the check reads them whole.
    """
    if source.test_size is not None:
        message = f"test_split_size={source.test_size} sets aside random rows for evaluation"
        # It also shuffles the others (trl 1.16, ``get_dataset``), which KTO then trains in that order.
        shuffled = " in the file's order. TRL shuffles them, so a larger one may be drawn" if trainer.ordered else ""
        message = f"{message}; the worst micro-batch is that of all rows{shuffled}."
        yield Finding(Severity.NOTE, message, "test_split_size")
    if streams:
        message = "The rows are streamed. The worst micro-batch is that of all rows, even if max_steps is small."
        yield Finding(Severity.NOTE, message, "max_steps")


def _step(plan: TrainingPlan, geometry: BatchGeometry, trainer: Trainer, epoch: int, *, drops_last: bool) -> str:
    ranks, copies, documents = plan.data_ranks, trainer.copies(plan), geometry.documents
    together = plan.launch.processes // ranks
    accumulated = f" x {plan.micro_batches} accumulated" if plan.micro_batches > 1 else ""
    spread = f" x {ranks} processes" if ranks > 1 else ""
    if together > 1:
        spread = f" x {plural(ranks, 'group')} of {together} processes"
    noun = trainer.document_noun.removesuffix("s") if documents == 1 else trainer.document_noun
    prompts = documents / copies
    of_prompts = f" of {prompts:,.4g} {'prompt' if prompts == 1 else 'prompts'}" if copies > 1 else ""
    return (
        f"An optimizer step trains on {documents:,.4g} {noun}{of_prompts} ({plural(plan.rows, 'row')}{accumulated}"
        f"{spread}); an epoch has {plural(plan.steps_of_epoch(epoch, drops_last=drops_last), 'step')}."
    )


def _left_out(plan: TrainingPlan, trainer: Trainer, workload: Workload) -> Iterator[Finding]:
    prompts = workload.documents_trained
    if left_out := prompts - trainer.rows_of_epoch(plan, prompts):
        message = f"An epoch leaves out {left_out:,} of {prompts:,} prompts, drawn anew each epoch: a generation batch"
        yield Finding(Severity.SILENT, f"{message} has {trainer.rows_per_generation(plan):,}.")


def _rows(plan: TrainingPlan, profile: DatasetProfile, whose: str) -> Iterator[Finding]:
    documents, length, images = profile.documents, plan.number("max_length"), profile.images
    if length is None or length >= documents.longest:
        return
    if images is not None and length < images.ends.longest:
        failing = plural(images.ends.rows - images.ends.up_to(length).rows, "row")
        message = f"TRL fails on {failing}{whose}: max_length={length:,} cuts tokens of images, which need"
        yield Finding(Severity.ERROR, f"{message} {images.ends.longest:,}.", "max_length")
        return
    found = max_length.limit_with(documents, length, strategy_of(plan))
    if found.rows_dropped == documents.rows:
        message = f"max_length={length:,} leaves none of the {documents.rows:,} rows{whose}"
        # TRL fails only where it needs the loss, as for the best checkpoint.
        without = " An evaluation of no rows has no loss." if whose else ""
        hint = f"{documents.first_kept:,} or more keep some."
        yield Finding(Severity.ERROR, f"{message}; {hint}{without}", "max_length")
        return
    # TRL drops no row with images.
    drops = "drops" if images is None else "leaves nothing to train on of"
    parts = [f"{drops} {found.rows_dropped:,}"] if found.rows_dropped else []
    parts += [f"cuts {found.rows_cut:,}"] if found.rows_cut else []
    if parts:
        message = f"max_length={length:,} {' and '.join(parts)} of {documents.rows:,} rows{whose}, and keeps"
        yield Finding(Severity.SILENT, f"{message} {format_share(found.coverage)} of the tokens.", "max_length")


def strategy_of(plan: TrainingPlan) -> str:
    """Return a plan's ``packing_strategy``, or ``none`` if it does not pack."""
    return str(plan.args.get("packing_strategy", CUTTING)) if plan.args.get("packing") else NONE


def _mixing(plan: TrainingPlan, setting: Setting) -> Iterator[Finding]:
    strategy = strategy_of(plan)
    if strategy not in (*SEPARATING, NONE):
        message = f"With packing_strategy={strategy}, documents attend to their neighbours."
        yield Finding(Severity.SILENT, message, "packing")
    if strategy != NONE and not plan.args.get(SHUFFLED) and setting.workload.dataset.documents.rows > PACKED_AT_ONCE:
        message = (
            f"Packing is computed for rows in random order. TRL packs {PACKED_AT_ONCE:,} rows at a time in the file's"
            " order: if lengths change along the file, packed rows are less full and a step has fewer documents. Write"
            f" {SHUFFLED}: true."
        )
        yield Finding(Severity.NOTE, message, "packing")
    if strategy not in SEPARATING and not plan.args.get("padding_free"):
        return
    attention = str(plan.model.get("attn_implementation") or "sdpa")
    check, model = setting.workload.packing_checks.get(attention), setting.workload.model.model_type
    key = "packing" if strategy in SEPARATING else "padding_free"
    if check is None or check.max_difference is None:
        message = (
            f"This machine cannot check whether documents in one row attend to each other with {attention} on {model}"
        )
        yield Finding(Severity.NOTE, f"{message}: {check.reason}." if check is not None else f"{message}.", key)
    elif not check.separates:
        message = f"Documents in one row attend to one another with {attention} on {model}: {check.reason}."
        yield Finding(Severity.SILENT, message, key)


def _of_engine(plan: TrainingPlan) -> Iterator[Finding]:
    """Yield whether an engine saves no model at the end of a training, and which times of its own are left out.

    transformers 5.23, ``Trainer.save_model``; accelerate 1.15, ``Accelerator.get_state_dict``.
    """
    if plan.entry("args.fsdp_config.state_dict_type") is not None:
        message = (
            "state_dict_type: SHARDED_STATE_DICT, accelerate's default, saves shards in checkpoints, and no model at"
        )
        yield Finding(Severity.SILENT, f"{message} the end of a training. Write FULL_STATE_DICT.", "fsdp_config")
    gathers = any(zero_of(plan).get(name) is True for name in (_GATHERS, _GATHERED))
    if zero_stage(plan) == ZERO_STAGES["zero3"] and not gathers and not plan.model.get("use_peft"):
        message = f"ZeRO-3 without {_GATHERS}: true saves shards in place of a model, which DeepSpeed's zero_to_fp32.py"
        yield Finding(Severity.SILENT, f"{message} converts.", "deepspeed")
    document = mapping(plan.args.get("deepspeed"))
    times = [name for name in TIMING if mapping(document.get(name)).get("enabled", document.get(name)) is True]
    if times:
        message = f"Assumed: speeds are without {' and '.join(times)}, by which DeepSpeed waits for the GPU."
        yield Finding(Severity.NOTE, message, "deepspeed")


def _without_switch(plan: TrainingPlan, keys_set: Mapping[str, object]) -> Iterator[Finding]:
    for switch, beginnings in _SWITCHED.items():
        keys = [name for name in keys_set if name.startswith(beginnings)]
        if keys and not (plan.model.get(switch) or plan.args.get(switch)):
            have = "has" if len(keys) == 1 else "have"
            message = f"{', '.join(keys)} {have} no effect without {switch}: true."
            yield Finding(Severity.SILENT, message, keys[0])


def _weights(plan: TrainingPlan, keys_set: Mapping[str, object], stored: str) -> Iterator[Finding]:
    """Yield the effects of the weights' type on a training.

    Args:
        stored: the type that ``dtype: auto`` selects.
    """
    dtype, adapters = str(plan.model.get("dtype")).replace("auto", stored), bool(plan.model.get("use_peft"))
    # In mixed precision, DeepSpeed keeps a copy in float32 (``zero/stage_1_and_2.py``, 0.19), and accelerate trains
    # FSDP's weights in float32 (``fsdp2_prepare_model``, 1.15).
    engine, mixed = (any(plan.args.get(name) for name in names) for names in (_ENGINES, _MIXED))
    if dtype in _HALF and not adapters and not (engine and mixed):
        message = (
            f"The weights are trained in {dtype}, without a copy in float32: an update that is small compared with its"
            " weight is rounded away."
        )
        yield Finding(Severity.SILENT, message, "dtype")
    if dtype == "float32" and adapters and "dtype" not in keys_set and not plan.model.get("load_in_4bit"):
        message = "The frozen weights are loaded in float32, since dtype is not set; dtype: bfloat16 halves their"
        yield Finding(Severity.NOTE, f"{message} memory.")


def _positions(geometry: BatchGeometry, trainer: Trainer, setting: Setting) -> Iterator[Finding]:
    model, longest = setting.workload.model, geometry.worst.tokens
    if geometry.worst.rows == 1:
        longest = min(longest, setting.workload.longest)
    if message := model.beyond_positions(longest):
        # Completions may be shorter.
        fails = model.embeds_positions and not trainer.generates
        yield Finding(Severity.ERROR if fails else Severity.SILENT, message, "max_length")


def _rules(plan: TrainingPlan, trainer: Trainer, setting: Setting, nearest: NearestCandidate) -> Iterator[Finding]:
    """Yield the techniques' rules about choices that TRL refuses or undoes, or that conflict."""
    for technique in trainer.techniques:
        if technique.name not in nearest.exact:
            continue
        choice = nearest.candidate[technique.name]
        conflict = technique.conflict(choice, nearest.candidate, setting)
        conflict = None if isinstance(conflict, UnsearchedReason) else conflict
        fails = isinstance(conflict, CrashReason)
        reason = conflict if fails else refused_or_ignored(technique, choice, trainer.name) or conflict
        if reason and technique.name not in ("packing", "padding_free", "max_length"):
            severity = Severity.ERROR if fails else Severity.SILENT
            yield Finding(severity, f"{technique.name}={choice}: {reason}.", technique.name)
    # The candidate may differ from the plan: it is the nearest one.
    refused, spoilt = trainer.refused(plan, setting.workload), trainer.unintended(nearest.candidate, setting)
    found = ((Severity.ERROR, refused), (Severity.SILENT, spoilt))
    yield from (Finding(severity, f"{why[:1].upper()}{why[1:]}.") for severity, why in found if why)
