"""``config.yaml`` is the user's file with a few changed values: nothing is lost, and TRL reads the plan from it."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from autotune.core.candidate import Candidate
from autotune.core.plan import ALLOCATOR_VARIABLES, TrainingPlan
from autotune.core.workload import Rollouts
from autotune.emit.arguments import thread_variables
from autotune.emit.rows import TrainingRows
from autotune.inspection.yaml_file import parse_yaml
from autotune.userconfig.base import UserBase
from autotune.userconfig.edit import EditTarget, edited_text, edits_of, values_after
from tests.app.bases import LONGEST, ROWS, Started, a_base, disagreements, started
from tests.settings import CPU, TWO, workload

# Keys of a training that nothing changes, and keys that a search may change, each in several spellings.
_KEPT = (
    "learning_rate: 1e-4", "lr_scheduler_type: cosine", "num_train_epochs: 3", "logging_steps: 10", "seed: 7",
    "max_grad_norm: 0.5", "warmup_steps: 10", "report_to: none", "output_dir: 'out'", "weight_decay: 0.1",
    'run_name: "its # mine"', "save_strategy: \"no\"", "env:\n  WANDB_PROJECT: mine",
)  # fmt: skip
_TUNED = (
    ("gradient_checkpointing: true", "gradient_checkpointing: false", "activation_checkpointing: true"),
    ("gradient_checkpointing_kwargs: {every_n_layers: 2}", "gradient_checkpointing_kwargs:\n  every_n_layers: 2"),
    ("bf16: false", "bf16: true", "fp16: false"),
    ("dtype: float32", "dtype: bfloat16", "model_init_kwargs: {dtype: float32}"),
    ("packing: true", "packing: false", "packing: no"),
    ("packing_strategy: bfd", "packing_strategy: wrapped"),
    ("per_device_train_batch_size: 2", "per_device_train_batch_size: 4"),
    ("gradient_accumulation_steps: 2", "gradient_accumulation_steps: 1"),
    ("max_length: 2048", "max_length: 512", "max_length: null"),
    ("attn_implementation: sdpa", "attn_implementation: eager"),
    ("optim: adamw_torch", "optim: adafactor"),
    ("pad_to_multiple_of: 8", "pad_to_multiple_of: 64"),
    ("use_peft: true\nlora_r: 8", "use_peft: false"),
    ("num_processes: 1", "num_cpu_threads_per_process: 1"),
)  # fmt: skip


def generated(seed: int) -> str:
    """Return a configuration with comments of which each has a number."""
    source = random.Random(seed)
    keys = source.sample(_KEPT, source.randint(2, 6))
    keys += [source.choice(spellings) for spellings in _TUNED if source.random() < 0.5]
    source.shuffle(keys)
    numbers = iter(range(1, 1000))
    lines: list[str] = []
    for key in keys:
        if source.random() < 0.3:
            lines.append(f"# comment {next(numbers)}: above")
        if source.random() < 0.2:
            lines.append("")
        first, *rest = key.split("\n")
        behind = f"  # comment {next(numbers)}: behind" if source.random() < 0.5 else ""
        lines += [first + behind, *rest]
    newline = source.choice(["\n", "\n", "\r\n"])
    return newline.join(lines) + source.choice(["", newline, f"{newline}# comment {next(numbers)}: end{newline}"])


def candidates(search: Started, count: int, seed: int) -> Iterator[Candidate]:
    """Yield legal candidates of a search."""
    source, problem, found = random.Random(seed), search.problem, 0
    for _ in range(400):
        drawn = problem.normal(Candidate({knob: source.choice(of) for knob, of in problem.choices.items()}))
        if problem.illegal(drawn) is None and drawn != problem.baseline:
            yield drawn
            found += 1
        if found == count:
            return


def after(search: Started, candidate: Candidate, **wanted: object) -> str:
    """Return the file as it is handed over for a candidate."""
    trainer, setting = search.problem.trainer, search.problem.setting
    plan = trainer.plan(candidate, setting)
    target = EditTarget(plan, frozenset(search.options.fixed), **wanted)  # type: ignore[arg-type]
    edits = edits_of(search.base, target, trainer, setting)
    return edited_text(search.base, edits)


def test_no_key_and_no_comment_is_lost_and_trl_reads_the_plan(tmp_path: Path) -> None:
    made = 0
    for seed in range(24):
        try:
            base = a_base(tmp_path, generated(seed), name=f"{seed}.yaml")
            search = started(base)
        except Exception as error:
            # Some of these TRL refuses by itself, such as a wrapped row of no length.
            if "cannot be a base" not in str(error) and "is not a supported choice of" not in str(error):
                raise
            continue
        for number, candidate in enumerate(candidates(search, 3, seed)):
            text = after(search, candidate)
            said = (seed, base.file.text, search.problem.normal(candidate), text)
            comments = re.findall(r"# comment (\d+)", base.file.text)
            assert re.findall(r"# comment (\d+)", text) == comments, said
            values, before = yaml.safe_load(text), base.file.values
            assert list(values)[: len(before)] == list(before), said
            assert kept(base, values) == [], said
            plan = search.problem.trainer.plan(candidate, search.problem.setting)
            again = a_base(tmp_path, text.removeprefix(ROWS), name=f"{seed}-{number}.yaml")
            # What TRL reads now is what would be trained by the plan.
            assert disagreements(again, plan) == {}, said
            assert unread(again, plan, search.problem.setting.workload.longest) == [], said
            made += 1
    assert made > 36


def unread(base: UserBase, plan: TrainingPlan, longest: int) -> list[str]:
    """Return the fields of a plan that TRL's classes have otherwise."""
    cuts_nothing = {"max_length": longest, "attn_implementation": "sdpa"}
    found = []
    loading = base.config.values.get("model_init_kwargs")
    # TRL takes these before its own arguments of the same names.
    model = {**base.model.values, **(loading if isinstance(loading, dict) else {})}
    for values, wanted in ((base.config.values, plan.args), (model, plan.model)):
        for name, value in wanted.items():
            read = values[name]
            within = isinstance(value, dict) and isinstance(read, dict) and value.items() <= read.items()
            # There are no rows to evaluate on.
            same = read == value or within or name == "per_device_eval_batch_size"
            spare = name == "max_length" and value == longest and isinstance(read, int) and read > longest
            if not same and not spare and not (read is None and value in (False, cuts_nothing.get(name))):
                found.append(f"{name}: {read!r} and not {value!r}")
    return found


