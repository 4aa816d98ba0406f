"""TRL's own SFT training loop as a function of a device, for a training plan: what a trace runs, and a CPU can too."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from datasets import Dataset
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase, TrainerCallback
from transformers.initialization import no_init_weights
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config

from autotune.core.plan import TrainingPlan
from autotune.virtual.tracing import adopt, for_real, phase

_SIZES = frozenset({"per_device_train_batch_size", "gradient_accumulation_steps"})
STEPS = 2
"""Optimizer steps of the loop. The optimizer's state appears in the first, so the last one's peak is the steady one."""


def step_name(number: int) -> str:
    """Return the name of the phase that an optimizer step, counted from 0, is."""
    return f"optimizer step {number}"


def sft_steps(
    plan: TrainingPlan,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    *,
    trainable: float = 1.0,
) -> Callable[[torch.device], None]:
    """Return a function of a device that trains for :data:`STEPS` optimizer steps as TRL does.

    Args:
        plan: trainer arguments and model words.
        config: of the model, whose weights are random.
        lengths: tokens of the rows of the dataset, which are repeated as often as the steps need.
        trainable: share of each row's tokens, its last, that the loss counts.
    """

    def run(device: torch.device) -> None:
        with tempfile.TemporaryDirectory() as folder:
            trainer = _build(plan, config, tokenizer, _rows(lengths, trainable, plan), device, folder)
            trainer.train()

    return run


class _Phases(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._phase = phase(step_name(state.global_step))
        self._phase.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._phase.__exit__(None, None, None)


class _Batches:
    """The first micro-batches of a data loader, read once and kept where no allocator of PyTorch counts them."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = [tree_map_only(torch.Tensor, lambda tensor: tensor.numpy().copy(), batch) for batch in batches]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return (adopt(batch) for batch in self._batches)


class _Trainer(SFTTrainer):
    """Differs from TRL's in where its batches come from alone."""

    def get_train_dataloader(self) -> Any:
        with for_real():
            self.accelerator.device_placement, placed = False, self.accelerator.device_placement
            batches = super().get_train_dataloader()
            self.accelerator.device_placement = placed
            wanted = STEPS * self.args.gradient_accumulation_steps
            return _Batches([batch for batch, _ in zip(batches, range(wanted), strict=False)])


def _build(
    plan: TrainingPlan,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    device: torch.device,
    folder: str,
) -> SFTTrainer:
    words = ModelConfig(**{"dtype": "float32", **plan.model})
    with device, no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, words.dtype), attn_implementation=words.attn_implementation
        )
    arguments = {
        **plan.args,
        "output_dir": folder,
        "max_steps": STEPS,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return _Trainer(
        model=model,
        args=_arguments_on(device, arguments),
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=get_peft_config(words),
        callbacks=[_Phases()],
    )


def _arguments_on(device: torch.device, arguments: dict[str, Any]) -> SFTConfig:
    """Return the configuration with accelerate's one state per process standing on the device."""
    AcceleratorState._reset_state(reset_partial_state=True)
    config = SFTConfig(**arguments)
    config._setup_devices  # noqa: B018 (asked for so that the state exists)
    PartialState._shared_state["device"] = device
    config.__dict__["_setup_devices"] = device
    return config


def _rows(lengths: Sequence[int], trainable: float, plan: TrainingPlan) -> Dataset:
    rows = []
    cut = plan.truncate_to
    config = SFTConfig(output_dir="", use_cpu=True, **{key: plan.args[key] for key in _SIZES & plan.args.keys()})
    wanted = STEPS * config.per_device_train_batch_size * config.gradient_accumulation_steps
    full = [min(length, cut) if cut else length for length in lengths]
    for index in range(max(len(full), wanted)):
        length = full[index % len(full)]
        counted = max(1, round(length * trainable))
        rows.append({"input_ids": [5] * length, "labels": [-100] * (length - counted) + [5] * counted})
    return Dataset.from_list(rows)
