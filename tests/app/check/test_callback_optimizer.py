"""The callback checks a training by the optimizer that its trainer steps, or leaves it unchecked."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback
from transformers.training_args import OptimizerNames
from trl import SFTConfig, SFTTrainer

from autotune.api.running import check_optimizer
from autotune.errors import InputError
from tests.app.check.test_callback import CLASSES, built


class _Begins(TrainerCallback):
    """Keeps what the check of the optimizer raises when training begins."""

    trainer: Any = None
    error: str | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        try:
            check_optimizer(self.trainer)
        except InputError as error:
            self.error = error.message


class OwnOptimizer(SFTTrainer):
    def create_optimizer(self, *_: Any) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        return self.optimizer


class OwnGroups(SFTTrainer):
    def create_optimizer(self, *given: Any) -> Any:
        super().create_optimizer(*given).param_groups[0]["lr"] = 1e-5
        return self.optimizer


def passed(**options: Any) -> Callable[[Any], dict[str, object]]:
    return lambda model: {"optimizers": (torch.optim.AdamW(model.parameters(), **options), None)}


def eight_bit(model: Any) -> dict[str, object]:
    own = pytest.importorskip("bitsandbytes").optim.AdamW8bit(model.parameters())
    return {"optimizers": (own, None)}


def by_class(_: Any) -> dict[str, object]:
    return {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9})}


def none(_: Any) -> dict[str, object]:
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "given", "named"),
    [
        pytest.param(SFTTrainer, none, None, id="the named one"),
        pytest.param(SFTTrainer, passed(lr=1e-3, fused=True), None, id="an equal one"),
        pytest.param(OwnGroups, none, None, id="with other learning rates"),
        pytest.param(SFTTrainer, passed(), "torch's AdamW", id="not fused"),
        pytest.param(SFTTrainer, passed(fused=True, amsgrad=True), "torch's AdamW", id="with a third state"),
        pytest.param(SFTTrainer, eight_bit, "bitsandbytes's AdamW8bit", id="of 8 bits"),
        pytest.param(SFTTrainer, by_class, "torch's SGD", id="by its class"),
        pytest.param(OwnOptimizer, none, "torch's SGD", id="created"),
    ],
)
def test_an_optimizer_other_than_that_of_the_arguments_is_not_traced(
    kind: Any,
    given: Callable[[Any], dict[str, object]],
    named: str | None,
    small_model_directory: Path,
    rows: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CLASSES, "sft", (kind, *CLASSES["sft"][1:]))
    model, begins = AutoModelForCausalLM.from_pretrained(small_model_directory), _Begins()
    more = {"trained": model, "callback": begins, **given(model)}
    begins.trainer = built("sft", small_model_directory, rows("sft"), tmp_path, **more)
    begins.trainer.train()
    found = None if named is None else f"has its own optimizer ({named}), not optim=adamw_torch_fused: it is not traced"
    assert begins.error is None if found is None else found in str(begins.error)


@pytest.mark.slow
def test_a_training_with_its_own_optimizer_is_trained_with_a_warning(
    small_model_directory: Path, rows: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_pretrained(small_model_directory)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    own: Any = {"trained": model, "optimizers": (sgd, None)}
    training = built("sft", small_model_directory, rows("sft"), tmp_path, "1MiB", **own)
    with caplog.at_level(logging.WARNING):
        training.train()
    assert training.state.global_step == 1
    assert "autotune cannot check this training: The trainer has its own optimizer (torch's SGD)" in caplog.text


@pytest.mark.parametrize(("given", "creates"), [(none, False), (passed(), False), (by_class, True)])
def test_with_deepspeed_only_an_optimizer_that_the_trainer_creates_counts(
    given: Callable[[Any], dict[str, object]],
    creates: bool,
    small_model_directory: Path,
    rows: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(small_model_directory)
    more: Any = {"trained": model, **given(model)}
    training = built("sft", small_model_directory, rows("sft"), tmp_path, **more)
    # transformers' `deepspeed_init` discards the optimizer that was passed.
    training.is_deepspeed_enabled = True
    with pytest.raises(InputError, match="creates its own optimizer") if creates else nullcontext():
        check_optimizer(training)


def test_each_optimizer_that_transformers_creates_is_the_named_one() -> None:
    compared = []
    for name in OptimizerNames:
        args = SFTConfig(use_cpu=True, bf16=False, report_to="none", optim=name)
        try:
            kind, options = Trainer.get_optimizer_cls_and_kwargs(args, None)
        except (ValueError, ImportError):
            continue
        own = kind(torch.nn.Linear(2, 2).parameters(), **options)
        check_optimizer(SimpleNamespace(args=args, optimizer=own, is_deepspeed_enabled=False))
        compared.append(name)
    assert {OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAFACTOR, OptimizerNames.SGD} <= {*compared}
