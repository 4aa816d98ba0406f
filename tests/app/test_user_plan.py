"""Each value of a user's configuration object that affects a step is respected, or refused by name."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from peft import LoraConfig, PrefixTuningConfig
from peft.tuners.tuners_utils import check_target_module_exists
from transformers import TrainingArguments
from trl import DistillationConfig, DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig
from trl.experimental.online_dpo import OnlineDPOConfig

from autotune.core.rows.batch_geometry import Layout
from autotune.errors import InputError
from autotune.step.objects import config as traced_config
from autotune.step.objects import peft_config as traced_peft_config
from autotune.trainers import find_trainer
from autotune.trainers.kto import POLICY_KL
from autotune.userconfig.fields import user_plan as of_configuration
from autotune.userconfig.objects import configuration_of
from tests.app.configured import plan_of, sft, user_plan


@pytest.mark.parametrize("config_class", [GRPOConfig, RLOOConfig])
def test_the_sizes_of_generations_that_a_configuration_fills_in_are_taken(config_class: Any) -> None:
    config = config_class(use_cpu=True, bf16=False, report_to="none", gradient_accumulation_steps=2)
    assert config.generation_batch_size == 16
    assert plan_of(config).args["steps_per_generation"] == 2


@pytest.mark.parametrize("config_class", [GRPOConfig, RLOOConfig, DistillationConfig, OnlineDPOConfig])
def test_a_cache_of_another_kind_is_refused_since_no_trace_has_its_memory(config_class: Any) -> None:
    # transformers compiles the decoding with a static cache, and moves an offloaded one between devices.
    config = config_class(use_cpu=True, bf16=False, report_to="none", cache_implementation="static")
    with pytest.raises(InputError, match="cache_implementation='static'"):
        plan_of(config)


@pytest.mark.parametrize("config_class", [GRPOConfig, RLOOConfig, DistillationConfig])
def test_completions_without_a_limit_are_refused_by_name(config_class: Any) -> None:
    config = config_class(use_cpu=True, bf16=False, report_to="none", max_completion_length=None)
    with pytest.raises(InputError, match=r"max_completion_length: null is not planned: transformers then .* 20 tokens"):
        plan_of(config)


def test_a_single_target_stays_the_end_of_a_name() -> None:
    # trl.ModelConfig makes text of a list of one, and PEFT takes text for an expression that has to match a whole name.
    plan = plan_of(sft(), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    found = traced_peft_config(plan)
    assert found is not None
    names = ["model.layers.0.self_attn.q_proj", "q_proj", "model.layers.0.self_attn.xq_proj", "q_proj.base"]
    assert [check_target_module_exists(found, name) is not None for name in names] == [True, True, False, False]


def test_the_default_configuration_comes_to_trls_defaults() -> None:
    user = user_plan(SFTConfig(use_cpu=True, bf16=False), None)
    assert user.plan.args["gradient_checkpointing"] is True
    assert user.plan.args["optim"] == "adamw_torch_fused"
    assert user.plan.model == {"dtype": "float32", "use_peft": False}
    assert user.assumptions == ()


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": False},
        pytest.param(
            {"activation_checkpointing": False},
            marks=pytest.mark.skipif(
                not hasattr(SFTConfig, "activation_checkpointing"), reason="needs transformers 5.23 or later"
            ),
        ),
        {"gradient_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2}},
        {"activation_offloading": True},
        {"optim": "adafactor", "optim_args": "scale_parameter=False"},
        {"optim": "sgd", "weight_decay": 0.1},
        {"use_liger_kernel": True, "liger_kernel_config": {"rope": False}},
        {"loss_type": "dft"},
        {"neftune_noise_alpha": 5.0},
        {"torch_compile_mode": "max-autotune"},
        {"label_smoothing_factor": 0.1},
        {"max_grad_norm": 0.0},
        {"torch_empty_cache_steps": 4},
        {"router_aux_loss_coef": 0.01},
        {"bf16": True},
        {"fp16": True},
    ],
    ids=str,
)
def test_what_a_step_depends_on_reaches_the_traced_trainer(options: dict[str, Any]) -> None:
    given = sft(**options)
    rebuilt = traced_config(plan_of(given), use_cpu=True, output_dir="nowhere")
    for name in (*options, "gradient_checkpointing", "gradient_checkpointing_kwargs"):
        assert getattr(rebuilt, name) == getattr(given, name)


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 1.0, "lr_scheduler_type": "cosine", "warmup_steps": 10},
        {"dataset_num_proc": 4, "eos_token": "</s>", "dataset_text_field": "words"},
        {"logging_steps": 1, "save_strategy": "epoch", "run_name": "x", "seed": 3, "output_dir": "elsewhere"},
        {"dataloader_num_workers": 2, "ddp_timeout": 60, "hub_model_id": "a/b"},
    ],
    ids=str,
)
def test_what_no_step_depends_on_changes_nothing(options: dict[str, Any]) -> None:
    plain = plan_of(sft()).args
    changed = {name: value for name, value in plan_of(sft(**options)).args.items() if plain.get(name) != value}
    assert changed == {}


@pytest.mark.parametrize(
    ("length", "share"),
    [
        ({"num_train_epochs": 1}, 1),
        ({"num_train_epochs": 4}, 1 / 4),
        # Of 80 rows, 5 steps train on 40.
        ({"num_train_epochs": 4, "max_steps": 5}, 2),
        ({"num_train_epochs": 4, "max_steps": 40}, 1 / 4),
    ],
)
def test_the_pass_of_a_reference_is_shared_by_the_epochs_or_steps_of_the_configuration(
    length: dict[str, int], share: float
) -> None:
    config = DPOConfig(use_cpu=True, bf16=False, precompute_ref_log_probs=True, **length)
    assert plan_of(config).pass_share(80) == share


def test_rows_that_an_evaluation_keeps_on_the_device_are_not_planned() -> None:
    config = configuration_of(sft(include_for_metrics=["inputs"], eval_strategy="epoch"))
    assert of_configuration(config, {}).plan == plan_of(sft())
    with pytest.raises(InputError, match=r"include_for_metrics=\['inputs'\]\) on memory is not known"):
        of_configuration(config, {}, evaluates=True)


def strange(config: Any, name: str) -> Any:
    """Return a copy with a field set behind the back of the class's own checks."""
    copy = object.__new__(type(config))
    vars(copy).update({**vars(config), name: "strange"})
    return copy


