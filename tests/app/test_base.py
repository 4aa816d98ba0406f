"""A search from the user's configuration keeps its values, and holds values that change training."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from autotune.app.epoch import epoch_of
from autotune.app.search import fingerprint
from autotune.core.plan import ALLOCATOR_VARIABLES, allocator_settings
from autotune.core.rows.batch_geometry import Layout, Shape
from autotune.core.rows.documents import NEVER_KEPT, Documents
from autotune.core.rows.lengths import LengthDistribution
from autotune.errors import InputError
from autotune.reporting.outlook import left_out_lines
from autotune.techniques.versions import accepted_versions
from autotune.userconfig.reading import plan_of
from tests.app.bases import a_base, disagreements, started
from tests.settings import GPU, LENGTHS, TWO, pictured_workload, problem, setting, workload

TYPICAL = """\
learning_rate: 1e-4
max_grad_norm: 0.5
gradient_checkpointing: false
per_device_train_batch_size: 2
gradient_accumulation_steps: 6
max_length: 512
"""
ADAPTER = "use_peft: true\nlora_r: 8\nlora_target_modules: [q_proj, v_proj]\nlora_dropout: 0.1\ndtype: bfloat16\n"


@pytest.mark.parametrize(
    "text",
    [
        TYPICAL,
        ADAPTER,
        "use_peft: true\n",
        "optim: adafactor\nmax_length: null\n",
        "packing: true\nmax_length: 2048\nper_device_train_batch_size: 1\n",
        "padding_free: true\nmax_length: null\n",
        "torch_compile_mode: reduce-overhead\n",
        "neftune_noise_alpha: 5\noptim_args: a=1\ntorch_compile: false\nattn_implementation: eager\n",
        "gradient_checkpointing: true\ngradient_checkpointing_kwargs: {use_reentrant: true}\n",
        pytest.param(
            "activation_checkpointing: true\nactivation_checkpointing_kwargs: {use_reentrant: true}\n",
            marks=pytest.mark.skipif(
                Version(version("transformers")) < Version("5.23"), reason="older transformers have no such keys"
            ),
        ),
        "env: {PYTORCH_ALLOC_CONF: 'max_split_size_mb:64'}\ndtype: bfloat16\n",
        "model_init_kwargs: {dtype: bfloat16, attn_implementation: eager}\n",
        "dtype: auto\nbf16: false\n",
        "report_to: comet_ml\n",
        "save_strategy: 'no'\nmax_grad_norm: null\n",
    ],
)
def test_the_baseline_trains_as_trl_does_by_the_file(text: str, tmp_path: Path) -> None:
    base = a_base(tmp_path, text)
    assert disagreements(base, started(base).plan) == {}


def test_what_no_technique_writes_is_in_every_plan(tmp_path: Path) -> None:
    problem = started(a_base(tmp_path, TYPICAL)).problem
    other = problem.normal(problem.baseline.but(gradient_checkpointing="on", padding_free="on"))
    for candidate in (problem.baseline, other):
        assert problem.trainer.plan(candidate, problem.setting).args["max_grad_norm"] == 0.5


def test_what_changes_a_step_on_a_device_alone_is_in_every_plan_and_in_no_trace(tmp_path: Path) -> None:
    text = "dataloader_num_workers: 8\ndataloader_prefetch_factor: 4\nfull_determinism: true\nddp_bucket_cap_mb: 100\n"
    text += "max_steps: 7\n"
    problem = started(a_base(tmp_path, text)).problem
    expected = yaml.safe_load(text)
    other = problem.normal(problem.baseline.but(gradient_checkpointing="off"))
    for candidate in (problem.baseline, other):
        plan = problem.trainer.plan(candidate, problem.setting)
        assert expected.items() <= plan.args.items()
        assert not expected.keys() & problem.trainer.traced_plan(plan, Layout.EQUAL, Shape(1, 8)).args.keys()


def test_a_mode_of_compiling_stays_unless_another_choice_replaces_it(tmp_path: Path) -> None:
    base = a_base(tmp_path, "torch_compile: true\ntorch_compile_mode: max-autotune\n")
    held = started(base)
    assert (held.plan.args["torch_compile"], held.plan.args["torch_compile_mode"]) == (True, "max-autotune")
    assert "torch_compile_mode: max-autotune" in held.start.base.unsearched["torch_compile"]
    # A mode alone would compile, too.
    assert "torch_compile_mode" not in started(base, fix={"torch_compile": "off"}).plan.args


def test_kernels_of_the_hub_are_a_choice_of_the_file(tmp_path: Path) -> None:
    packages = {**GPU.packages, "kernels": accepted_versions("kernels").split("=")[-1]}
    base = a_base(tmp_path, "model_init_kwargs: {use_kernels: true}\n")
    search = started(base, machine=replace(GPU, packages=packages))
    assert search.problem.baseline["hub_kernels"] == "on"
    assert search.plan.entry("args.model_init_kwargs.use_kernels") is True


def test_rows_that_the_loader_leaves_out_are_not_in_the_time_of_an_epoch() -> None:
    here = problem(setting())
    whole, full = (epoch_of(here.baseline, here, 100.0, drops_last=drops_last) for drops_last in (False, True))
    assert (whole.steps_per_epoch, full.steps_per_epoch) == (13, 12)
    assert whole.seconds_per_epoch is not None
    assert full.seconds_per_epoch == pytest.approx(0.96 * whole.seconds_per_epoch)


@pytest.mark.parametrize("packs", [True, False])
def test_rows_to_evaluate_on_are_packed_as_the_file_says_whatever_is_trained_on(packs: bool, tmp_path: Path) -> None:
    problem = started(a_base(tmp_path, f"packing: {not packs}\neval_packing: {packs}\nmax_length: 512\n")).problem
    other = problem.normal(problem.baseline.but(packing="bfd" if packs else "none"))
    for candidate in (problem.baseline, other):
        assert problem.trainer.plan(candidate, problem.setting).args["eval_packing"] is packs


def test_the_global_batch_is_the_file_s_unless_one_is_asked_for(tmp_path: Path) -> None:
    base = a_base(tmp_path, TYPICAL)
    assert started(base).problem.setting.global_batch_size == 12
    asked = started(base, global_batch_size=5)
    assert asked.problem.setting.global_batch_size == 5
    # Two rows do not divide five documents.
    assert (asked.plan.args["per_device_train_batch_size"], asked.plan.args["gradient_accumulation_steps"]) == (5, 1)


def test_packed_rows_keep_the_documents_of_a_step(tmp_path: Path) -> None:
    text = "packing: true\nmax_length: 2048\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 3\n"
    found = started(a_base(tmp_path, text))
    # 11,500 tokens in 100 rows: six rows of 2,048 tokens hold nearly all of them.
    assert 80 <= found.problem.setting.global_batch_size <= 100
    assert (found.plan.args["per_device_train_batch_size"], found.plan.args["gradient_accumulation_steps"]) == (2, 3)


def test_a_choice_that_changes_training_is_held_and_said(tmp_path: Path) -> None:
    problem = started(a_base(tmp_path, "optim: adafactor\ndtype: bfloat16\n")).problem
    assert problem.choices["optimizer"] == ("adafactor",)
    assert problem.choices["precision"] == ("bfloat16",)
    assert problem.illegal(problem.baseline.but(max_length=2000)) is None
    said = " ".join(left_out_lines(problem.space.left_out))
    assert "optim: adafactor, and another choice would change training (--allow optimizer)" in said
    assert "adamw_torch_fused" in said


def test_what_is_allowed_is_searched_from_the_file_s_choice(tmp_path: Path) -> None:
    found = started(a_base(tmp_path, "optim: adafactor\n"), allow=("optimizer",))
    assert "adamw_torch_fused" in found.problem.choices["optimizer"]
    assert found.problem.baseline["optimizer"] == "adafactor"


def test_a_fixed_choice_takes_the_place_of_the_file_s(tmp_path: Path) -> None:
    found = started(a_base(tmp_path, ADAPTER), fix={"lora": "r16"})
    assert found.plan.model["lora_r"] == 16
    assert "lora_dropout" not in found.plan.model


def test_the_user_s_own_adapter_stays(tmp_path: Path) -> None:
    found = started(a_base(tmp_path, ADAPTER))
    assert found.start.base.custom == ("lora",)
    assert len(found.problem.choices["lora"]) == 1
    assert {"lora_r": 8, "lora_dropout": 0.1, "use_peft": True}.items() <= found.plan.model.items()
    # Under a frozen model, the type of the weights is not training.
    assert len(found.problem.choices["precision"]) > 1


def test_keys_of_something_that_is_switched_off_hold_nothing(tmp_path: Path) -> None:
    problem = started(a_base(tmp_path, "packing: false\npacking_strategy: wrapped\nlora_r: 8\n")).problem
    assert "bfd" in problem.choices["packing"]


def test_a_length_that_cuts_stays_and_one_that_does_not_is_searched(tmp_path: Path) -> None:
    cuts = started(a_base(tmp_path, "max_length: 512\n"))
    assert cuts.problem.choices["max_length"] == (512,)
    assert cuts.problem.illegal(cuts.problem.baseline) is None
    for text in ("max_length: 4096\n", "max_length: null\n"):
        keeps = started(a_base(tmp_path, text)).problem
        assert keeps.setting.token_coverage == 1.0
        assert len(keeps.choices["max_length"]) > 1
        assert keeps.illegal(keeps.normal(keeps.baseline.but(max_length=1885))) is not None
    asked = started(a_base(tmp_path, "max_length: 512\n"), token_coverage=0.99).problem
    assert len(asked.choices["max_length"]) > 1


@pytest.mark.parametrize("length", ["null", str(pictured_workload().longest)])
def test_rows_with_images_that_are_not_cut_are_trained_without_a_length(length: str, tmp_path: Path) -> None:
    found = started(a_base(tmp_path, f"max_length: {length}\n"), of=pictured_workload())
    assert found.plan.args["max_length"] is None
    assert len(found.problem.choices["max_length"]) > 1


def test_padding_free_rows_that_the_file_does_not_cut_stay_whole(tmp_path: Path) -> None:
    search = started(a_base(tmp_path, "padding_free: true\nmax_length: null\n"))
    assert search.plan.args["max_length"] is None
    assert search.plan.truncate_to is None
    assert search.problem.setting.token_coverage == 1.0


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("max_length: null\n", True),
        ("max_length: null\npadding_free: true\n", True),
        ("max_length: 4096\n", False),
    ],
)
def test_rows_of_which_the_loss_counts_nothing_are_kept_where_the_file_sets_no_maximum_length(
    text: str, kept: bool, tmp_path: Path
) -> None:
    documents = Documents.of_rows([[1, 500]] * 9 + [[NEVER_KEPT, 900]], ordered=False, trained=[500] * 9 + [0])
    of = workload()
    rows = replace(of.dataset, lengths=LengthDistribution({500: 9, 900: 1}), several=documents)
    problem = started(a_base(tmp_path, text), of=replace(of, dataset=rows)).problem
    baseline = problem.baseline.but(per_device_train_batch_size=1, padding_free="off")
    geometry = problem.trainer.geometry(problem.trainer.plan(baseline, problem.setting), documents)
    assert (geometry.rows, max(shape.tokens for shape in geometry.shapes)) == ((10, 900) if kept else (9, 500))


def test_a_study_belongs_to_its_base(tmp_path: Path) -> None:
    one, other = (
        fingerprint(started(a_base(tmp_path, f"max_grad_norm: {norm}\n", name=f"{norm}.yaml")).problem, 1, seed=1)
        for norm in (0.5, 0.25)
    )
    assert one.keys() == other.keys()
    assert {name for name in one if one[name] != other[name]} == {"base"}
    renamed = fingerprint(started(a_base(tmp_path, "max_grad_norm: 0.5\n", name="renamed.yaml")).problem, 1, seed=1)
    assert renamed == one


def test_every_wrong_key_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        a_base(tmp_path, "lerning_rate: 1\nmax_seq_length: 5\nmax_grad_norm: [1]\nbeta: 0.1\n")
    message = str(raised.value)
    assert "4 things are wrong" in message
    for part in (
        "line 3: lerning_rate",
        "learning_rate",
        "line 4",
        "max_length",
        "line 5: max_grad_norm",
        "line 6: beta",
    ):
        assert part in message
    assert "mine.yaml --trainer sft --no-fit" in raised.value.hint


def test_what_a_probe_does_not_do_ends_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rope_theta"):
        a_base(tmp_path, "model_init_kwargs: {rope_theta: 1}\n")


def test_a_choice_that_is_impossible_here_is_told_before_anything_is_probed(tmp_path: Path) -> None:
    base = a_base(tmp_path, "optim: paged_adamw_8bit\n")
    with pytest.raises(InputError, match=r"paged_adamw_8bit of .*mine.yaml is not possible here"):
        started(base)


def test_the_longest_row_decides_whether_a_length_cuts(tmp_path: Path) -> None:
    base = a_base(tmp_path, "max_length: 512\n")
    short = workload(lengths={length: count for length, count in LENGTHS.items() if length <= 500})
    assert len(started(base, of=short).problem.choices["max_length"]) > 1


GROUPS = "num_generations: 4\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 6\n"


@pytest.mark.parametrize(
    ("steps", "choice"), [(6, "step/1"), (3, "step/2"), (2, "step/3"), (1, "step/6"), (12, "step*2"), (18, "step*3")]
)
def test_the_micro_batches_of_a_generation_are_the_file_s(steps: int, choice: str, tmp_path: Path) -> None:
    base = a_base(tmp_path, f"{GROUPS}steps_per_generation: {steps}\n", "grpo")
    found = started(base, of=workload(trainer="grpo"))
    assert found.plan.args["steps_per_generation"] == steps
    assert found.problem.baseline["steps_per_generation"] == choice
    assert found.problem.choices["steps_per_generation"][0] == choice
    assert found.problem.illegal(found.problem.baseline) is None
    # As often as the rows of a micro-batch change, the part of a step is the same.
    smaller = found.problem.normal(found.problem.baseline.but(per_device_train_batch_size=2))
    plan = found.problem.trainer.plan(smaller, found.problem.setting)
    assert (plan.args["gradient_accumulation_steps"], plan.args["steps_per_generation"]) == (12, 2 * steps)


def test_what_trl_fills_in_is_not_said_by_the_file(tmp_path: Path) -> None:
    found = started(a_base(tmp_path, GROUPS, "grpo"), of=workload(trainer="grpo"))
    assert found.problem.baseline["steps_per_generation"] == "step"
    assert "steps_per_generation" not in found.plan.args


@pytest.mark.parametrize("steps", [4, 9])
def test_generations_that_are_neither_a_part_nor_a_multiple_of_a_step_are_told(steps: int, tmp_path: Path) -> None:
    base = a_base(tmp_path, f"{GROUPS}steps_per_generation: {steps}\n", "grpo")
    with pytest.raises(InputError, match=f"steps_per_generation: {steps} is not a supported choice"):
        started(base, of=workload(trainer="grpo"))


@pytest.mark.parametrize(("completions", "choice"), [(24, "step/1"), (12, "step/2"), (48, "step*2")])
def test_the_completions_of_a_generation_are_the_file_s(completions: int, choice: str, tmp_path: Path) -> None:
    base = a_base(tmp_path, f"{GROUPS}generation_batch_size: {completions}\n", "grpo")
    found = started(base, of=workload(trainer="grpo"))
    assert found.problem.baseline["steps_per_generation"] == choice
    assert found.problem.illegal(found.problem.baseline) is None


def test_completions_of_a_generation_that_so_many_processes_cannot_share_are_told(tmp_path: Path) -> None:
    base = a_base(tmp_path, f"{GROUPS}generation_batch_size: 12\n", "grpo")
    with pytest.raises(
        InputError, match="generation_batch_size: 12 cannot be divided into micro-batches of 4 rows of 2"
    ):
        started(base, of=workload(trainer="grpo"), machine=TWO)


def test_prompts_to_evaluate_on_are_completed_as_often_as_the_file_says(tmp_path: Path) -> None:
    groups = "num_generations: 8\neval_strategy: steps\neval_steps: 5\nper_device_eval_batch_size: 4\n"
    of = replace(workload(trainer="grpo"), evaluation=workload().dataset)
    found = started(a_base(tmp_path, f"{groups}num_generations_eval: 2\n", "grpo"), of=of)
    assert found.plan.args["num_generations_eval"] == 2
    assert found.problem.illegal(found.problem.baseline) is None
    refused = found.problem.baseline.but(per_device_eval_batch_size=3)
    assert "groups of the 2 completions" in str(found.problem.illegal(refused))


@pytest.mark.parametrize("adapter", ["", "use_peft: true\n"])
def test_a_training_without_bf16_is_not_given_bf16(adapter: str, tmp_path: Path) -> None:
    found = started(a_base(tmp_path, f"bf16: false\n{adapter}"))
    assert found.problem.choices["precision"] == ("float32",)
    assert "bf16: false" in " ".join(left_out_lines(found.problem.space.left_out))
    allowed = started(a_base(tmp_path, f"bf16: false\n{adapter}"), allow=("precision",))
    assert allowed.problem.choices["precision"][0] == "float32"
    assert "float32+bf16" in allowed.problem.choices["precision"]


def test_recipes_are_tried_on_top_of_what_is_held(tmp_path: Path) -> None:
    held = started(a_base(tmp_path, "max_length: 512\nbf16: false\ngradient_accumulation_steps: 2\n")).problem
    packed = [recipe for recipe in held.recipes if recipe["packing"] == "bfd"]
    assert packed
    for recipe in held.recipes:
        assert (recipe["max_length"], recipe["precision"]) == (512, "float32")
        assert all(recipe[knob] in choices for knob, choices in held.choices.items())
    assert any(held.illegal(recipe) is None for recipe in packed)


def test_a_choice_of_the_file_is_always_among_those_that_are_tried(tmp_path: Path) -> None:
    text = "pad_to_multiple_of: 8\nper_device_train_batch_size: 3\ngradient_accumulation_steps: 5\nbf16: true\n"
    found = started(a_base(tmp_path, text), allow=("pad_to_multiple_of", "precision", "optimizer"))
    for knob, choice in found.start.base.choices.items():
        assert choice in found.problem.choices[knob]


def test_variables_of_the_file_replace_those_of_the_command_as_in_trl_s_parser(tmp_path: Path) -> None:
    base = a_base(tmp_path, "env: {PYTORCH_ALLOC_CONF: 'expandable_segments:True'}\n")
    command = replace(base.written.command, env={"PYTORCH_ALLOC_CONF": "expandable_segments:False"})
    user = plan_of(replace(base.written, command=command), base.read, base.config)
    assert user.plan.env == dict.fromkeys(ALLOCATOR_VARIABLES, "expandable_segments:True")


def test_variables_that_change_a_step_on_a_gpu_alone_are_in_every_plan_and_in_no_trace(tmp_path: Path) -> None:
    base = a_base(tmp_path, "env: {CUDA_LAUNCH_BLOCKING: 1, NCCL_BUFFSIZE: 8388608, WANDB_PROJECT: mine}\n")
    assert "traces leave out the effect of CUDA_LAUNCH_BLOCKING, NCCL_BUFFSIZE" in base.assumptions
    problem = started(base).problem
    plan = problem.trainer.plan(problem.baseline.but(allocator="expandable_segments"), problem.setting)
    variables = dict.fromkeys(ALLOCATOR_VARIABLES, "expandable_segments:True")
    assert plan.env == {**variables, "CUDA_LAUNCH_BLOCKING": "1", "NCCL_BUFFSIZE": "8388608"}
    assert problem.trainer.traced_plan(plan, Layout.EQUAL, Shape(1, 8)).env == {}


@pytest.mark.parametrize("older", ["expandable_segments:True", ""])
def test_the_older_of_the_allocator_s_variables_counts_where_both_are_set(older: str, tmp_path: Path) -> None:
    base = a_base(tmp_path, "env: {PYTORCH_ALLOC_CONF: 'expandable_segments:False'}\n")
    command = replace(base.written.command, env={"PYTORCH_CUDA_ALLOC_CONF": older})
    user = plan_of(replace(base.written, command=command), base.read, base.config)
    assert allocator_settings(user.plan.env) == older


def test_a_missing_tracker_is_of_no_concern_to_probes_and_a_missing_optimizer_is(tmp_path: Path) -> None:
    assert a_base(tmp_path, "report_to: [comet_ml]\n").config.values["report_to"] == ["comet_ml"]
    with pytest.raises(InputError, match=r"optim=schedule_free_adamw here: .*schedulefree"):
        a_base(tmp_path, "optim: schedule_free_adamw\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("accelerator_config: {dispatch_batches: true}\n", "dispatch_batches: true cannot be probed"),
        ("env: {ACCELERATE_USE_FSDP: 'true'}\n", "ACCELERATE_USE_FSDP chooses an engine"),
        ("fsdp: true\nenv: {FSDP_ACTIVATION_CHECKPOINTING: 'true'}\n", "fsdp_activation_checkpointing cannot be"),
    ],
    ids=str,
)
def test_what_no_probe_follows_is_refused_in_the_file_alone(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    with pytest.raises(InputError, match=f"mine.yaml: .*{message}"):
        a_base(tmp_path, text)
    # Variables of the shell are not those of the training.
    assert a_base(tmp_path, "").plan.trainer == "sft"