def kept(base: UserBase, values: dict[str, object]) -> list[str]:
    """Return the keys that nothing is allowed to change, and that changed."""
    names = [spelling.split(":")[0] for spelling in _KEPT] + ["model_name_or_path", "datasets"]
    # The threads of the probes are added to the variables.
    variables = {"env": {**base.file.values.get("env", {}), **thread_variables(CPU.hardware.threads)}}
    before = {**base.file.values, **({} if "num_cpu_threads_per_process" in base.file.values else variables)}
    return [name for name in names if before.get(name) != values.get(name)]


@pytest.mark.parametrize("length", ["null", 2048])
def test_only_what_changes_is_in_the_difference(length: object, tmp_path: Path) -> None:
    text = (
        "# mine\noptim: adamw_torch_fused # o\ngradient_checkpointing: true  # g\n"
        f"max_length: {length}\nnum_processes: 1\n"
    )
    search = started(a_base(tmp_path, text + "use_cpu: true\nnum_cpu_threads_per_process: 2\n"))
    same = after(search, search.problem.baseline)
    # Without these, accelerate would read the file in the user's home.
    assert same == search.base.file.text + "accelerate_config: single_gpu\nmixed_precision: 'no'\n"
    other = after(search, search.problem.normal(search.problem.baseline.but(gradient_checkpointing="off")))
    assert other == same.replace("gradient_checkpointing: true  # g", "gradient_checkpointing: false  # g")


def test_packing_gets_the_maximum_length_that_the_file_lacks(tmp_path: Path) -> None:
    search = started(a_base(tmp_path, "max_length: null\nper_device_train_batch_size: 1\n"))
    packed = search.problem.normal(search.problem.baseline.but(packing="bfd", max_length=LONGEST))
    text = after(search, packed)
    assert "packing: true\n" in text
    # TRL refuses to pack without one.
    assert f"max_length: {LONGEST}\n" in text


@pytest.mark.parametrize("processes", [1, 2])
def test_the_precision_that_the_file_hands_on_to_accelerate_is_left_to_the_trainer_s_arguments(
    processes: int, tmp_path: Path
) -> None:
    text = f"mixed_precision: bf16 # m\nbf16: true\nnum_processes: {processes}\n"
    search = started(a_base(tmp_path, text), machine=TWO if processes == 2 else CPU)
    assert "mixed_precision: 'no' # m\n" in after(search, search.problem.baseline)


@pytest.mark.parametrize(
    ("text", "shuffled"),
    [
        ("packing: true\n", True),
        ("packing: true\ntrain_sampling_strategy: sequential\n", None),
        ("shuffle_dataset: true\n", True),
    ],
)
def test_rows_are_shuffled_before_packing_unless_the_file_trains_on_them_in_order(
    text: str, shuffled: bool | None, tmp_path: Path
) -> None:
    search = started(a_base(tmp_path, text))
    plan = search.problem.trainer.plan(search.problem.baseline, search.problem.setting)
    assert plan.args.get("shuffle_dataset", False) is plan.args["packing"]
    assert yaml.safe_load(after(search, search.problem.baseline)).get("shuffle_dataset") is shuffled


