"""The choices that change training depend on the adapters, and on the rows that the user's loss combines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Base, Setting
from autotune.trainers import find_trainer
from tests.app.bases import a_base, started
from tests.settings import TWO, machine_with, setting, workload

ROWS, PARTS = "per_device_train_batch_size", "steps_per_generation"


def of(trainer: str, entries: dict[str, object] | None = None, **choices: Choice) -> tuple[str | None, Setting]:
    """Return why a candidate is illegal where adapters alone are allowed."""
    known = find_trainer(trainer)
    base = Base("mine.yaml", {}, entries=entries or {})
    plain = workload(trainer=trainer, lengths={100: 100})
    here = replace(setting(of=plain, allowed=frozenset({"lora"})), base=base)
    start = known.defaults(here)
    return known.illegal(known.normal(start.but(**choices), here), here), here


def test_bf16_weights_change_training_unless_they_are_under_adapters_and_no_module_is_trained_whole() -> None:
    choices: dict[str, Choice] = {"lora": "r16", "precision": "bfloat16"}
    assert "--allow precision" in str(of("sft", precision="bfloat16")[0])
    assert of("sft", None, **choices)[0] is None
    # PEFT trains a reward model's head, and modules that the user names, in the type of the weights.
    assert "--allow precision" in str(of("reward", None, **choices)[0])
    assert "--allow precision" in str(of("sft", {"model.lora_modules_to_save": ["lm_head"]}, **choices)[0])


@pytest.mark.parametrize(
    ("choices", "mixed"),
    [
        ({"sharding": "ddp"}, True),
        ({"sharding": "fsdp2"}, False),
        ({"sharding": "fsdp2", "lora": "r16"}, True),
        ({"sharding": "zero3"}, True),
    ],
)
def test_bf16_weights_are_trained_as_such_where_accelerate_would_turn_them_into_float32(
    choices: dict[str, Choice], mixed: bool
) -> None:
    known, here = find_trainer("sft"), setting(machine=TWO)
    start = known.defaults(here)
    plan = known.plan(start.but(precision="bfloat16", **choices), here)
    assert (plan.args["bf16"], plan.model["dtype"]) == (mixed, "bfloat16")


@pytest.mark.parametrize(
    ("document", "exact"),
    [
        ({"peft_type": "LORA", "r": 16}, True),
        ({"peft_type": "LORA", "modules_to_save": ["lm_head"]}, False),
        ({"peft_type": "LORA", "trainable_token_indices": [1]}, False),
        ({"peft_type": "LORA", "bias": "all"}, False),
        ({"peft_type": "PROMPT_TUNING"}, False),
    ],
)
def test_bf16_weights_under_a_file_of_lora_are_as_exact_as_under_lora(document: dict[str, object], exact: bool) -> None:
    _, here = of("sft")
    allowed = replace(here, allowed=frozenset({"peft_config"}))
    start = find_trainer("sft").defaults(allowed)
    chosen = start.but(peft_config=json.dumps(document), precision="bfloat16")
    assert ("--allow precision" in str(find_trainer("sft").illegal(chosen, allowed))) is not exact


@pytest.mark.parametrize(
    ("trainer", "args", "knobs"),
    [
        ("sft", {}, set()),
        ("dpo", {}, set()),
        ("dpo", {"loss_type": ["ipo"]}, set()),
        ("dpo", {"loss_type": ["sigmoid", "sft"]}, {ROWS}),
        ("dpo", {"loss_type": "aot"}, {ROWS}),
        ("dpo", {"loss_type": ["aot_unpaired"]}, {ROWS}),
        ("kto", {}, {ROWS}),
        ("kto", {"loss_type": "apo_zero_unpaired"}, set()),
        ("grpo", {}, {PARTS}),
        ("grpo", {"loss_type": "vespo"}, {PARTS}),
        ("grpo", {"loss_type": "grpo"}, set()),
        ("grpo", {"loss_type": "grpo", "scale_rewards": "batch"}, {PARTS}),
        ("grpo", {"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum"}, {PARTS}),
        ("grpo", {"loss_type": "bnpo"}, {ROWS}),
        ("grpo", {"entropy_coef": 0.01}, {PARTS, ROWS}),
        ("grpo", {"loss_type": "dr_grpo", "use_adaptive_entropy": True}, {ROWS}),
        ("grpo", {"loss_type": "dr_grpo", "top_entropy_quantile": 0.2}, {ROWS}),
        ("rloo", {}, set()),
        ("rloo", {"normalize_advantages": True}, {PARTS}),
        ("online_dpo", {}, {ROWS}),
        ("distillation", {}, set()),
        ("reward", {}, set()),
    ],
)
def test_a_loss_over_several_rows_depends_on_which_share_a_micro_batch_or_a_generation(
    trainer: str, args: dict[str, Any], knobs: set[str]
) -> None:
    assert find_trainer(trainer).loss_depends_on(args).keys() == knobs


@pytest.mark.parametrize(
    ("choices", "allowed", "other"),
    [
        ({"sharding": "zero2"}, frozenset(), True),
        ({"sharding": "zero2"}, frozenset({"sharding"}), False),
        ({"sharding": "fsdp2"}, frozenset(), False),
        ({"sharding": "zero2", ROWS: 4}, frozenset({ROWS}), False),
    ],
)
def test_deepspeed_averages_micro_batches_that_online_dpo_adds_up(
    choices: dict[str, Choice], allowed: frozenset[str], other: bool
) -> None:
    known, plain = find_trainer("online_dpo"), workload(trainer="online_dpo", lengths={100: 100})
    here = setting(machine=TWO, of=plain, allowed=allowed, global_batch_size=8)
    start = known.defaults(here).but(**{ROWS: 2})
    here = replace(here, base=Base("mine.py", {ROWS: 2}))
    reason = known.illegal(known.normal(start.but(**choices), here), here)
    assert "--allow sharding" in str(reason) if other else reason is None


@pytest.mark.parametrize(
    ("average", "processes", "knobs"), [(False, 2, {ROWS, "packing"}), (False, 1, set()), (True, 2, set())]
)
def test_micro_batches_change_training_where_each_process_divides_by_its_own_tokens(
    average: bool, processes: int, knobs: set[str]
) -> None:
    args = {"average_tokens_across_devices": average}
    assert find_trainer("sft").loss_depends_on(args, None, processes).keys() == knobs


@pytest.mark.parametrize("columns", [("input_ids",), ("input_ids", "seq_lengths")])
def test_rows_that_are_packed_already_are_neither_packed_nor_padded_otherwise(columns: tuple[str, ...]) -> None:
    knobs = {"packing", "padding_free"} if "seq_lengths" in columns else set()
    assert find_trainer("sft").loss_depends_on({}, columns=columns).keys() == knobs


@pytest.mark.parametrize(
    ("trainer", "args", "weight", "knobs"),
    [
        # Its rows may lie end to end, with no mask that tells tokens from padding.
        ("sft", {}, 0.001, {ROWS, "packing", "pad_to_multiple_of"}),
        ("sft", {}, 0.0, set()),
        ("sft", {"router_aux_loss_coef": 0.0}, 0.001, set()),
        ("grpo", {"loss_type": "grpo"}, 0.001, {ROWS, "packing"}),
        ("reward", {}, 0.001, set()),
    ],
)
def test_the_balance_of_experts_depends_on_the_micro_batch(
    trainer: str, args: dict[str, Any], weight: float, knobs: set[str]
) -> None:
    model = replace(workload().model, router_aux_loss_coef=weight)
    assert find_trainer(trainer).loss_depends_on(args, model).keys() == knobs


def test_noise_that_depends_on_the_width_of_micro_batches_holds_what_sets_it(tmp_path: Path) -> None:
    width = (ROWS, "packing", "padding_free", "pad_to_multiple_of")
    for text, held in (("", False), ("neftune_noise_alpha: 5\n", True)):
        choices = started(a_base(tmp_path, f"{text}max_length: 2000\n")).problem.choices
        assert [len(choices[knob]) == 1 for knob in width] == [held] * len(width)


@pytest.mark.parametrize("length", [1024, 2048])
def test_what_depends_on_packing_holds_the_length_of_rows_that_the_file_packs(length: int, tmp_path: Path) -> None:
    packs = f"packing: true\nmax_length: {length}\nper_device_train_batch_size: 1\n"
    for text, held in (("", False), ("neftune_noise_alpha: 5\n", True)):
        found = started(a_base(tmp_path, f"{text}{packs}"), workload(lengths={20: 50, 100: 40, 500: 10}))
        assert (len(found.problem.choices["max_length"]) == 1) is held


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_sft_divides_by_the_tokens_of_a_micro_batch_where_the_model_is_given_no_others(trainer: str) -> None:
    model = replace(workload().model, accepts_loss_kwargs=False)
    # DPO's loss is a mean over rows.
    assert find_trainer(trainer).loss_depends_on({}, model).keys() == ({ROWS, "packing"} if trainer == "sft" else set())


@pytest.mark.parametrize(("loss", "searched"), [("sigmoid", True), ("aot", False)])
def test_the_loss_of_a_user_s_configuration_decides_which_micro_batches_are_searched(
    loss: str, searched: bool, tmp_path: Path
) -> None:
    text = f"loss_type: {loss}\nper_device_train_batch_size: 4\nmax_length: 2000\n"
    problem = started(a_base(tmp_path, text, "dpo"), workload(trainer="dpo")).problem
    assert (len(problem.choices[ROWS]) > 1) is searched


def test_parts_of_a_generation_have_to_be_allowed_with_grpo_s_own_loss(tmp_path: Path) -> None:
    of_grpo = workload(trainer="grpo", lengths={100: 100})
    base = a_base(tmp_path, "per_device_train_batch_size: 8\ngradient_accumulation_steps: 4\n", "grpo")
    assert started(base, of_grpo).problem.choices[PARTS] == ("step",)
    assert len(started(base, of_grpo, allow=("steps_per_generation",)).problem.choices[PARTS]) > 1


@pytest.mark.parametrize(
    ("trainer", "choices", "reason"),
    [
        ("dpo", {"reference": "precomputed"}, "reference=precomputed with sync_ref_model"),
        ("kto", {"reference": "precomputed"}, "reference=precomputed with sync_ref_model"),
        ("dpo", {"lora": "r16"}, "adapters with sync_ref_model"),
        ("grpo", {"beta": "0.0"}, "beta=0.0 with sync_ref_model"),
        ("dpo", {}, None),
    ],
)
def test_a_reference_that_follows_the_model_is_neither_computed_before_nor_absent(
    trainer: str, choices: dict[str, Choice], reason: str | None
) -> None:
    found, _ = of(trainer, {"args.sync_ref_model": True}, **choices)
    assert found is None if reason is None else reason in str(found)


def test_a_reference_that_follows_the_model_is_not_gathered_whole_unplanned() -> None:
    _, here = of("dpo", {"args.sync_ref_model": True})
    several = replace(here, machine=machine_with(here.machine, processes=8))
    sharding = next(item for item in find_trainer("dpo").techniques if item.name == "sharding")
    reasons = {choice: sharding.conflict(choice, Candidate({}), several) for choice in ("zero2", "zero3")}
    assert reasons["zero2"] is None
    assert "gathers all weights of the model and of its reference" in str(reasons["zero3"])


def test_probes_see_a_reference_that_follows_the_model(tmp_path: Path) -> None:
    base = a_base(tmp_path, "sync_ref_model: true\nmax_length: 2000\n", "dpo")
    assert started(base, workload(trainer="dpo")).plan.args["sync_ref_model"] is True
