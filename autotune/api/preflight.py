"""``autotune.PreflightCallback``: a trainer callback that checks before the first step whether the training fits."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers import PreTrainedModel, Trainer, TrainerCallback

from autotune.api.check import DRY_RUN, will_not_fit
from autotune.api.ranks import RanksError, StoreRanks, ranks_of
from autotune.api.running import LIBRARIES, available_bytes, check_optimizer, launching_of
from autotune.app.arguments import CheckArguments
from autotune.app.check.check import check_object
from autotune.core.documents.verdict import EXIT_CODES, Outcome, Verdict
from autotune.core.files.scratch import scratch_folder
from autotune.core.plan import NO_EVALUATION
from autotune.errors import AutotuneError, InputError, one_line
from autotune.inspection.machine import parse_budget

if TYPE_CHECKING:
    import transformers

_LOG = logging.getLogger(__name__)
_PREPARED: Mapping[str, tuple[str, ...]] = {
    "DPOConfig": ("prompt_ids", "chosen_ids", "rejected_ids"), "KTOConfig": ("prompt_ids", "completion_ids", "label"),
}  # fmt: skip
"""Columns of the tokenised rows of trainers that take only text."""
_STEP_METHODS = ("compute_loss", "training_step", "prediction_step")
"""Methods of a trainer by which it trains and evaluates."""


class PreflightCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Stops a training before its first step if its worst micro-batch will not fit.

    It traces the step in separate processes, with the trainer's arguments, model configuration and rows. This takes
    some seconds and no device memory::

        trainer = DPOTrainer(…, callbacks=[autotune.PreflightCallback()])
        trainer.train()  # raises autotune.WillNotFit, or trains

    A training that is too close to call, unknown, or cannot be checked starts with a logged warning, unless
    ``when_unsure`` is ``fail``. With ``dataset``, evaluation rows are assumed to be like the training rows.

    With several processes, each has the callback. Rank 0 checks the plan of all ranks against the least memory of any;
    the others wait for its verdict, so that all ranks stop with the same message, or train.

    Args:
        dataset: source of the rows, as for :func:`autotune.check`. None: the trainer's own rows.
        memory_budget: limit of the training's memory; None: the device's free memory plus what it uses already.
        when_unsure: ``pass`` or ``fail``.

    Raises:
        InputError: ``when_unsure`` is neither, or ``memory_budget`` is no size of at least 1 MiB.
    """

    def __init__(
        self,
        *,
        dataset: str | Path | None = None,
        memory_budget: str | int | None = None,
        when_unsure: Literal["pass", "fail"] = "pass",
    ) -> None:
        self._arguments = CheckArguments(None, dataset=dataset, memory_budget=memory_budget, when_unsure=when_unsure)
        if memory_budget is not None:
            # An invalid budget is an error here; when training starts, it would only be a warning.
            parse_budget(memory_budget)

    def on_train_begin(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Check the training.

        Raises:
            WillNotFit: it will not fit, and ``auto_find_batch_size`` is off.
            AutotuneError: it cannot be checked, and ``when_unsure`` is ``fail``.
        """
        try:
            verdict = self._agree(args, _trainer_of(state), kwargs, ranks_of(args))
        except RanksError as error:
            # Every process gets this error, so all of them train, or none.
            verdict = error
        logs = args.process_index == 0
        if isinstance(verdict, AutotuneError):
            if self._arguments.passes is False:
                raise verdict
            if logs:
                remedy = "" if verdict.hint else f" {DRY_RUN}"
                _LOG.warning("autotune cannot check this training: %s%s", verdict, remedy)
            return
        # The trainer exists already, so a finding that it cannot be built is wrong here.
        # With auto_find_batch_size, transformers retries with smaller micro-batches after running out of memory.
        if verdict.exit_code == EXIT_CODES[Outcome.DOES_NOT_FIT] and not args.auto_find_batch_size:
            raise will_not_fit(verdict)
        if logs:
            fits = verdict.outcome is Outcome.FITS
            log = _LOG.info if fits else _LOG.warning
            log("autotune: %s", verdict.headline if fits else will_not_fit(verdict))

    def _agree(self, args: Any, trainer: Any, kwargs: dict[str, Any], ranks: StoreRanks) -> Verdict | AutotuneError:
        """Return the verdict of the first process, or why it has none; the same in every process.

        Raises:
            RanksError: the processes cannot agree.
            AutotuneError: the first process failed by something else, which it raises itself.
        """
        given = self._arguments.memory_budget
        if ranks.rank > 0:
            ranks.gather(_Budget.of(given, args, trainer))
            return ranks.broadcast(_FirstRankReply()).result()
        answer = _FirstRankReply(ended="it was ended")
        try:
            budgets = ranks.gather(_Budget.of(given, args, trainer))
            answer = _FirstRankReply(verdict=self._verdict(args, trainer, kwargs, _smallest_budget(budgets)))
        except AutotuneError as error:
            answer = _FirstRankReply(message=error.message, hint=error.hint)
        except OSError as error:
            answer = _FirstRankReply(message=f"Files of the check cannot be written: {error}.")
        except Exception as error:
            answer = _FirstRankReply(ended=f"{type(error).__name__}: {error}")
            raise
        finally:
            # The other processes wait for this, even after an error here.
            ranks.broadcast(answer)
        return answer.result()

    def _verdict(self, args: Any, trainer: Any, kwargs: dict[str, Any], budget: str | int | None) -> Verdict:
        model, processor = kwargs["model"], kwargs["processing_class"]
        if processor is None:
            raise InputError("The trainer has no tokenizer.", hint="Give it processing_class=.")
        adapters = getattr(model, "peft_config", {})
        peft_config = next(iter(adapters.values()), None)
        with scratch_folder() as name:
            folder = Path(name)
            _check_whole(model, adapters)
            # An adapter added by transformers wraps the base in no PeftModel.
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            evaluates = args.eval_strategy != NO_EVALUATION or args.eval_on_start
            _check_own_step(trainer, evaluates=evaluates)
            check_optimizer(trainer)
            _check_no_other_model(trainer, base, adapts=peft_config is not None)
            quantization = _save_model(base, processor, folder / "model")
            config = _arguments(args, base, quantization)
            teacher = getattr(trainer, "teacher_model", None)
            if teacher is not None:
                # The trainer ignores the one that its configuration names, which is for TRL's command.
                teacher = trainer.accelerator.unwrap_model(teacher)
                quantization = _save_model(teacher, processor, folder / "teacher")
                config.teacher_model_name_or_path = str(folder / "teacher")
                config.teacher_model_init_kwargs, config.teacher_model_revision = _loading(teacher, quantization), None
            dataset, prepared, evaluated = self._arguments.dataset, False, None
            if dataset is None:
                # A trainer's own rows are tokens, for which TRL refuses this field.
                config.assistant_only_loss = False
                trained = kwargs["train_dataloader"].dataset
                dataset, prepared = _rows(args, trained, folder / "train.parquet")
                if evaluates:
                    evaluated, _ = _rows(args, trainer.eval_dataset, folder / "test.parquet", trained.column_names)
            check_arguments = replace(
                self._arguments,
                config=config,
                model=str(folder / "model"),
                dataset=dataset,
                peft_config=peft_config,
                gpu="cpu" if args.device.type == "cpu" else None,
                memory_budget=budget,
            )
            launching = launching_of(args, trainer and trainer.accelerator.state)
            return check_object(check_arguments, launching, prepared=prepared, evaluated=evaluated)


@dataclass(frozen=True)
class _Budget:
    """The memory budget of a process.

    Attributes:
        size: the given one, or the device's free memory; None for a CPU.
        missing: why there is none; empty otherwise.
    """

    size: str | int | None = None
    missing: str = ""

    @classmethod
    def of(cls, given: str | int | None, args: Any, trainer: Any) -> _Budget:
        """Return the given budget, or the free memory, or why it is not known: the other processes wait for it."""
        try:
            return cls(given or available_bytes(args, trainer))
        except AutotuneError as error:
            return cls(missing=error.message)
        # torch.AcceleratorError is one.
        except RuntimeError as error:
            return cls(missing=f"The free memory of {args.device} cannot be read: {one_line(error)}")


@dataclass(frozen=True)
class _FirstRankReply:
    """The message of the first process to the others.

    Attributes:
        message, hint: why it cannot check the training; empty with a verdict.
        ended: the error that ended it; empty otherwise.
    """

    verdict: Verdict | None = None
    message: str = ""
    hint: str = ""
    ended: str = ""

    def result(self) -> Verdict | AutotuneError:
        """Return the verdict, or the reason why there is none.

        Raises:
            AutotuneError: the first process failed otherwise.
        """
        if self.ended:
            raise AutotuneError(f"The check in the first process of this training failed: {self.ended}.")
        return self.verdict or InputError(self.message, hint=self.hint)


def _save_model(model: Any, processor: Any, folder: Path) -> Any:
    """Save the model's configuration and tokenizer; return its quantisation, by which weights are loaded."""
    config = copy.deepcopy(model.config)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        del config.quantization_config
    config.architectures = [_architecture(model)]
    config.save_pretrained(folder)
    processor.save_pretrained(folder)
    return quantization


def _check_whole(model: Any, adapters: Mapping[str, Any]) -> None:
    """Check that one device holds all layers of a model and trains all weights or one adapter, as a trace assumes.

    For a model that has an adapter already, TRL adds a frozen copy of it as the reference (trl 1.16,
    ``DPOTrainer.__init__``).

    Args:
        adapters: those that the model has, by name.

    Raises:
        InputError: layers are on several devices, some weights are frozen, or there are several adapters.
    """
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise InputError(f"The model's layers are spread over {', '.join(sorted(devices))}, which is not traced.")
    if not adapters and not all(weight.requires_grad for weight in model.parameters()):
        raise InputError("Some of the model's weights are frozen, which is not traced.")
    if len(adapters) > 1:
        raise InputError(f"The model has {len(adapters)} adapters ({', '.join(adapters)}), and one alone is traced.")


def _trainer_of(state: transformers.TrainerState) -> Any:
    """Return the trainer that has a state: transformers does not pass the trainer to its callbacks.

    Several trainers may share a callback, for example in cells of a notebook.
    """
    trainers = (found for found in gc.get_objects() if issubclass(type(found), Trainer))
    # A trainer whose construction failed has no state.
    return next((found for found in trainers if getattr(found, "state", None) is state), None)


def _check_own_step(trainer: Any, *, evaluates: bool) -> None:
    """Check that a trainer trains and evaluates with TRL's own code, as a trace assumes.

    With the user's own metrics, evaluation collects the logits of all rows on the device
    (``Trainer.evaluation_loop``).

    Raises:
        InputError: it has methods, a loss or metrics of its own.
    """
    names = ("compute_loss_func", "rollout_func", *(("compute_metrics",) if evaluates else ()))
    # With older transformers releases, TRL passes the loss as text.
    own = next((name for name in names if callable(getattr(trainer, name, None))), None)
    methods = (name for name in _STEP_METHODS if not _is_of(LIBRARIES, getattr(type(trainer), name, None)))
    own = own or next(methods, None)
    if not _is_of(LIBRARIES[:1], getattr(trainer, "data_collator", None)):
        own = "data_collator"
    if own is not None:
        raise InputError(f"The trainer has its own {own}, which is not traced.")


def _is_of(libraries: Collection[str], item: Any) -> bool:
    """Return whether a function, or the class of an object, comes from one of these libraries; true for None."""
    return item is None or item.__module__.partition(".")[0] in libraries


def _check_no_other_model(trainer: Any, model: Any, *, adapts: bool) -> None:
    """Check that a trainer holds no model on its device that a trace lacks: a reward model or its own reference model.

    A trace assumes that the reference is a copy of the model, and that there is none with an adapter or precomputed
    log-probabilities; TRL keeps a reference passed by the user in any case (trl 1.16, ``DPOTrainer.__init__``). With
    FSDP, the weights' types are not compared, since accelerate casts the trained weights to float32
    (``fsdp2_prepare_model``).

    Raises:
        InputError: there is such a model.
    """
    for scoring in getattr(trainer, "reward_funcs", ()):
        if isinstance(scoring, PreTrainedModel):
            raise InputError(f"A reward model ({_architecture(scoring)}) is on the device, which is not traced.")
    reference = getattr(trainer, "ref_model", None)
    if reference is None:
        return
    (kind, *own), (name, *copied) = map(_model_facts, (trainer.accelerator.unwrap_model(reference), model))
    alike = kind == name and (own[:1] == copied[:1] if trainer.is_fsdp_enabled else own == copied)
    if adapts or getattr(trainer, "precompute_ref_logps", False) or not alike:
        raise InputError(f"The trainer has its own reference model ({kind}), which is not traced.")


def _model_facts(model: Any) -> tuple[str, int, Any]:
    """Return a model's class, the number of its weights, and their type."""
    return _architecture(model), sum(weight.numel() for weight in model.parameters()), getattr(model, "dtype", None)


def _architecture(model: Any) -> str:
    """Return the name of a model's class, which FSDP2 replaces by a subclass (``torch.distributed.fsdp``)."""
    names = [kind.__name__ for kind in type(model).__mro__]
    return names[names.index("FSDPModule") + 1] if "FSDPModule" in names else names[0]


def _smallest_budget(budgets: list[_Budget]) -> str | int | None:
    """Return the smallest memory budget of the processes: the given one, or the free memory of their devices.

    Raises:
        InputError: a process has none.
    """
    missing = next((budget.missing for budget in budgets if budget.missing), "")
    if missing:
        raise InputError(missing)
    known = [budget.size for budget in budgets if isinstance(budget.size, int)]
    return min(known) if known else budgets[0].size


def _loading(model: Any, quantization: Any) -> dict[str, object]:
    """Return the arguments of ``from_pretrained`` that load a model as it is."""
    loaded = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "attn_implementation": model.config._attn_implementation,
        "experts_implementation": model.config._experts_implementation,
        "use_kernels": getattr(model, "use_kernels", None) or None,
        "quantization_config": quantization,
    }
    return {name: value for name, value in loaded.items() if value is not None}


