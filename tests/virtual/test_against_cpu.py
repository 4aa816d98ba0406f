"""Traces for the CPU equal the allocations of PyTorch's CPU allocator: the main check of traces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune.core.plan import Completions, TrainingPlan
from autotune.core.program import SAVE
from autotune.core.rows.batch_geometry import Layout, Shape
from autotune.step.run.traced_training import traced_training
from autotune.step.run.virtual_trainer import TracedRows
from autotune.trainers import find_trainer, trainers
from autotune.trainers.distillation import TEACHER
from autotune.trainers.prompts import NO_REWARD
from autotune.virtual import trace
from autotune.virtual.steps.phases import step_name
from tests.small import small_config, small_tokenizer
from tests.virtual.compared import assert_as_on_cpu
from tests.virtual.models import ARCHITECTURES, config_of
from tests.virtual.reference import run_on_cpu

pytestmark = pytest.mark.usefixtures("small_vocabulary_tiles")
LENGTH = 48
LORA = {"use_peft": True, "lora_r": 8, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
OF_ATTENTION = {"lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
CHECKPOINTING: Mapping[str, Mapping[str, object]] = {
    "stored": {"gradient_checkpointing": False},
    "checkpointed": {"gradient_checkpointing": True},
    "every second": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
}
OTHERS_BY_DAY = "sft, packed, LoRA"
"""What is compared of other architectures than Llama in every run of the tests; all else in the nightly one."""


@dataclass(frozen=True)
class Steps:
    """Optimizer steps of a trainer, and what comes after them.

    Attributes:
        rows: of the lengths of their parts, in tokens.
        args: of the trainer, without those that all have or that checkpoint.
        by_day: the way of checkpointing that is compared in every run of the tests; None: all are by night.
        by_night: those that are compared in the nightly one.
        model: words of adapters, if there are any.
    """

    trainer: str
    rows: Sequence[tuple[int, ...]]
    args: Mapping[str, object]
    by_day: str | None
    by_night: Sequence[str] = ()
    model: Mapping[str, object] = field(default_factory=dict)

    def plan(self, architecture: str, checkpointing: str, teacher: Path) -> TrainingPlan:
        """Return the plan with one way of checkpointing.

        Args:
            teacher: where a teacher may be put, of the same architecture with a layer more.
        """
        args = {"per_device_train_batch_size": 2, "bf16": False, **CHECKPOINTING[checkpointing], **self.args}
        words = {**self.model, **(OF_ATTENTION if self.model and "moe" in architecture else {})}
        trainer = find_trainer(self.trainer)
        if not trainer.generates:
            return TrainingPlan(self.trainer, args, words)
        if trainer.has_teacher:
            config_of(architecture, num_hidden_layers=3).save_pretrained(teacher)
            args[TEACHER] = str(teacher)
        rewards = (NO_REWARD,) if trainer.scores else ()
        return TrainingPlan(self.trainer, args, words, rewards=rewards, completions=Completions(NEW, NEW))


CUT: Mapping[str, object] = {"max_length": LENGTH}
EVALUATED: Mapping[str, object] = {**CUT, "eval_strategy": "epoch"}
PACKED: Mapping[str, object] = {**CUT, "packing": True}
PRECOMPUTED = {"precompute_ref_log_probs": True}
STORED, CHECKPOINTED, EVERY_2 = CHECKPOINTING
TEXTS = ((36,), (24,), (12,), (LENGTH,))
# One pair is cut, and one is a token shorter, so that there is padding.
PAIRS = ((12, 40, 30), (16, 32, 31))
# One pair is a token too long, and so dropped.
SCORED = ((LENGTH, 30), (32, 31), (LENGTH + 1, 2))
SEQUENCES = {**LORA, "lora_task_type": "SEQ_CLS"}
# Mismatched pairs that are narrower than rows, and some that are wider.
NARROWER, WIDER = (
    find_trainer("kto").traced_rows(Layout.PADDED, shape, 0.5)
    for shape in (Shape(3, LENGTH, second_tokens=36), Shape(3, 36, second_tokens=60))
)
KTO: Mapping[str, object] = {"per_device_train_batch_size": 3, "max_length": 64, "eval_strategy": "epoch"}
NEW = 8
# One is padded, so that attention gets a mask in every step of the generation.
PROMPTS = ((LENGTH, NEW), (LENGTH - 1, NEW))
ONLINE: Mapping[str, object] = {"max_new_tokens": NEW, "max_length": LENGTH + NEW}
GROUPS: Mapping[str, object] = {
    "max_completion_length": NEW, "num_generations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 2, "eval_strategy": "epoch",
}  # fmt: skip
TAUGHT: Mapping[str, object] = {
    "max_completion_length": NEW, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 2,
    "eval_strategy": "epoch",
}  # fmt: skip

STEPS: Mapping[str, Steps] = {
    "sft": Steps("sft", TEXTS, EVALUATED, STORED),
    "sft, evaluated before": Steps("sft", TEXTS, {**EVALUATED, "eval_on_start": True}, STORED),
    "sft, packed": Steps("sft", TEXTS, PACKED, CHECKPOINTED),
    "sft, LoRA": Steps("sft", TEXTS, EVALUATED, CHECKPOINTED, model=LORA),
    OTHERS_BY_DAY: Steps("sft", TEXTS, PACKED, STORED, model=LORA),
    "dpo, a copy": Steps("dpo", PAIRS, EVALUATED, STORED, [CHECKPOINTED]),
    "dpo, adapters off": Steps("dpo", PAIRS, EVALUATED, CHECKPOINTED, [STORED], LORA),
    "dpo, precomputed": Steps("dpo", PAIRS, {**CUT, **PRECOMPUTED}, STORED, [CHECKPOINTED]),
    "kto, a copy": Steps("kto", WIDER, KTO, STORED, [CHECKPOINTED]),
    "kto, a copy, narrower": Steps("kto", NARROWER, KTO, None, [STORED, CHECKPOINTED]),
    "kto, adapters off": Steps("kto", WIDER, KTO, None, [STORED, CHECKPOINTED], LORA),
    "kto, precomputed": Steps("kto", WIDER, {**KTO, **PRECOMPUTED}, None, [STORED, CHECKPOINTED]),
    "kto, without KL": Steps("kto", WIDER, {**KTO, "loss_type": "apo_zero_unpaired"}, CHECKPOINTED, [STORED]),
    "reward": Steps("reward", SCORED, EVALUATED, EVERY_2, [STORED, CHECKPOINTED]),
    "reward, LoRA": Steps("reward", SCORED, EVALUATED, STORED, [CHECKPOINTED, EVERY_2], SEQUENCES),
    # Stored, tokens are generated with a cache, and checkpointed, without.
    "online_dpo, a copy": Steps("online_dpo", PROMPTS, ONLINE, None, [STORED, CHECKPOINTED]),
    "online_dpo, adapters off": Steps("online_dpo", PROMPTS, ONLINE, CHECKPOINTED, [STORED], LORA),
    "online_dpo, no room for prompts": Steps(
        "online_dpo", PROMPTS, {**ONLINE, "max_length": NEW // 2}, None, [CHECKPOINTED]
    ),
    "grpo": Steps("grpo", PROMPTS, GROUPS, CHECKPOINTED, [STORED]),
    "grpo, LoRA": Steps("grpo", PROMPTS, GROUPS, None, [STORED, CHECKPOINTED], LORA),
    "rloo": Steps("rloo", PROMPTS, GROUPS, None, [STORED, CHECKPOINTED]),
    "rloo, LoRA": Steps("rloo", PROMPTS, GROUPS, None, [STORED, CHECKPOINTED], LORA),
    "distillation": Steps("distillation", PROMPTS, TAUGHT, STORED, [CHECKPOINTED]),
    "distillation, LoRA": Steps("distillation", PROMPTS, TAUGHT, None, [STORED, CHECKPOINTED], LORA),
    # Neither the forward nor the reverse divergence, so that each tile is projected twice.
    "distillation, JSD": Steps("distillation", PROMPTS, {**TAUGHT, "beta": 0.5}, None, [STORED, CHECKPOINTED]),
}


def cases() -> Iterator[Any]:
    """Yield every architecture with all steps in each of their ways."""
    for architecture in ARCHITECTURES:
        for name, steps in STEPS.items():
            for way in filter(None, (steps.by_day, *steps.by_night)):
                by_day = way == steps.by_day and (architecture == "llama" or name == OTHERS_BY_DAY)
                marks = () if by_day else pytest.mark.nightly
                yield pytest.param(architecture, steps, way, marks=marks, id=f"{architecture}, {name}, {way}")


@pytest.mark.parametrize(("architecture", "steps", "checkpointing"), list(cases()))
def test_traced_peaks_are_those_of_the_cpu(architecture: str, steps: Steps, checkpointing: str, tmp_path: Path) -> None:
    plan = steps.plan(architecture, checkpointing, tmp_path / "teacher")
    config = config_of(architecture, num_hidden_layers=2)
    run = traced_training(plan, config, small_tokenizer(), TracedRows(steps.rows))
    assert_as_on_cpu(run, find_trainer(steps.trainer).program(plan))


def test_every_trainer_is_compared() -> None:
    assert {steps.trainer for steps in STEPS.values()} == trainers().keys()


def test_a_save_takes_the_fused_weights_of_experts_apart() -> None:
    """``save_pretrained`` writes gate and up projections of each expert, and copies them on the device for that."""
    plan = TrainingPlan("sft", {"per_device_train_batch_size": 2, "max_length": LENGTH, "bf16": False})
    config = config_of("qwen3_moe", num_hidden_layers=2)
    fused = 2 * config.num_experts * 2 * config.moe_intermediate_size * config.hidden_size
    saving = trace(traced_training(plan, config, small_tokenizer(), TracedRows(TEXTS)), target="cpu").phase(SAVE)
    assert saving.device_peak.bytes - saving.start_bytes == 4 * fused


METHODS: list[Any] = [
    {"peft_type": "IA3", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    pytest.param({"peft_type": "LOHA", "target_modules": ["q_proj", "o_proj"], "r": 4}, marks=pytest.mark.nightly),
    pytest.param({"peft_type": "VERA", "target_modules": ["q_proj", "o_proj"], "r": 8}, marks=pytest.mark.nightly),
    {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 4},
    {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method["peft_type"])
def test_traced_peaks_of_a_method_of_peft_are_those_of_the_cpu(method: dict[str, Any]) -> None:
    args = {"per_device_train_batch_size": 2, "max_length": 48, "bf16": False, "gradient_checkpointing": False}
    plan = TrainingPlan("sft", args=args, model={"use_peft": True}, peft=method)
    steps = traced_training(
        plan, small_config(tie_word_embeddings=False), small_tokenizer(), TracedRows([(48,), (40,)])
    )

    traced, real = trace(steps, target="cpu"), run_on_cpu(steps)

    found, expected = traced.phase(step_name(1)).device_peak.bytes, real[step_name(1)].peak_bytes
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("optimizer", ["adamw_bnb_8bit", pytest.param("lion_8bit", marks=pytest.mark.nightly)])
def test_traced_peaks_of_an_update_in_8_bits_are_those_of_the_cpu(optimizer: str) -> None:
    pytest.importorskip("bitsandbytes")
    # Large weights and few tokens: the update needs the most.
    plan = TrainingPlan("sft", {"per_device_train_batch_size": 1, "max_length": 8, "bf16": False, "optim": optimizer})
    config = small_config(tie_word_embeddings=False)
    assert_as_on_cpu(
        traced_training(plan, config, small_tokenizer(), TracedRows([(8,)])), find_trainer("sft").program(plan)
    )
