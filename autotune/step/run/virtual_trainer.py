"""Builds TRL's trainer on a virtual device, with random weights, the rows of a trace, and phases that it reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
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

from autotune.core.batch_geometry import Recompiled
from autotune.core.images import ChosenRows
from autotune.core.plan import TrainingPlan
from autotune.core.workload import ModelSource
from autotune.step.distributed.state import before_update, first_place, on_device, settled_arguments
from autotune.step.images.tokens import image_elements
from autotune.step.models.loading import WEIGHT_DEVIATION, load_config, virtual_model
from autotune.step.objects import config, model_makers, peft_config
from autotune.step.run.followed import with_phases
from autotune.step.run.training import run_arguments
from autotune.step.trainers.base import Adapter
from autotune.techniques.traits import MOST_TRACED
from autotune.virtual import adopt, for_real, is_tracing, phase, settled
from autotune.virtual.phases import MICRO_BATCH, SECOND_UPDATE, UPDATE, step_name
from autotune.virtual.tensors import replaced, tensors_of

STEPS = 2
"""Optimizer steps of a trace: the first allocates the optimizer's state, so the second is steady."""
_DEVIATIONS = 4.0
"""Standard deviations by which the image data of random rows exceed their mean in one of 30,000 steps."""
OVERRIDDEN_IN_TRACES = {
    "use_cpu": True, "tf32": None, "torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None,
}  # fmt: skip
"""Arguments that every trace sets itself: accelerate gets the device of a trace afterwards, TF32 changes no allocation,
and compiled code cannot be traced."""


@dataclass(frozen=True)
class TracedRows:
    """The rows that a trace trains on, by their parts; see :class:`autotune.core.traced.TraceRequest`.

    Attributes:
        once: whether there is a single optimizer step, in which the optimizer is called twice;
            :func:`autotune.virtual.steady.steady` adds another one. If not, there are two.
        alike: whether the first micro-batch of a step stands for the further ones, so that a step which is run once has
            it alone, and the others are added in the same way. If not, steps have two micro-batches, or one where the
            plan has only one.
        chosen: rows of a dataset, with their images, in place of ``worst``; None: rows of text.
        again: see :func:`autotune.virtual.tracing.compiled_again_for`.
    """

    worst: Sequence[tuple[int, ...]]
    trainable: float = 1.0
    once: bool = False
    alike: bool = True
    chosen: ChosenRows | None = None
    again: Recompiled = field(default_factory=Recompiled)

    def dataset(self, known: Adapter, plan: TrainingPlan) -> Dataset:
        """Return the tokenised rows."""
        if self.chosen is None:
            return known.synthetic(self.worst, plan, self.trainable)
        return load_from_disk(self.chosen.directory).select(self.chosen.indices)

    def collated_bytes(self, rows: int, collate: Callable[[list[Any]], Any]) -> int:
        """Return the bytes of the micro-batches of so many rows of a dataset with images, at most.

        Bytes go with the numbers in images, as in the row that has the most.

        Args:
            collate: makes a micro-batch of rows.
        """
        assert self.chosen is not None
        dataset = load_from_disk(self.chosen.directory)
        elements = image_elements(dataset)
        assert elements is not None
        most, usual = elements.max(), rows * elements.mean() + _DEVIATIONS * rows**0.5 * elements.std()
        largest = collate([dataset[int(elements.argmax())]])
        return int(min(usual / most, rows) * sum(tensor.nbytes for tensor in tensors_of([*largest.values()])))

    @property
    def steps(self) -> int:
        """Number of optimizer steps that are run."""
        return 1 if self.once else STEPS

    @property
    def most_micro_batches(self) -> int:
        """Maximum number of micro-batches of a step that are run."""
        return 1 if self.once and self.alike else MOST_TRACED


def build_virtual(
    known: Adapter,
    plan: TrainingPlan,
    model_config: Any,
    processor: Any,
    rows: TracedRows,
    device: torch.device,
    folder: Path,
) -> Any:
    """Return the trainer of a plan on a device, with a model of random weights and rows of given sizes.

    Args:
        folder: for what the trainer writes.
    """
    overrides = {
        **run_arguments(rows.steps, folder),
        **known.derived(plan),
        "gradient_accumulation_steps": min(plan.micro_batches, rows.most_micro_batches),
        "dataloader_pin_memory": False,
        "dataloader_num_workers": 0,
        **OVERRIDDEN_IN_TRACES,
        **settled_arguments(plan),
    }
    arguments = on_device(device, plan, lambda: config(plan, **overrides))
    kwargs, arguments.model_init_kwargs = arguments.model_init_kwargs, None

    trained = ModelSource(model_config.model_type)
    configured = known.head.configured(model_config, trained.name)

    def load(source: ModelSource, loading: Mapping[str, Any], quantization: BitsAndBytesConfig | None) -> Any:
        # Trainers set attributes of the configuration of the model that they train alone.
        own = deepcopy(configured) if source is trained else load_config(source, known.head)
        place = first_place(device, plan, quantized=quantization is not None)
        model = virtual_model(own, loading, quantization, place)
        if not is_tracing():
            _draw_weights(model)
        return model

    make_model, make_further = model_makers(plan, trained, kwargs, load)
    left_out = plan.micro_batches - arguments.gradient_accumulation_steps
    fetched: list[Any] = []
    with known.building(make_further):
        return _traced(known, plan, rows, fetched, left_out * arguments.per_device_train_batch_size)(
            model=make_model(),
            args=arguments,
            train_dataset=rows.dataset(known, plan),
            processing_class=_processing_for_real(processor) if known.generating and rows.chosen else processor,
            peft_config=peft_config(plan),
            callbacks=[_Phases(rows, fetched)],
            **known.arguments(plan),
        )