def _arguments(args: Any, model: Any, quantization: Any) -> Any:
    """Return the arguments with the loaded model's type and attention, and with the model's own checkpointing.

    Checkpointing may already be on, for example by PEFT's ``prepare_model_for_kbit_training``.
    """
    found = copy.copy(args)
    found.model_init_kwargs = _loading(model, quantization)
    found.gradient_checkpointing = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    return found


def _rows(args: Any, rows: Any, file: Path, columns: Collection[str] = ()) -> tuple[Path, bool]:
    """Write the rows of a trainer; return the file, and whether its rows are tokens that TRL takes as text.

    Rows with images are as the user has them: TRL tokenises them in the collator.

    Args:
        rows: a dataset, or several by name, each of which is evaluated.
        columns: those to write of rows that are not tokens; empty: all.
    """
    import datasets

    several = list(rows.values()) if isinstance(rows, dict) else [rows]
    # A stream may be endless.
    if not all(isinstance(each, datasets.Dataset) for each in several):
        raise InputError("The trainer's rows are not a datasets.Dataset.", hint="Give PreflightCallback(dataset=…).")
    kinds = [kind.__name__ for kind in type(args).__mro__]
    tokens = next((known for kind, known in _PREPARED.items() if kind in kinds), ())
    prepared = bool(tokens) and all(set(tokens) <= set(each.column_names) for each in several)
    kept = tokens if prepared else columns or {name for each in several for name in each.column_names}
    # Formats such as torch's yield values that Parquet lacks.
    parts = [each.select_columns([name for name in each.column_names if name in kept]) for each in several]
    try:
        datasets.concatenate_datasets([each.with_format(None) for each in parts]).to_parquet(str(file))
    except ValueError as error:
        raise InputError(f"The trainer's datasets to evaluate on differ: {one_line(error)}") from error
    return file, prepared
