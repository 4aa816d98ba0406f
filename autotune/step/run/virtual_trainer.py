"""Builds TRL's trainer on a virtual device, with uninitialised weights, rows of a trace, and reported phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy, deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from accelerate.utils import recursively_apply, send_to_device
from datasets import Dataset, load_from_disk
from transformers import BitsAndBytesConfig, TrainerCallback

from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import Recompiled
from autotune.core.rows.images import ChosenRows
from autotune.core.workload import ModelSource
from autotune.step.distributed.state import loading_device, on_device, until_update
from autotune.step.images.tokens import image_elements
from autotune.step.models.loading import load_config, virtual_model
from autotune.step.objects import config, model_factories, peft_config
from autotune.step.run.instrument import report_phases
from autotune.step.run.training import run_arguments
from autotune.step.trainers.base import Adapter
from autotune.techniques.traits import MAX_TRACED
from autotune.virtual import mark_gradient_final, on_real_tensors, phase, trace_inputs
from autotune.virtual.recording.tensors import map_tree, tensors_of
from autotune.virtual.steps.phases import MICRO_BATCH, SECOND_UPDATE, UPDATE, step_name

STEPS = 2
"""Optimizer steps of a trace: the first allocates the optimizer's state, so the second is steady."""
_IMAGE_DEVIATIONS = 4.0
"""Standard deviations above the mean that the image data of random rows exceed in one of 30,000 steps."""
OVERRIDDEN_IN_TRACES = {
    "use_cpu": True, "tf32": None, "torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None,
}  # fmt: skip
"""Arguments that every trace overrides: accelerate's device is set afterwards, TF32 changes no allocation, and compiled
code cannot be traced."""


@dataclass(frozen=True)
class TracedRows:
    """The rows of a trace; see :class:`autotune.core.jobs.traced.TraceRequest`.

    Attributes:
        worst: tokens of each row, in each part of the trainer's specification.
        trainable: share of the tokens that the loss counts.
        once: run a single optimizer step that calls the optimizer twice, from which
            :func:`autotune.virtual.steps.steady.steady` derives a second step; else two steps are run.
        alike: the first micro-batch of a step represents all others, so that a step of ``once`` runs it alone, and
            ``steady`` adds the others; else steps run two micro-batches, or the plan's only one.
        chosen: dataset rows with images, in place of ``worst``; None: rows of text.
        again: see :func:`autotune.virtual.engine.tracing.compiled_again_for`.
    """

    worst: Sequence[tuple[int, ...]]
    trainable: float = 1.0
    once: bool = False
    alike: bool = True
    chosen: ChosenRows | None = None
    again: Recompiled = field(default_factory=Recompiled)

    def dataset(self, adapter: Adapter, plan: TrainingPlan) -> Dataset:
        """Return the tokenised rows."""
        if self.chosen is None:
            return adapter.synthetic(self.worst, plan, self.trainable)
        return load_from_disk(self.chosen.directory).select(self.chosen.indices)

    def collated_bytes(self, rows: int, collate: Callable[[list[Any]], Any]) -> int:
        """Return an upper bound for the bytes of micro-batches of ``rows`` random rows with images.

        Scales the bytes of the row with the most image elements by the expected elements of the rows.

        Args:
            collate: makes a micro-batch of rows.
        """
        assert self.chosen is not None
        dataset = load_from_disk(self.chosen.directory)
        elements = image_elements(dataset)
        assert elements is not None
        most, expected = elements.max(), rows * elements.mean() + _IMAGE_DEVIATIONS * rows**0.5 * elements.std()
        largest = collate([dataset[int(elements.argmax())]])
        return int(min(expected / most, rows) * sum(tensor.nbytes for tensor in tensors_of([*largest.values()])))

    @property
    def steps(self) -> int:
        """Number of optimizer steps that are run."""
        return 1 if self.once else STEPS

    @property
    def most_micro_batches(self) -> int:
        """Maximum number of micro-batches of a step that are run."""
        return 1 if self.once and self.alike else MAX_TRACED


def build_virtual(
    adapter: Adapter,
    plan: TrainingPlan,
    model_config: Any,
    processor: Any,
    rows: TracedRows,
    device: torch.device,
    folder: Path,
) -> Any:
    """Return the trainer of a plan on a device, with a model of random weights and rows of given sizes.

    Args:
        folder: the trainer's output directory.
    """
    overrides = {
        **run_arguments(plan, rows.steps, folder),
        **adapter.derived(plan),
        "gradient_accumulation_steps": min(plan.micro_batches, rows.most_micro_batches),
        "dataloader_pin_memory": False,
        "dataloader_num_workers": 0,
        # DistributedDataParallel finds them in C++, with a vector of four bytes per parameter.
        "ddp_find_unused_parameters": False,
        **OVERRIDDEN_IN_TRACES,
    }
    arguments = on_device(device, plan, lambda: config(plan, **overrides))
    kwargs, arguments.model_init_kwargs = arguments.model_init_kwargs, None

    trained = ModelSource(model_config.model_type)
    configured = adapter.head.configured(model_config, trained.name)

    def load(source: ModelSource, loading: Mapping[str, Any], quantization: BitsAndBytesConfig | None) -> Any:
        # Trainers set attributes of the trained model's configuration, not of a reference's or teacher's.
        source_config = deepcopy(configured) if source is trained else load_config(source, adapter.head)
        target = loading_device(device, plan, quantized=quantization is not None)
        return virtual_model(source_config, loading, quantization, target)

    make_model, make_further = model_factories(plan, trained, kwargs, load)
    skipped = plan.micro_batches - arguments.gradient_accumulation_steps
    fetched: list[Any] = []
    with adapter.loading_models_from(make_further):
        return _traced(adapter, plan, rows, fetched, skipped * arguments.per_device_train_batch_size)(
            model=make_model(),
            args=arguments,
            train_dataset=rows.dataset(adapter, plan),
            processing_class=_process_on_real_tensors(processor) if adapter.generating and rows.chosen else processor,
            peft_config=peft_config(plan),
            callbacks=[_Phases(rows, fetched)],
            **adapter.arguments(plan),
        )


