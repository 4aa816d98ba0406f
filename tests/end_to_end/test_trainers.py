"""``autotune probe --trainer NAME`` from the command line to TRL's own command and the script, in real processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.trainers import find_trainer, trainers
from tests.end_to_end.runs import Ended, autotune, by_script, by_trl, train
from tests.small import (
    long_tailed_texts,
    preference_rows,
    prompt_completion_rows,
    write_rows,
    write_small_model,
)
from tests.trainers.samples import Rows, sample_rows

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
UNSAVED = ("--save_strategy", "no")

REWARDS = """
def length(completions, answer, **columns):
    assert len(completions) == len(answer) and "prompt_ids" not in columns
    return [float(len(completion)) for completion in completions]
"""
TEXTS = long_tailed_texts(60, longest_words=80)
BRIEF_TEXTS = long_tailed_texts(60, longest_words=40)


@dataclass(frozen=True)
class Search:
    """A search of a small space for a trainer.

    Attributes:
        rows: of the dataset.
        choices: of the space, by technique, beside one precision.
        recipes: of the space.
        words: further words of the command.
        files: their texts, by the names that lie beside the rows.
    """

    rows: Rows
    choices: Mapping[str, Sequence[str | int]]
    recipes: Sequence[Mapping[str, str | int]]
    words: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict)


def fixing(**choices: str | int) -> list[str]:
    """Return the words that fix choices."""
    return [word for knob, choice in choices.items() for word in ("--fix", f"{knob}={choice}")]


STORED_OR_NOT: Mapping[str, Sequence[str | int]] = {"gradient_checkpointing": ["on", "off"]}
OF_GROUPS = Search(
    [{"prompt": text, "answer": text[:30]} for text in BRIEF_TEXTS],
    {**STORED_OR_NOT, "per_device_train_batch_size": [2, 4], "steps_per_generation": ["step", "step/2"]},
    [{"gradient_checkpointing": "off", "per_device_train_batch_size": 4}],
    [
        *fixing(precision="float32", max_completion_length=12, num_generations=4),
        *("--reward-funcs", "my_rewards.length", "--completion-length", "answer", "--trials", "3"),
    ],
    {"my_rewards.py": REWARDS},
)
SEARCHES = {
    "kto": Search(
        [{**row, "label": place % 3 > 0} for place, row in enumerate(prompt_completion_rows(TEXTS))],
        {
            **STORED_OR_NOT,
            "max_length": ["coverage"],
            "reference": ["per_batch", "precomputed"],
            "per_device_train_batch_size": [2, 4],
        },
        [{"max_length": "coverage", "reference": "precomputed"}],
        ["--trials", "4", "--global-batch-size", "4"],
    ),
    "reward": Search(
        [{**row, "margin": place / 60} for place, row in enumerate(preference_rows(TEXTS))],
        {
            "max_length": ["coverage"],
            "gradient_checkpointing": ["on", "every_2"],
            "lora": ["r16"],
            "per_device_train_batch_size": [2, 8],
        },
        [{"max_length": "coverage", "gradient_checkpointing": "every_2", "lora": "r16"}],
        ["--token-coverage", "0.8", *fixing(lora="r16", max_length="coverage"), "--trials", "3"],
    ),
    "grpo": OF_GROUPS,
    "rloo": OF_GROUPS,
    "online_dpo": Search(
        [{"prompt": text} for text in long_tailed_texts(40, longest_words=30)],
        {"max_new_tokens": [8], "max_length": [96], **STORED_OR_NOT, "per_device_train_batch_size": [1, 2]},
        [{"max_new_tokens": 8, "max_length": 96, "gradient_checkpointing": "off"}],
        ["--allow", "max_new_tokens", "--allow", "max_length", "--global-batch-size", "4", "--trials", "3"],
    ),
    "distillation": Search(
        [{"prompt": text} for text in BRIEF_TEXTS],
        {**STORED_OR_NOT, "per_device_train_batch_size": [2, 4]},
        [{"gradient_checkpointing": "off", "per_device_train_batch_size": 4}],
        ["--teacher", "teacher", *fixing(max_completion_length=12), "--trials", "3"],
    ),
}
EVERY = pytest.mark.parametrize("trainer", SEARCHES)
Found = Callable[[str], tuple[Ended, Path]]


def written(trainer: str, folder: Path) -> Path:
    """Write what a search needs into a folder, and return the file of rows."""
    search = SEARCHES[trainer]
    for name, text in search.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    if find_trainer(trainer).has_teacher:
        write_small_model(folder / "teacher", hidden_size=128, intermediate_size=256, num_hidden_layers=3)
    techniques = {**search.choices, "precision": ["float32"]}
    space = {"trainer": trainer, "techniques": techniques, "recipes": list(map(dict, search.recipes))}
    (folder / "space.yaml").write_text(yaml.safe_dump(space), encoding="utf-8")
    return write_rows(folder / "rows.jsonl", search.rows)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, small_model_directory: Path) -> Found:
    """A function that returns the search for a trainer, run once, and its folder."""
    known: dict[str, tuple[Ended, Path]] = {}

    def of(trainer: str) -> tuple[Ended, Path]:
        if trainer not in known:
            folder = tmp_path_factory.mktemp(trainer)
            rows = written(trainer, folder)
            words = ("--trainer", trainer, "--device", "cpu", "--effort", "quick", "--no-plan", "--space", "space.yaml")
            more = (*SEARCHES[trainer].words, "--json", "--output", "bundle")
            known[trainer] = autotune("probe", small_model_directory, rows, *words, *more, folder=folder), folder
        return known[trainer]

    return of


@EVERY
def test_a_confirmed_recommendation_is_found(trainer: str, found: Found) -> None:
    ended, _ = found(trainer)
    assert ended.code == 0, ended.err
    document = ended.document
    assert (document["status"], document["trainer"], document["confirmed"]) == ("found", trainer, True)


@EVERY
def test_trl_trains_with_the_configuration_unchanged(trainer: str, found: Found) -> None:
    _, folder = found(trainer)
    config = folder / "bundle" / "config.yaml"
    assert config.exists() is find_trainer(trainer).has_command
    if config.exists():
        train(by_trl(trainer), folder, *UNSAVED)


@EVERY
def test_the_script_trains_by_itself(trainer: str, found: Found) -> None:
    train(by_script(), found(trainer)[1], *UNSAVED)


def test_the_reference_of_kto_is_asked_in_each_step_and_beforehand(found: Found) -> None:
    trials = found("kto")[0].document["trials"]
    assert {trial["candidate"]["reference"] for trial in trials} == {"per_batch", "precomputed"}


def test_the_batch_size_of_kto_stays_since_it_would_change_training(found: Found) -> None:
    document = found("kto")[0].document
    assert {trial["candidate"]["per_device_train_batch_size"] for trial in document["trials"]} == {4}
    (locked,) = (item for item in document["unlockable"] if item["knob"] == "per_device_train_batch_size")
    assert locked["choices"] == [2]
    assert "KL divergence" in locked["changes"]


def test_rows_that_reward_models_drop_are_counted_and_their_adapters_are_those_of_sequences(found: Found) -> None:
    ended, folder = found("reward")
    recommended = ended.document["recommended"]
    assert 0.8 <= recommended["token_coverage"] < recommended["row_coverage"] < 1
    assert "rows covered" in ended.err
    config = yaml.safe_load((folder / "bundle" / "config.yaml").read_text(encoding="utf-8"))
    assert config["lora_task_type"] == "SEQ_CLS"


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_a_recommendation_has_the_memory_and_time_of_each_phase_of_a_generation(trainer: str, found: Found) -> None:
    ended, folder = found(trainer)
    recommended = ended.document["recommended"]
    passes = {"old log-probabilities", "reference log-probabilities"} if trainer == "rloo" else set()
    assert recommended["peaks"].keys() >= {"generation", "scoring", "micro-batch", *passes}
    assert recommended["seconds"].keys() >= {"generation", "scoring", "micro-batch", "optimizer step", *passes}
    assert "old log-probabilities" in ended.err or trainer == "grpo"
    text = (folder / "bundle" / "config.yaml").read_text(encoding="utf-8")
    assert "in the column answer" in text
    assert yaml.safe_load(text)["reward_funcs"] == ["my_rewards.length"]


def test_lengths_are_shown_with_the_rows_that_each_keeps(small_model_directory: Path, tmp_path: Path) -> None:
    rows = written("reward", tmp_path)
    shown = autotune("lengths", small_model_directory, rows, "--trainer", "reward", "--json", folder=tmp_path)
    assert shown.code == 0, shown.err
    limits: list[dict[str, Any]] = json.loads(shown.out)["limits"]
    assert all(limit["rows_cut"] == 0 for limit in limits)
    assert limits[0]["coverage"] < limits[0]["row_coverage"] < 1
    assert limits[-1]["coverage"] == limits[-1]["row_coverage"] == 1


@pytest.mark.parametrize(
    ("trainer", "words", "said"),
    [
        ("kto", ("--max-length", "2"), "leaves none of the dataset's 60 rows"),
        ("kto", ("--global-batch-size", "1"), "has to be at least 2 (--global-batch-size 2)"),
        ("reward", ("--max-length", "3"), "max_length=3 leaves none of the dataset's 60 rows"),
        ("grpo", ("--reward-funcs", "missing.function"), "missing.function cannot be imported"),
        ("grpo", ("--reward-funcs", "unknown"), "There is no reward function 'unknown'"),
        ("grpo", ("--completion-length", "nothing"), "The dataset has no column 'nothing'"),
        ("grpo", ("--completion-length", "0"), "A completion length of 0 is not possible"),
        # Too many for the smallest part of a step that a generation may serve, an eighth.
        ("grpo", ("--global-batch-size", "4096"), "a generation batch needs 512 prompts, and the dataset has 60"),
        ("grpo", ("--fix", "num_generations=3"), "cannot be divided into groups of the 3 completions"),
        ("distillation", (), "Distillation needs a teacher"),
        ("distillation", ("--teacher", "./nowhere"), "The model './nowhere' does not exist"),
        ("distillation", ("--teacher", "teacher", "--reward-funcs", "f.g"), "Distillation has no reward functions"),
        ("grpo", ("--teacher", "teacher"), "GRPO has no teacher"),
    ],
)
def test_what_trl_would_refuse_or_pass_over_is_told_before_any_probe(
    trainer: str, words: tuple[str, ...], said: str, small_model_directory: Path, tmp_path: Path
) -> None:
    rows = written(trainer, tmp_path)
    ended = autotune(
        "probe", small_model_directory, rows, "--trainer", trainer, "--device", "cpu", *words, folder=tmp_path
    )
    assert ended.code == 2
    assert said in " ".join(ended.err.split())


PROBES = 8
# Of what TRL's default needs, which then runs out of memory: 5 % of it are the margin.
SHARE = 0.92
# With freed memory kept, nothing that these search by default needs much less on a CPU: for KTO, a precomputed
# reference needs 94 % of it.
ALLOWED = {"kto": "lora", "online_dpo": "lora"}
# Completions as long as those of a real run would take minutes on a CPU.
BRIEF: Mapping[str, Mapping[str, int]] = {
    "grpo": {"max_completion_length": 24, "num_generations": 4},
    "rloo": {"max_completion_length": 24, "num_generations": 4},
    "online_dpo": {"max_new_tokens": 24},
    "distillation": {"max_completion_length": 24},
}


@pytest.fixture(scope="module", params=list(trainers()))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Ended, Path]:
    """A trainer, the search of its whole space where its default runs out of memory, and its folder."""
    name, folder = str(request.param), tmp_path_factory.mktemp("whole")
    model = write_small_model(folder / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    write_rows(folder / "rows.jsonl", sample_rows(name, find_trainer(name).formats[-1].name))
    teacher = ("--teacher", "model") if find_trainer(name).has_teacher else ()
    brief = (*teacher, *fixing(**BRIEF.get(name, {})), "--json")
    words = ("probe", model, "rows.jsonl", "--trainer", name, "--device", "cpu", "--effort", "quick", *brief)
    default = autotune(*words, "--no-plan", "--trials", "1", "--output", "default", folder=folder, timeout=600)
    assert default.code == 0, default.err
    peak_bytes = default.document["trials"][0]["peak_bytes"]
    budget = ("--memory-budget", f"{int(SHARE * peak_bytes) >> 20}MiB")
    allowed = ("--allow", ALLOWED[name]) if name in ALLOWED else ()
    more = (*budget, *allowed, "--trials", str(PROBES), "--output", "bundle")
    return name, autotune(*words, *more, folder=folder, timeout=600), folder


def test_a_recommendation_is_confirmed_where_the_default_runs_out_of_memory(whole: tuple[str, Ended, Path]) -> None:
    trainer, search, _ = whole
    assert search.code == 0, search.err
    document = search.document
    assert (document["status"], document["trainer"], document["confirmed"]) == ("found", trainer, True)
    ended = [trial["status"] for trial in document["trials"]]
    # Half of them are kept for what each choice brings, and of those the ones that cannot fit are not probed.
    assert len(ended) > PROBES // 2
    assert "out_of_memory" in ended
    assert "ok" in ended


def test_the_bundle_of_a_whole_search_trains_unchanged(whole: tuple[str, Ended, Path]) -> None:
    trainer, _, folder = whole
    train(by_script(), folder, *UNSAVED)
    if find_trainer(trainer).has_command:
        train(by_trl(trainer), folder, *UNSAVED)