def _processing_for_real(processor: Any) -> Any:
    """Return a processor that reads images on real tensors even within a trace, outside of PyTorch's allocators."""
    own: Any = type(processor)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with for_real():
            made = own.__call__(self, *args, **kwargs)
            arrays = {name: _as_array(value) for name, value in made.items()}
        made.data = adopt(arrays)
        return made

    found = copy(processor)
    found.__class__ = type(own.__name__, (own,), {"__call__": call})
    return found


def _as_array(value: Any) -> Any:
    """Return tensors, and lists of arrays or tensors, as one array; anything else, such as lists of tokens, as it is.

    Image processors with torchvision's backend make lists of tensors, of which TRL makes an array, too
    (``GRPOTrainer._generate_single_turn``).
    """
    if isinstance(value, torch.Tensor):
        return value.numpy().copy()
    is_arrays = isinstance(value, list) and any(isinstance(item, (np.ndarray, torch.Tensor)) for item in value)
    return np.array(value) if is_arrays else value


def _draw_weights(model: Any) -> None:
    """Initialise the weights of a real model at random, so that tokens can be sampled."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.normal_(std=WEIGHT_DEVIATION)


def _traced(known: Adapter, plan: TrainingPlan, rows: TracedRows, fetched: list[Any], left_out: int) -> type[Any]:
    """Return a subclass of a trainer that takes its batches from the trace's rows and reports its phases.

    Args:
        fetched: filled with the micro-batches of a step that are on the device together, as accelerate's data loader
            places them for ``Trainer.get_batch_samples``: pixels are large. ``Trainer._run_epoch`` holds them until all
            of the next step are there, and while it evaluates. Micro-batches of text are moved to the device where they
            are trained on, since tokens are small.
        left_out: rows of the dataset in the micro-batches of a step that are left out.
    """
    trainer = known.trainer_class(plan)
    # Trainers that generate hold what they keep of a generation batch themselves.
    fetches = rows.chosen is not None and not known.generating

    class Traced(trainer):  # type: ignore[misc, valid-type]  # the base is chosen while running
        # Of a pass over a generation batch: a plan's geometry counts how many there are.
        run_chunks = 1

        def get_train_dataloader(self) -> Any:
            with for_real():
                with mock.patch.object(self.accelerator, "device_placement", False):
                    batches = list(super().get_train_dataloader())
                self.facts.worst_rows, self.facts.worst_tokens = known.loaded(self, batches[0])
                return _Batches(batches)

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            samples, items = super().get_batch_samples(*args, **kwargs)
            if not fetches:
                return samples, items
            with for_real():
                others_bytes = rows.collated_bytes(left_out, self.data_collator)
            others = torch.empty(others_bytes, dtype=torch.uint8, device=self.args.device)
            fetched[:] = [*(send_to_device(sample, self.args.device) for sample in samples), others]
            return fetched[:-1], items

        def read_batch(self, rows: Any) -> Any:
            """Read rows as the data loader does: on real tensors, stored outside of PyTorch's allocators."""
            with for_real():
                batch = _Batches([self.data_collator(list(rows))])
            return next(iter(batch))

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with ExitStack() as micro_batch:
                micro_batch.enter_context(phase(MICRO_BATCH))
                micro_batch.enter_context(before_update(self.accelerator, micro_batch.close))
                return super().training_step(*args, **kwargs)

    return with_phases(Traced, known.methods, phase)


class _Phases(TrainerCallback):
    """Names the phases of steps; the numbers stay the same where the second step is left out.

    Args:
        fetched: the micro-batches of a step that are on the device together.
    """

    def __init__(self, rows: TracedRows, fetched: list[Any]) -> None:
        self._once = rows.once
        self._is_repeated = rows.once and rows.alike
        self._fetched = fetched

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Only of a micro-batch that stands for others has to be known when its gradients are final.
        for parameter in kwargs["model"].parameters() if self._is_repeated else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(settled)

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
        # Those of the next step are fetched while these are held.
        recursively_apply(torch.empty_like, self._fetched)
        self._step.__exit__(None, None, None)


class _Batches:
    """The micro-batches of a data loader, read once and stored outside of PyTorch's allocators."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = [replaced(batch, torch.Tensor, lambda tensor: tensor.numpy().copy()) for batch in batches]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return (adopt(batch) for batch in self._batches)