def test_a_key_that_goes_back_to_the_default_stays_in_its_line(tmp_path: Path) -> None:
    text = "gradient_checkpointing_kwargs: {every_n_layers: 2} # k\ngradient_checkpointing: true\n"
    search = started(a_base(tmp_path, text))
    assert search.problem.baseline["gradient_checkpointing"] == "every_2"
    changed = after(search, search.problem.baseline.but(gradient_checkpointing="on"))
    assert "gradient_checkpointing_kwargs: null # k\n" in changed


def test_a_fixed_choice_is_written_over_the_file_s(tmp_path: Path) -> None:
    search = started(a_base(tmp_path, "use_peft: true\nlora_r: 8 # r\nlora_dropout: 0.2\n"), fix={"lora": "r64"})
    values = yaml.safe_load(after(search, search.problem.baseline))
    assert (values["lora_r"], values["lora_alpha"], values["lora_dropout"]) == (64, 128, 0.05)


def test_another_model_and_other_rows_are_named_in_place_of_the_file_s(tmp_path: Path) -> None:
    revision = "model_revision: v2 # r\nmodel_init_kwargs: {revision: v3}\neval_strategy: steps\neval_steps: 5\n"
    search = started(a_base(tmp_path, f"dataset_name: mine # d\nassistant_only_loss: true\n{revision}"))
    rows = TrainingRows("parquet", "train", "/bundle/rows.parquet", "rows.parquet", cut=True)
    values = yaml.safe_load(after(search, search.problem.baseline, model="/other", rows=rows))
    assert values["model_name_or_path"] == "/other"
    # Those of the file's own model.
    assert (values["model_revision"], values["model_init_kwargs"]["revision"]) == ("main", "main")
    assert values["datasets"] == [{"path": "parquet", "data_files": "/bundle/rows.parquet", "split": "train"}]
    assert values["dataset_name"] is None
    # TRL refuses it for rows of tokens, whose labels are made.
    assert values["assistant_only_loss"] is False
    whole = yaml.safe_load(after(search, search.problem.baseline, rows=replace(rows, cut=False), evaluates=True))
    assert (whole["assistant_only_loss"], whole["eval_strategy"]) == (True, "steps")


def test_the_accumulation_follows_a_global_batch_that_was_asked_for(tmp_path: Path) -> None:
    text = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2 # a\n"
    search = started(a_base(tmp_path, text), global_batch_size=64)
    assert "gradient_accumulation_steps: 16 # a\n" in after(search, search.problem.baseline)


@pytest.mark.parametrize("variable", ALLOCATOR_VARIABLES)
def test_a_variable_that_is_not_needed_is_emptied(variable: str, tmp_path: Path) -> None:
    text = f"env:\n  {variable}: expandable_segments:True # e\n  OTHER: x\n"
    search = started(a_base(tmp_path, text))
    plan = replace(search.plan, env={})
    trainer, setting = search.problem.trainer, search.problem.setting
    changed = edited_text(search.base, edits_of(search.base, EditTarget(plan), trainer, setting))
    assert parse_yaml(changed, tmp_path).values["env"] == {variable: "", "OTHER": "x", "OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize("steps", [6, 3, 2, 12])
def test_the_micro_batches_of_a_generation_follow_the_rows_and_stay_with_them(steps: int, tmp_path: Path) -> None:
    text = "num_generations: 4\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 6\n"
    text += "reward_funcs: [think_format_reward] # r\n"
    base = a_base(tmp_path, f"{text}steps_per_generation: {steps}  # mine\n", "grpo")
    search = started(base, of=replace(workload(trainer="grpo"), rollouts=Rollouts(("accuracy_reward",))))
    same = after(search, search.problem.baseline)
    assert f"steps_per_generation: {steps}  # mine\n" in same
    assert "reward_funcs: [accuracy_reward] # r\n" in same
    smaller = search.problem.normal(search.problem.baseline.but(per_device_train_batch_size=2))
    read = yaml.safe_load(after(search, smaller))
    assert (read["gradient_accumulation_steps"], read["steps_per_generation"]) == (12, 2 * steps)


def test_a_mapping_without_a_value_gets_the_keys_that_are_written_into_it(tmp_path: Path) -> None:
    base = a_base(tmp_path, "gradient_checkpointing_kwargs:\n")
    after = values_after(base, {("gradient_checkpointing_kwargs", "every_n_layers"): 2})
    assert after["gradient_checkpointing_kwargs"] == {"every_n_layers": 2}