def test_of_the_installed_trl_only_devices_and_another_models_template_are_refused() -> None:
    # The arguments of loading have rules of their own.
    names = {field.name for field in dataclasses.fields(SFTConfig)} - {"model_init_kwargs"}
    assert {name for name in names if is_refused(strange(sft(), name))} == {
        "chat_template_path", "debug", "deepspeed", "fsdp", "fsdp_config", "parallelism_config",
        "train_sampling_strategy",
    }  # fmt: skip


ORDER = "train_sampling_strategy"


def test_speeds_of_rows_in_another_order_are_assumed_those_of_random_order() -> None:
    for order in ("sequential", "group_by_length"):
        user = user_plan(sft(**{ORDER: order}), None)
        assert user.plan == plan_of(sft())
        assert any(f"rows in random order, but {ORDER}={order}" in text for text in user.assumptions)


@pytest.mark.parametrize(
    ("config_class", "order"),
    # No rows of DPO have the column that transformers takes lengths from, and KTO's blocks keep the dataset's order.
    [(SFTConfig, "batch_rebalance"), (DPOConfig, "group_by_length"), (KTOConfig, "random")],
)
def test_an_order_of_unknown_micro_batches_is_refused(config_class: Any, order: str) -> None:
    config = config_class(use_cpu=True, bf16=False, report_to="none", **{ORDER: order})
    with pytest.raises(InputError, match=f"does not support {ORDER}={order}"):
        plan_of(config)


def test_rows_of_which_the_end_is_kept_are_told_to_the_trace() -> None:
    assert plan_of(sft(truncation_mode="keep_start")) == plan_of(sft())
    assert plan_of(sft(truncation_mode="keep_end")).args["truncation_mode"] == "keep_end"