def _process_on_real_tensors(processor: Any) -> Any:
    """Return a copy of a processor that processes images on real tensors, which a trace does not count."""
    processor_class: Any = type(processor)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with on_real_tensors():
            outputs = processor_class.__call__(self, *args, **kwargs)
            arrays = {name: _as_array(value) for name, value in outputs.items()}
        outputs.data = trace_inputs(arrays)
        return outputs

    wrapped = copy(processor)
    wrapped.__class__ = type(processor_class.__name__, (processor_class,), {"__call__": call})
    return wrapped


def _as_array(value: Any) -> Any:
    """Convert a tensor, or a list of arrays or tensors, to one array; return other values, such as tokens, unchanged.

    Image processors with torchvision's backend return lists of tensors, which TRL converts to an array, too
    (``GRPOTrainer._generate_single_turn``).
    """
    if isinstance(value, torch.Tensor):
        return value.numpy().copy()
    is_arrays = isinstance(value, list) and any(isinstance(item, (np.ndarray, torch.Tensor)) for item in value)
    return np.array(value) if is_arrays else value


def _traced(adapter: Adapter, plan: TrainingPlan, rows: TracedRows, fetched: list[Any], skipped_rows: int) -> type[Any]:
    """Return a subclass of TRL's trainer that trains on the trace's rows and reports its phases.

    Args:
        fetched: list that is filled with the micro-batches of a step on the device. accelerate's data loader places
            all of them for ``Trainer.get_batch_samples``, and ``Trainer._run_epoch`` keeps them until those of the next
            step are placed, and during evaluation. Only pixels are large enough to matter: micro-batches of text are
            moved to the device one by one.
        skipped_rows: dataset rows in the micro-batches of a step that are not run.
    """
    trainer = adapter.trainer_class(plan)
    # Trainers that generate keep references to their generation batches themselves.
    holds_batches = rows.chosen is not None and not adapter.generating

    class Traced(trainer):  # type: ignore[misc, valid-type]  # the base is chosen while running
        def get_train_dataloader(self) -> Any:
            with on_real_tensors():
                with self._on_host():
                    batches = list(super().get_train_dataloader())
                self.facts.worst_rows, self.facts.worst_tokens = adapter.rows_and_tokens(self, batches[0])
                return _HostBatches(batches)

        def get_eval_dataloader(self, *args: Any) -> Any:
            with on_real_tensors(), self._on_host():
                return _HostBatches(list(super().get_eval_dataloader(*args)))

        def _on_host(self) -> AbstractContextManager[object]:
            return mock.patch.object(type(self.accelerator), "device", torch.device("cpu"))

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            samples, items = super().get_batch_samples(*args, **kwargs)
            if not holds_batches:
                return samples, items
            with on_real_tensors():
                skipped_bytes = rows.collated_bytes(skipped_rows, self.data_collator)
            skipped = torch.empty(skipped_bytes, dtype=torch.uint8, device=self.args.device)
            fetched[:] = [*(send_to_device(sample, self.args.device) for sample in samples), skipped]
            return fetched[:-1], items

        def read_batch(self, rows: Any) -> Any:
            """Collate rows as the data loader does: on real tensors, which the trace does not count."""
            with on_real_tensors():
                batch = _HostBatches([self.data_collator(list(rows))])
            return next(iter(batch))

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with until_update(self.accelerator, phase(MICRO_BATCH)):
                return super().training_step(*args, **kwargs)

    return report_phases(Traced, adapter.methods, phase)


class _Phases(TrainerCallback):
    """Marks the phases of steps; a trace of one step has the phase names of steps 1 and 2.

    Args:
        fetched: the micro-batches of a step on the device.
    """

    def __init__(self, rows: TracedRows, fetched: list[Any]) -> None:
        self._once = rows.once
        self._is_repeated = rows.once and rows.alike
        self._fetched = fetched

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # `steady` repeats a micro-batch, for which it needs the moments at which its gradients are final.
        for parameter in kwargs["model"].parameters() if self._is_repeated else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(mark_gradient_final)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        skipped = self._once and state.global_step > 0
        self._step = phase(step_name(state.global_step + skipped))
        self._step.__enter__()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._update = phase(UPDATE)
        self._update.__enter__()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._update.__exit__(None, None, None)
        if self._once and state.global_step == 0:
            with phase(SECOND_UPDATE):
                kwargs["optimizer"].step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The data loader places the next step's micro-batches before the Trainer releases these.
        recursively_apply(torch.empty_like, self._fetched)
        self._step.__exit__(None, None, None)


class _HostBatches:
    """Micro-batches of a data loader, stored as NumPy arrays, outside of PyTorch's allocators."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = [map_tree(batch, torch.Tensor, lambda tensor: tensor.numpy().copy()) for batch in batches]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return (trace_inputs(batch) for batch in self._batches)
