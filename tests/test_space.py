"""The search space: the catalogue's choices that a file, a machine and the user's options allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.setting import Setting
from autotune.errors import InputError
from autotune.inspection.space_file import default_file, load
from autotune.space import Space, resolve
from autotune.trainers import trainers
from autotune.trainers.problem import TrainerProblem, require_legal
from tests.settings import CPU, GPU, contaminates, machine_with, setting, workload

TWO_GPUS = machine_with(GPU, processes=2)
SFT = trainers()["sft"]


def space(here: Setting, file: Path | None = None, **options: object) -> Space:
    loaded = load(file or default_file("sft"), "sft", SFT.techniques)
    return resolve(loaded, SFT.techniques, replace(here, **options))  # type: ignore[arg-type]


def written(folder: Path, text: str) -> Path:
    file = folder / "space.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_nothing_that_changes_training_is_searched_unless_it_is_allowed() -> None:
    found = space(setting(machine=GPU))
    assert found.choices["lora"] == ("none",)
    assert found.choices["packing"] == ("none", "bfd")
    assert "bfloat16" not in found.choices["precision"]
    assert {item.knob for item in found.unlockable} >= {"lora", "packing", "precision", "optimizer", "quantization"}


def test_what_cannot_stand_beside_a_fixed_choice_is_not_offered() -> None:
    found = space(
        setting(machine=GPU, allowed=frozenset({"peft_config"})), fixed={"peft_config": '{"peft_type":"IA3"}'}
    )
    assert "lora" not in {item.knob for item in found.unlockable}
    (reason,) = {item.reason for item in found.left_out if item.knob == "lora"}
    assert reason == "lora is another adapter than that of peft_config"
    assert "quantization" in {item.knob for item in found.unlockable}


def test_what_is_allowed_is_searched_with_what_it_makes_exact() -> None:
    found = space(setting(machine=GPU, allowed=frozenset({"lora"})))
    assert "r16" in found.choices["lora"]
    assert "bfloat16" in found.choices["precision"]


def test_a_fixed_length_is_the_only_one_that_other_choices_are_held_against() -> None:
    # Fixing a knob allows it. The file's words for other lengths, such as coverage, stand for none here.
    found = space(setting(machine=GPU, allowed=frozenset({"max_length"})), fixed={"max_length": 512})
    assert found.choices["max_length"] == (512,)
    assert found.choices["packing"] == ("none", "bfd")


def test_what_is_allowed_is_looked_at_in_tokens_not_in_the_file_s_words() -> None:
    found = space(setting(machine=GPU, allowed=frozenset({"max_length"})))
    assert all(isinstance(choice, int) for choice in found.choices["max_length"])
    assert found.choices["packing"] == ("none", "bfd")


def test_what_the_machine_cannot_do_is_left_out_with_a_reason() -> None:
    found = space(setting(machine=CPU))
    assert found.choices["liger"] == ("off",)
    assert any(item.knob == "liger" and "GPU" in item.reason for item in found.left_out)


def test_an_architecture_that_mixes_packed_documents_has_no_packing_and_the_reason_is_kept() -> None:
    opt = workload(checks=(contaminates("sdpa"), contaminates("eager")), model_type="opt")
    found = space(setting(of=opt))
    assert found.choices["packing"] == ("none",)
    assert found.choices["padding_free"] == ("off",)
    assert any(item.choice == "bfd" and "attend to each other on opt" in item.reason for item in found.left_out)


def test_a_fixed_choice_is_the_only_one_and_part_of_the_baseline() -> None:
    here = setting(allowed=frozenset({"lora"}))
    found = space(here, fixed={"lora": "r8"})
    assert found.choices["lora"] == ("r8",)
    problem = TrainerProblem(SFT, found, replace(here, fixed={"lora": "r8"}))
    assert problem.baseline["lora"] == "r8"


def test_an_excluded_knob_stays_at_trl_s_default() -> None:
    assert space(setting(), excluded=frozenset({"gradient_checkpointing"})).choices["gradient_checkpointing"] == ("on",)


def test_a_fixed_choice_that_the_machine_cannot_do_is_refused() -> None:
    with pytest.raises(InputError, match="liger=on is not possible here"):
        space(setting(), fixed={"liger": "on"})


def test_a_space_without_a_legal_candidate_is_refused_though_nothing_is_fixed(tmp_path: Path) -> None:
    file = written(tmp_path, "trainer: sft\ntechniques:\n  max_length: [1024]\n")
    here = setting()
    with pytest.raises(InputError, match=r"Fix other choices with --fix KNOB=CHOICE, or add choices"):
        require_legal(TrainerProblem(SFT, space(here, file), here))


def test_the_rule_that_no_choice_avoids_is_told_before_one_that_other_choices_avoid() -> None:
    fixed = {"quantization": "4bit-nf4", "lora": "none"}
    old = machine_with(GPU, compute_capability=(7, 5))
    here = setting(machine=old, allowed=frozenset(fixed), of=workload(lengths={100: 64}))
    problem = TrainerProblem(SFT, space(here, fixed=fixed), replace(here, fixed=fixed))
    assert "no bf16 arithmetic" in str(problem.illegal(problem.baseline))
    with pytest.raises(InputError, match="freezes the model; it needs lora or peft_config"):
        require_legal(problem)


def test_fixing_one_of_two_that_need_each_other_is_fine_when_the_other_is_allowed() -> None:
    fixed = {"quantization": "4bit-nf4"}
    here = setting(allowed=frozenset({"quantization", "lora"}))
    require_legal(TrainerProblem(SFT, space(here, fixed=fixed), replace(here, fixed=fixed)))


def test_a_choice_that_takes_three_others_can_be_fixed() -> None:
    fixed = {"context_parallel": 2}
    of = workload(lengths={9000: 64})
    here = replace(setting(machine=TWO_GPUS, of=of, global_batch_size=2), ranks_per_row=2)
    # Without recipes, a legal candidate takes sharding, padding and a longer length.
    alone = replace(space(here, fixed=fixed), recipes=())
    require_legal(TrainerProblem(SFT, alone, replace(here, fixed=fixed)))


def test_recipes_that_the_machine_cannot_do_are_dropped() -> None:
    found = space(setting())
    assert found.recipes
    assert all(recipe["liger"] == "off" for recipe in found.recipes)


def test_a_file_of_the_user_may_use_yaml_s_own_words(tmp_path: Path) -> None:
    text = "techniques:\n  padding_free: [off, on]\n  packing: none\n  pad_to_multiple_of: [null, 16]\n"
    choices = load(written(tmp_path, text), "sft", SFT.techniques).choices
    assert choices["padding_free"] == ("off", "on")
    assert choices["packing"] == ("none",)
    assert choices["pad_to_multiple_of"] == ("none", 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("techniques:\n  packing: bfd\n  packin: bfd\n", r"line 3: There is no knob 'packin'.*mean 'packing'"),
        ("techniques:\n  packing:\n    - bfd\n    - bfdd\n", r"line 4: 'bfdd' is not a choice of packing.*mean 'bfd'"),
        ("techniques:\n  packing: {a: b}\n", r"line 2: a choice of packing is a word or a number"),
        ("techniques: [packing]\n", r"line 1: not a mapping"),
        ("technique: {}\n", r"line 1: 'technique' is none of"),
        ("trainer: dpo\ntechniques: {}\n", r"line 1: it is for the trainer 'dpo'"),
        ("trainer: sft\n", r"no key 'techniques'"),
        ("a: [\n", r"space.yaml, line 2: "),
        ("techniques: " + "[" * 5000, r"line 1: more than 64 collections are inside one another"),
        (f"techniques: {{packing: {'9' * 5000}}}", r"space.yaml, line 1: '9{40}…' cannot be read"),
        ("techniques: {packing: 2026-13-45}", r"'2026-13-45' cannot be read"),
        ("techniques: {packing: !!bool x}", r"'x' cannot be read"),
        ("techniques: {packing: !own x}", r"line 1: the tag '!own' is not loaded"),
        ("techniques: {? [packing] : bfd}", r"line 1: a key is a collection"),
        ("techniques: {}\nrecipes: fast", r"line 2: recipes are a list"),
        ("", r"space.yaml is empty"),
        ("techniques:\n  packing: none\n  packing: bfd\n", r"line 3: 'packing' is there twice; line 2 has it too"),
        ("trainer: {a: b}\ntechniques: {}\n", r"line 1: it is for the trainer {'a': 'b'}, and 'sft'"),
        ("techniques: {}\nrecipes: [packing]\n", r"line 2: not a recipe"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(written(tmp_path, text), "sft", SFT.techniques)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.yaml does not exist"):
        load(tmp_path / "nowhere.yaml", "sft", SFT.techniques)