def test_how_tokens_are_drawn_is_told_to_the_trace_and_how_many_are_is_refused_by_name() -> None:
    asked: dict[str, Any] = {"output_dir": "o", "use_cpu": True, "bf16": False}
    plan = plan_of(GRPOConfig(**asked, generation_kwargs={"top_k": 20}))
    assert plan.args["generation_kwargs"] == {"top_k": 20}
    for name in ("max_new_tokens", "num_beams"):
        with pytest.raises(InputError, match=f"The effect of generation_kwargs' {name}=4 on memory"):
            plan_of(GRPOConfig(**asked, generation_kwargs={"top_k": 20, name: 4}))


def is_refused(config: Any) -> bool:
    """Return whether a configuration has an unsupported setting."""
    try:
        user_plan(config, None)
    except InputError:
        return True
    return False


def test_a_field_that_a_later_release_adds_is_refused_once_it_is_used() -> None:
    @dataclasses.dataclass
    class SFTConfig(globals()["SFTConfig"]):  # type: ignore[misc]
        activation_compression: str | None = None

    assert plan_of(SFTConfig(use_cpu=True, bf16=False)) == plan_of(sft())
    with pytest.raises(InputError, match="activation_compression='fp8'") as raised:
        plan_of(SFTConfig(use_cpu=True, bf16=False, activation_compression="fp8"))
    assert "autotune probe" in raised.value.hint


def test_batches_that_processes_split_among_them_are_not_known() -> None:
    assert plan_of(sft(accelerator_config={"split_batches": False})) == plan_of(sft())
    with pytest.raises(InputError, match="split_batches=True") as raised:
        plan_of(sft(accelerator_config={"split_batches": True}))
    assert "divided by the number of processes" in raised.value.hint


