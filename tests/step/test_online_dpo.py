"""Online DPO's peculiarities, compared with TRL: tokens, widths, phases, and running out of memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from trl.experimental.online_dpo import OnlineDPOTrainer

from autotune.core.candidate import Choice
from autotune.core.program import BACKWARD, FORWARD
from autotune.step.rows import RowSizes
from autotune.step.run.meters import METERS
from autotune.step.run.progress import Progress
from autotune.step.run.training import train
from autotune.step.trainers import online_dpo
from autotune.step.trainers.base import Collation
from autotune.trainers import find_trainer
from autotune.trainers.prompts import GENERATION, REFERENCE_PASS, SCORING
from tests.step.requests import probed_here
from tests.trainers.prepared import Prepared, prepared_rows

TRAINER = find_trainer("online_dpo")
TEXTS = [f"{'a b c d ' * count}{count}" for count in (1, 2, 3, 5, 8, 13, 4, 4)]


@pytest.fixture
def found(small_model_directory: Path, tmp_path: Path) -> Prepared:
    rows = [{"prompt": text, "solution": str(count)} for count, text in enumerate(TEXTS)]
    return prepared_rows(TRAINER, rows, small_model_directory, tmp_path / "prepared")


@pytest.mark.parametrize("messages", [False, True], ids=["text", "messages"])
def test_prompts_are_tokenised_as_trl_does_when_it_generates(
    messages: bool, small_model_directory: Path, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [{"prompt": text} for text in TEXTS]
    if messages:
        rows = [{"prompt": [{"role": "user", "content": text}]} for text in TEXTS]
    found = prepared_rows(TRAINER, rows, small_model_directory, tmp_path / "prepared")
    trainer = found.built(found.plan({"max_new_tokens": 2}), tmp_path)
    prompts = [row["prompt"] for row in rows]
    of_trl = OnlineDPOTrainer._generate(trainer, trainer.model, prompts)
    ids, mask = of_trl[0][: len(prompts)], of_trl[1][: len(prompts)].bool()
    assert [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)] == found.rows["prompt_ids"]


CUT: dict[str, Choice] = {
    "max_new_tokens": 12,
    "max_length": 24,
    "per_device_train_batch_size": 2,
    "gradient_checkpointing": "off",
}
WHOLE: dict[str, Choice] = {**CUT, "max_length": 512}


@pytest.mark.parametrize("choices", [CUT, WHOLE], ids=["cut", "whole"])
def test_the_loss_is_computed_of_as_many_tokens_as_are_said(
    choices: dict[str, Choice], found: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, tuple[int, ...], tuple[int, ...]]] = []

    def forward(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        handle = model.register_forward_pre_hook(
            lambda _, given: seen.append((torch.is_grad_enabled(), tuple(given[0].shape), tuple(args[2].shape)))
        )
        try:
            return original(self, model, *args, **kwargs)
        finally:
            handle.remove()

    original = OnlineDPOTrainer._forward
    monkeypatch.setattr(OnlineDPOTrainer, "_forward", forward)
    plan = found.plan(choices)
    said = found.geometry(plan)
    shown = probed_here(found.request(plan), tmp_path)
    assert shown.reason == ""
    learned = [shape for grad, shape, _ in seen if grad]
    assert max(rows * width for rows, width in learned) == said.worst.rows * 2 * said.worst.tokens == shown.worst_tokens
    assert learned == [shape for grad, shape, _ in seen if not grad]
    assert max(completion[1] for _, _, completion in seen) == 12 == said.worst.generated
    (generation,) = said.phases
    assert generation.worst.tokens == found.reply.dataset.documents.longest + 12
    assert (said.worst.tokens < generation.worst.tokens) == (choices is CUT)


def test_worst_completions_fill_their_maximum_and_one_token_less_so_that_there_is_a_mask(
    found: Prepared, tmp_path: Path
) -> None:
    trainer = found.built(found.plan(WHOLE), tmp_path)
    trainer.train_dataset = found.adapter.select_batches(trainer, np.array([[5, 4], [0, 1]]), np.array([True, False]))
    trainer.args.train_sampling_strategy = "sequential"
    worst, typical = trainer.get_train_dataloader()
    kept: list[Any] = []
    original = type(trainer).reference_pass

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept.append(args[4].sum(dim=1).tolist())
        return original(self, *args, **kwargs)

    type(trainer).reference_pass = noted
    trainer.create_optimizer()
    for batch in (worst, typical):
        trainer.training_step(trainer.model, batch)
    assert sorted(kept[0]) == [11, 11, 11, 12]
    assert kept[1] == [6, 6, 6, 6]


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("nothing is left")


@pytest.mark.parametrize(
    ("phase", "owner", "method"),
    [
        (GENERATION, OnlineDPOTrainer, "_generate"),
        (FORWARD, OnlineDPOTrainer, "_forward"),
        (REFERENCE_PASS, online_dpo._OnTokenizedPrompts, "reference_pass"),
        (SCORING, OnlineDPOTrainer, "_calculate_rewards_from_functions"),
        (BACKWARD, torch.Tensor, "backward"),
    ],
)
def test_an_error_names_the_phase_in_which_memory_ran_out(
    phase: str, owner: type[Any], method: str, found: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, out_of_memory)
    request = found.request(found.plan({"max_new_tokens": 8, "per_device_train_batch_size": 2}))
    progress = Progress(request.schedule, METERS["cpu"]())
    with pytest.raises(MemoryError):
        train(request, tmp_path, progress)
    assert progress.phase == phase


def test_prompts_and_completions_are_cut_together_but_no_completion_is() -> None:
    sizes = RowSizes(
        np.array([[9, 9], [2, 2]]), np.array([9, 2]), generated=np.array([[4, 5], [3, 7]]), max_generated=8
    )
    chosen = np.array([[0, 1]])
    assert Collation().tokens(sizes, chosen).tolist() == [4 * (9 + 7)]
    assert Collation(cut=12).tokens(sizes, chosen).tolist() == [4 * 12]
    assert Collation(cut=6).tokens(sizes, chosen).tolist() == [4 * 7]
    assert sizes.tokens.tolist() == [27, 14]


def test_trl_loses_the_keys_of_checkpointing_when_it_generates(
    found: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = found.candidate({**WHOLE, "gradient_checkpointing": "every_2"})
    reason = TRAINER.illegal(candidate, found.setting)
    assert reason is not None
    assert "again without the key of this choice" in reason
    given: list[object] = []
    trainer = found.built(TRAINER.plan(candidate, found.setting), tmp_path)
    keys = trainer.args.gradient_checkpointing_kwargs
    enabled = trainer.model.gradient_checkpointing_enable
    assert enabled(gradient_checkpointing_kwargs=dict(keys)) is None
    monkeypatch.setattr(trainer.model, "gradient_checkpointing_enable", lambda **words: given.extend(words.values()))
    OnlineDPOTrainer._generate(trainer, trainer.model, ["a b"])
    assert keys == {"every_n_layers": 2}
    assert given == [None]


def test_trl_does_not_evaluate(found: Prepared, tmp_path: Path) -> None:
    trainer = found.built(found.plan(WHOLE), tmp_path)
    with pytest.raises((TypeError, ValueError, KeyError)):
        trainer.evaluate(trainer.train_dataset.select([0]))
    # It gives the columns of the dataset to the model.
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        trainer.evaluate(trainer.train_dataset.select_columns(["prompt"]))
    evaluated = replace(found.setting.workload, evaluation=found.reply.dataset)
    reason = TRAINER.illegal(found.baseline, replace(found.setting, workload=evaluated))
    assert reason is not None
    assert "has no evaluation" in reason


def test_completions_of_vllm_are_padded_as_trl_pads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.ones((2, 3), dtype=torch.long)
    monkeypatch.setattr(OnlineDPOTrainer, "_generate_vllm", lambda *_: (ids, ids, ids, ids))
    trainer: Any = object.__new__(online_dpo._OnTokenizedPrompts)
    trainer.generation_config, trainer.args = SimpleNamespace(), SimpleNamespace(max_new_tokens=8)
    trainer._tokenizer, trainer._completion_tokens = SimpleNamespace(pad_token_id=0), np.array([3, 2])
    *_, completions, mask = trainer._generate_with_vllm([], None, 3)
    assert completions.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]] * 2
    assert mask.sum(dim=1).tolist() == [3, 2]
