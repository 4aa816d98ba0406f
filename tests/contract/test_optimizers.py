"""Contract with PyTorch: numbers of optimizers that determine an update's memory are traced."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from transformers import Trainer, TrainingArguments

from autotune.userconfig.fields import fields_of_kind
from autotune.virtual import phase
from tests.virtual.reference import run_on_cpu

NUMBERS: Mapping[str, float] = {
    "adam_beta1": 0.5, "adam_beta2": 0.5, "adam_epsilon": 1e-3, "learning_rate": 1.0, "weight_decay": 0.1,
}  # fmt: skip
"""Other values than the defaults."""
OPTIMIZERS = ("adafactor", "adagrad", "adamw_torch", "adamw_torch_fused", "rmsprop", "sgd")
UPDATES = ("first update", "second update")


def peaks(optim: str, numbers: Mapping[str, float]) -> list[int]:
    """Return the peak of each update of a few weights, by PyTorch's own allocator."""
    args = TrainingArguments(use_cpu=True, optim=optim, **numbers)
    kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)

    def run(device: torch.device) -> None:
        weights = [torch.nn.Parameter(torch.ones(64, 64, device=device)) for _ in range(2)]
        optimizer = kind([{"params": weights, "weight_decay": args.weight_decay}], **kwargs)
        for name in UPDATES:
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            with phase(name):
                optimizer.step()

    found = run_on_cpu(run, phases=UPDATES)
    return [found[name].peak_bytes for name in UPDATES]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_changes_the_memory_of_an_update_is_traced(name: str) -> None:
    changes = {optim for optim in OPTIMIZERS if peaks(optim, {name: NUMBERS[name]}) != peaks(optim, {})}
    assert not changes or name in fields_of_kind("training", "traced")
    assert changes == ({"adagrad", "rmsprop", "sgd"} if name == "weight_decay" else set())