def test_gradients_that_are_summed_in_each_micro_batch_are_traced_so_and_other_sums_are_not_known() -> None:
    asked: dict[str, Any] = {"gradient_accumulation_kwargs": {"sync_each_batch": True, "num_steps": 1}}
    assert plan_of(sft(accelerator_config=asked)).args["accelerator_config"] == {
        "gradient_accumulation_kwargs": {"sync_each_batch": True}
    }
    assert plan_of(sft(accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": False}})) == plan_of(
        sft()
    )
    with pytest.raises(InputError, match="sync_with_dataloader"):
        plan_of(sft(accelerator_config={"gradient_accumulation_kwargs": {"sync_with_dataloader": False}}))


def test_a_checkpoint_without_the_optimizer_s_state_is_traced_so() -> None:
    assert [plan_of(sft(save_only_model=alone)).args["save_only_model"] for alone in (True, False)] == [True, False]


def test_a_training_that_saves_no_checkpoint_is_traced_so() -> None:
    found = [plan_of(sft(save_strategy=when)) for when in ("no", "epoch", "steps")]
    assert [plan.saves_checkpoints for plan in found] == [False, True, True]
    # The others save the same.
    assert found[1] == found[2]


def test_what_cannot_be_sent_to_another_process_is_named() -> None:
    with pytest.raises(InputError, match="gradient_checkpointing_kwargs="):
        plan_of(sft(gradient_checkpointing_kwargs={"context_fn": lambda: None}))


def test_the_configuration_of_another_trainer_is_refused() -> None:
    with pytest.raises(InputError, match="TrainingArguments is not a supported configuration") as raised:
        plan_of(TrainingArguments(use_cpu=True))
    assert "SFTConfig" in raised.value.hint


@pytest.mark.parametrize(
    ("options", "flat"),
    [
        ({"packing": True}, True),
        ({"packing": True, "packing_strategy": "wrapped"}, False),
        ({"padding_free": True, "max_length": None}, True),
        ({"packing_strategy": "bfd"}, False),
    ],
)
def test_rows_lie_end_to_end_as_trl_lays_them(options: dict[str, Any], flat: bool) -> None:
    plan = plan_of(sft(**options))
    assert (find_trainer(plan.trainer).layout(plan, 2) is Layout.FLAT) is flat


@pytest.mark.parametrize(
    ("options", "assumption"),
    [
        (
            {"assistant_only_loss": True},
            "the loss counts every token, including those that assistant_only_loss excludes",
        ),
        (
            {"completion_only_loss": True},
            "the loss counts every token, including those that completion_only_loss excludes",
        ),
        ({"eval_strategy": "steps", "eval_steps": 5}, "evaluation is left out"),
        (
            {"full_determinism": True},
            "traces have the workspaces that a GPU's libraries take without full_determinism",
        ),
        (
            {"skip_memory_metrics": False},
            (
                "training shares the interpreter with no further thread, while skip_memory_metrics=false starts one"
                " that reads the memory of the process without a pause and slows training"
            ),
        ),
    ],
)
def test_what_the_configuration_alone_cannot_tell_is_said(options: dict[str, Any], assumption: str) -> None:
    assert user_plan(sft(**options), None).assumptions == (assumption,)


@pytest.mark.parametrize(
    "options",
    [
        {"r": 4},
        {"lora_dropout": 0.1, "use_rslora": True, "lora_alpha": 5},
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": "all-linear", "use_dora": True},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
    ],
    ids=str,
)
def test_adapters_are_traced_as_they_are_given(options: dict[str, Any]) -> None:
    given = LoraConfig(task_type="CAUSAL_LM", **options)
    rebuilt = traced_peft_config(plan_of(sft(), given))
    assert rebuilt is not None
    for name in ("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_rslora", "use_dora",
                 "target_parameters"):  # fmt: skip
        assert getattr(rebuilt, name) == getattr(given, name), name


@pytest.mark.parametrize(
    "options",
    [
        {"bias": "all"},
        {"rank_pattern": {"q_proj": 64}},
        {"layers_to_transform": [0]},
        {"trainable_token_indices": [1, 2]},
        {"target_modules": ["q_proj"], "exclude_modules": ["k_proj"]},
        {"inference_mode": True},
    ],
    ids=str,
)
def test_adapters_that_a_trace_cannot_follow_are_refused_by_name(options: dict[str, Any]) -> None:
    name = list(options)[-1]
    with pytest.raises(InputError, match=rf"LoraConfig\({name}="):
        plan_of(sft(), LoraConfig(task_type="CAUSAL_LM", **options))


@pytest.mark.parametrize("given", [PrefixTuningConfig(num_virtual_tokens=4), SimpleNamespace()])
def test_peft_that_is_no_lora_is_refused(given: object) -> None:
    with pytest.raises(InputError, match=f"of type {type(given).__name__} is not supported"):
        plan_of(sft(), given)


@pytest.mark.parametrize("task", ["SEQ_CLS", None])
def test_adapters_of_a_reward_model_keep_their_task(task: str | None) -> None:
    given = LoraConfig(task_type=task, modules_to_save=["score"])
    rebuilt = traced_peft_config(plan_of(RewardConfig(use_cpu=True, bf16=False), given))
    assert rebuilt is not None
    assert (rebuilt.task_type, rebuilt.modules_to_save) == (given.task_type, given.modules_to_save)


def test_a_configuration_of_kto_keeps_what_decides_its_passes() -> None:
    plan = plan_of(KTOConfig(use_cpu=True, bf16=False, loss_type="apo_zero_unpaired", desirable_weight=0.5))
    assert plan.trainer == "kto"
    assert plan.args["desirable_weight"] == 0.5
    assert POLICY_KL not in find_trainer("kto").program(plan).names
    assert POLICY_KL in find_trainer("kto").program(plan_of(KTOConfig(use_cpu=True, bf16=False))).names


def test_a_configuration_of_dpo_keeps_what_it_says_of_its_loss_and_its_reference() -> None:
    plan = plan_of(DPOConfig(use_cpu=True, bf16=False, beta=0.3, precompute_ref_log_probs=True, loss_type=["ipo"]))
    assert plan.trainer == "dpo"
    assert (plan.args["beta"], plan.args["loss_type"]) == (0.3, ["ipo"])
    assert plan.args["precompute_ref_log_probs"] is True
    assert find_trainer("dpo").layout(plan, 1) is Layout.PADDED
