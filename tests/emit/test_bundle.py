"""The files at the end of a run, and the errors if they cannot be written."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.documents.result import Result
from autotune.core.files.codec import decode
from autotune.core.plan import Completions, TrainingPlan
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.status import RunStatus
from autotune.core.workload import DatasetSource, ModelSource, Rollouts
from autotune.emit.bundle import write_bundle
from autotune.errors import InputError
from autotune.trainers.prompts import NO_REWARD, PLACEHOLDER_REWARD
from tests.emit.bundles import arguments_in, recommending, text_of
from tests.reporting.examples import BASELINE, a_choosable, a_result, a_workload, interrupted, nothing_fits


def the_config(directory: Path) -> dict[str, object]:
    """Return the values of ``config.yaml``."""
    document: dict[str, object] = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
    return document


def test_a_recommendation_is_handed_over_as_three_files(tmp_path: Path) -> None:
    write_bundle(a_result(), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.yaml", "result.json", "train.py"]


def test_the_config_holds_the_plan_verbatim(tmp_path: Path) -> None:
    result = a_result()
    write_bundle(result, tmp_path)
    assert result.recommended is not None
    plan = result.recommended.plan
    assert {**plan.args, **plan.model}.items() <= the_config(tmp_path).items()


def test_the_config_names_model_data_and_a_relative_output_directory(tmp_path: Path) -> None:
    write_bundle(a_result(), tmp_path)
    config = the_config(tmp_path)
    assert config["model_name_or_path"] == "Qwen/Qwen2.5-0.5B"
    assert config["datasets"] == [{"path": "json", "data_files": "/data/chats.jsonl", "split": "train"}]
    assert config["output_dir"] == "Qwen2.5-0.5B-chats-sft"


def test_a_hub_dataset_is_named_by_path_and_split(tmp_path: Path) -> None:
    workload = a_workload(dataset_source=DatasetSource("trl-lib/Capybara", "trl-lib/Capybara", split="test"))
    write_bundle(a_result(workload=workload), tmp_path)
    assert the_config(tmp_path)["datasets"] == [{"path": "trl-lib/Capybara", "split": "test"}]


def test_the_head_of_the_config_has_what_a_gpu_needs_and_what_of_that_is_allocated(tmp_path: Path) -> None:
    write_bundle(a_result(), tmp_path)
    said = "Result: memory used 23.00 GiB (21.00 GiB allocated) on the worst batch and 23,000 tok/s"
    assert said in text_of(tmp_path / "config.yaml")
    result = a_result()
    assert result.recommended is not None
    on_cpu = replace(result.recommended, device_bytes=None, reserved_bytes=None)
    write_bundle(replace(result, recommended=on_cpu), tmp_path)
    assert "Result: memory used 21.00 GiB on the worst batch" in text_of(tmp_path / "config.yaml")


GROUPS = {"num_generations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}


def test_a_reward_that_nobody_named_comes_first_in_the_files(tmp_path: Path) -> None:
    plan = TrainingPlan("grpo", GROUPS, rewards=(NO_REWARD,), completions=Completions(8, 12))
    write_bundle(recommending(plan), tmp_path)
    for name in ("config.yaml", "train.py"):
        text = text_of(tmp_path / name)
        assert text.index(PLACEHOLDER_REWARD) < text.index("Recommended by autotune for")


@pytest.mark.parametrize(
    ("rewards", "imported"), [(("my_rewards.length",), True), (("think_format_reward",), False)], ids=["own", "TRL's"]
)
def test_only_rewards_that_are_imported_have_a_place_to_start_training_in(
    rewards: tuple[str, ...], imported: bool, tmp_path: Path
) -> None:
    plan = TrainingPlan("grpo", GROUPS, rewards=rewards, completions=Completions(8, 12))
    write_bundle(recommending(plan, workload=a_workload(trainer="grpo", rollouts=Rollouts(rewards))), tmp_path)
    script = text_of(tmp_path / "train.py")
    assert f"rewarded by {rewards[0]}" in script
    assert ("start training where Python finds its module" in script) == imported


def test_a_hub_revision_is_kept(tmp_path: Path) -> None:
    workload = a_workload(model_source=ModelSource("Qwen/Qwen2.5-0.5B", revision="v1"))
    write_bundle(a_result(workload=workload), tmp_path)
    assert the_config(tmp_path)["model_revision"] == "v1"


def test_the_launch_gets_the_processes_and_threads_that_were_measured(tmp_path: Path) -> None:
    write_bundle(a_result(), tmp_path)
    config = the_config(tmp_path)
    assert (config["num_processes"], config["env"]) == (1, {"OMP_NUM_THREADS": "8"})
    assert "os.environ['OMP_NUM_THREADS'] = '8'" in (tmp_path / "train.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("value", ["no", "off", "on", "yes", "null", "1e-5", "2026-01-01", None, {"offload": True}])
def test_every_value_reads_back_as_what_it_was(tmp_path: Path, value: object) -> None:
    write_bundle(recommending(TrainingPlan("sft", {"save_strategy": value})), tmp_path)
    assert the_config(tmp_path)["save_strategy"] == value


def test_the_head_of_the_config_says_what_was_measured_and_where(tmp_path: Path) -> None:
    write_bundle(a_result(), tmp_path)
    head = text_of(tmp_path / "config.yaml")
    for part in (
        "NVIDIA A10G",
        "trl 1.16.0",
        "21.00 GiB",
        "23,000 tok/s on typical ones in 6 runs, with a 95 % range of 21,400 to 24,720 for a single run",
        "2.30x (95 % CI 2.11 to 2.51) the speed of TRL's default",
        "Confirmed by a longer run",
    ):
        assert part in head


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"speedup": 1.04, "speedup_low": 0.91, "speedup_high": 1.2},
            "As fast as TRL's default at the same global batch of 8 within run-to-run variation: 1.04x (95 % CI",
        ),
        (
            {"speedup": 0.8, "speedup_low": 0.5, "speedup_high": 0.9},
            "0.80x (95 % CI 0.50 to 0.90) the speed of TRL's default",
        ),
        ({"speedup": 0.5, "speedup_low": None}, "0.50x the speed of TRL's default"),
        ({"speedup": 1.004, "speedup_low": None}, "As fast as TRL's default"),
        (
            {"speedup": 1.0, "speedup_low": None, "recommended": a_choosable(0, BASELINE)},
            "TRL's default is already the fastest candidate that fits.",
        ),
        (
            {"speedup": 1.0, "recommended": a_choosable(0, BASELINE), "compared": "the fastest of 2 compared of 9"},
            "TRL's default is the fastest of 2 compared of 9.",
        ),
        ({"compared": "the fastest of 2 compared of 9"}, "It is the fastest of 2 compared of 9."),
        (
            {"speedup": 1.0, "recommended": a_choosable(0, BASELINE), "status": RunStatus.INTERRUPTED},
            "Nothing faster than TRL's default was found so far.",
        ),
    ],
)
def test_the_heads_claim_no_other_speed_than_the_terminal(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_bundle(a_result(**changes), tmp_path)
    for name in ("config.yaml", "train.py"):
        assert said in text_of(tmp_path / name)


def test_the_head_admits_what_was_not_confirmed(tmp_path: Path) -> None:
    write_bundle(a_result(confirmed=False), tmp_path)
    assert "Not confirmed by a longer run." in (tmp_path / "config.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(("confirmed", "said"), [(True, "so far. Confirmed"), (False, "so far. Not confirmed")])
def test_the_head_of_an_interrupted_search_says_whether_its_best_was_confirmed(
    confirmed: bool, said: str, tmp_path: Path
) -> None:
    write_bundle(a_result(status=RunStatus.INTERRUPTED, confirmed=confirmed), tmp_path)
    assert said in text_of(tmp_path / "config.yaml")


def test_the_script_says_the_same_as_the_config(tmp_path: Path) -> None:
    write_bundle(a_result(), tmp_path)
    launch = {"env", "num_processes", "accelerate_config", "mixed_precision"}
    config = {key: value for key, value in the_config(tmp_path).items() if key not in launch}
    assert arguments_in(tmp_path / "train.py") == config


def test_the_document_decodes_to_the_result(tmp_path: Path) -> None:
    write_bundle(a_result(), tmp_path)
    document = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert decode(Result, document) == a_result()


def test_the_document_has_the_documented_keys(tmp_path: Path) -> None:
    write_bundle(a_result(), tmp_path)
    document = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert document["schema"] == 1
    assert document["status"] == "found"
    assert {
        "status", "trainer", "workload", "hardware", "environment", "budget_bytes", "global_batch_size", "recommended",
        "baseline", "speedup", "speedup_low", "speedup_high", "pairs", "contributions", "confirmed", "trials",
    } <= document.keys()  # fmt: skip
    assert {
        "candidate", "status", "peak_bytes", "reserved_bytes", "tokens_per_second", "seconds_per_epoch",
        "token_coverage", "max_length", "per_device_train_batch_size", "gradient_accumulation_steps",
        "tokens_per_second_low", "tokens_per_second_high", "runs",
    } <= document["recommended"].keys()  # fmt: skip
    assert {
        "number", "candidate", "status", "reason", "peak_bytes", "reserved_bytes", "tokens_per_second", "start_seconds",
        "wall_seconds",
    } <= document["trials"][0].keys()  # fmt: skip


def test_the_same_result_is_written_in_the_same_bytes(tmp_path: Path) -> None:
    shuffled = LengthDistribution(dict(reversed(list(a_workload().dataset.lengths.counts.items()))))
    workload = a_workload(dataset=replace(a_workload().dataset, lengths=shuffled))
    write_bundle(a_result(), tmp_path / "one")
    write_bundle(a_result(workload=workload), tmp_path / "other")
    assert (tmp_path / "one" / "result.json").read_bytes() == (tmp_path / "other" / "result.json").read_bytes()


def test_a_run_that_found_nothing_leaves_no_configuration_behind(tmp_path: Path) -> None:
    write_bundle(a_result(), tmp_path)
    write_bundle(nothing_fits(), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_an_interrupted_run_leaves_an_earlier_recommendation(tmp_path: Path) -> None:
    write_bundle(a_result(), tmp_path)
    write_bundle(interrupted(), tmp_path)
    assert (tmp_path / "config.yaml").is_file()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"file/bundle.* cannot be written") as raised:
        write_bundle(a_result(), tmp_path / "file" / "bundle")
    assert "--output" in raised.value.hint


def test_a_full_disk_is_named_and_the_former_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(a_result(), tmp_path)
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * size)
    before = (tmp_path / "result.json").read_bytes()
    (tmp_path / f".result.json.{'0' * 8}.part").symlink_to("/dev/full")
    with pytest.raises(InputError, match=r"result\.json cannot be written: No space left on device") as raised:
        write_bundle(a_result(confirmed=False), tmp_path)
    assert "Free some space" in raised.value.hint
    assert (tmp_path / "result.json").read_bytes() == before


GROWING = TrainingPlan("sft", env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_environment_variables_are_where_trl_looks_for_them(tmp_path: Path) -> None:
    write_bundle(recommending(GROWING), tmp_path)
    env = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "8"}
    assert the_config(tmp_path)["env"] == env


def test_the_script_sets_them_before_it_imports_trl(tmp_path: Path) -> None:
    write_bundle(recommending(GROWING), tmp_path)
    statements = [ast.unparse(node) for node in ast.parse((tmp_path / "train.py").read_text()).body]
    variable = statements.index("os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'")
    assert variable < min(index for index, text in enumerate(statements) if text.startswith("from trl"))


def with_peft(**peft: object) -> Result:
    """Return the result of a run that recommends a PEFT configuration."""
    return recommending(TrainingPlan("sft", model={"use_peft": True}, peft=peft))


def test_a_peft_configuration_is_a_file_that_only_the_script_reads(tmp_path: Path) -> None:
    write_bundle(a_result(), tmp_path)
    write_bundle(with_peft(peft_type="IA3", target_modules=["k_proj"]), tmp_path)

    assert sorted(file.name for file in tmp_path.iterdir()) == ["peft_config.json", "result.json", "train.py"]
    assert json.loads((tmp_path / "peft_config.json").read_text()) == {
        "peft_type": "IA3",
        "target_modules": ["k_proj"],
    }
    script = text_of(tmp_path / "train.py")
    assert "use_peft" not in script
    assert "there is no config.yaml" in script


def test_the_file_goes_with_the_recommendation_that_needed_it(tmp_path: Path) -> None:
    write_bundle(with_peft(peft_type="IA3"), tmp_path)
    write_bundle(a_result(), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.yaml", "result.json", "train.py"]


@pytest.mark.parametrize(
    "mark",
    ["\u2028", "\x85", "\u2029", "\n", "\r", "\x1b[2J", '"""', "\udce9", "\\"],
    ids=lambda mark: repr(mark)[1:-1],
)
def test_no_name_breaks_out_of_a_comment(tmp_path: Path, mark: str) -> None:
    name = f"a{mark}max_steps: 1{mark}b.jsonl"
    of = a_workload()
    source = DatasetSource(name=name, path="json", data_files=f"/data/{name}")
    workload = replace(of, dataset=replace(of.dataset, name=name), model=replace(of.model, name=name))
    workload = replace(workload, dataset_source=source, model_source=ModelSource(name))
    write_bundle(a_result(workload=workload), tmp_path / "odd")
    write_bundle(a_result(), tmp_path / "plain")
    odd, plain = the_config(tmp_path / "odd"), the_config(tmp_path / "plain")
    assert odd.keys() == plain.keys()
    assert odd["datasets"] == [{"path": "json", "data_files": f"/data/{name}", "split": "train"}]
    bodies = [ast.parse((tmp_path / each / "train.py").read_text(encoding="utf-8")).body for each in ("odd", "plain")]
    assert [type(each) for each in bodies[0]] == [type(each) for each in bodies[1]]
    read = json.loads((tmp_path / "odd" / "result.json").read_text(encoding="utf-8"))
    assert read["workload"]["dataset"]["name"] == name
