"""``autotune probe --trainer grpo`` and ``rloo`` from the command line to TRL's own, in real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.runs import Ended, autotune
from tests.small import long_tailed_texts, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SPACE = """
trainer: {trainer}
techniques:
  gradient_checkpointing: ["on", "off"]
  precision: [float32]
  per_device_train_batch_size: [2, 4]
  steps_per_generation: [step, step/2]
recipes:
  - {{gradient_checkpointing: "off", per_device_train_batch_size: 4}}
"""
REWARDS = """
def length(completions, answer, **columns):
    assert len(completions) == len(answer) and "prompt_ids" not in columns
    return [float(len(completion)) for completion in completions]
"""


@pytest.fixture(scope="module", params=["grpo", "rloo"])
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, small_model_directory: Path
) -> tuple[str, Ended, Path]:
    trainer, folder = str(request.param), tmp_path_factory.mktemp("found")
    texts = long_tailed_texts(60, longest_words=40)
    write_rows(folder / "prompts.jsonl", [{"prompt": text, "answer": text[:30]} for text in texts])
    (folder / "space.yaml").write_text(SPACE.format(trainer=trainer), encoding="utf-8")
    (folder / "my_rewards.py").write_text(REWARDS, encoding="utf-8")
    words = ("--trainer", trainer, "--device", "cpu", "--effort", "quick", "--no-plan", "--space", "space.yaml")
    fixed = ("precision=float32", "max_completion_length=12", "num_generations=4")
    asked = ("--reward-funcs", "my_rewards.length", "--completion-length", "answer", "--trials", "3")
    more = [word for fix in fixed for word in ("--fix", fix)]
    ended = autotune(
        "probe", small_model_directory, "prompts.jsonl", *words, *more, *asked, "--json", "--output", "bundle",
        folder=folder,
    )  # fmt: skip
    return trainer, ended, folder


def test_a_confirmed_recommendation_has_the_memory_and_time_of_each_phase(found: tuple[str, Ended, Path]) -> None:
    trainer, ended, _ = found
    assert ended.code == 0, ended.err
    document = ended.document
    assert (document["status"], document["trainer"], document["confirmed"]) == ("found", trainer, True)
    recommended = document["recommended"]
    passes = {"old log-probabilities", "reference log-probabilities"} if trainer == "rloo" else set()
    assert recommended["peaks"].keys() >= {"generation", "scoring", "micro-batch", *passes}
    assert recommended["seconds"].keys() >= {"generation", "scoring", "micro-batch", "optimizer step", *passes}
    assert "old log-probabilities" in ended.err or trainer == "grpo"
    assert "in the column answer" in (found[2] / "bundle" / "config.yaml").read_text(encoding="utf-8")


def test_trl_trains_with_the_configuration_unchanged(found: tuple[str, Ended, Path]) -> None:
    trainer, _, folder = found
    config = yaml.safe_load((folder / "bundle" / "config.yaml").read_text(encoding="utf-8"))
    assert config["reward_funcs"] == ["my_rewards.length"]
    trl = Path(sys.executable).with_name("trl")
    train([str(trl), trainer, "--config", "bundle/config.yaml"], folder)


def test_the_script_trains_by_itself(found: tuple[str, Ended, Path]) -> None:
    train([sys.executable, "bundle/train.py"], found[2])


def train(words: list[str], folder: Path) -> None:
    brief = ["--max_steps", "2", "--report_to", "none", "--save_strategy", "no"]
    done = subprocess.run([*words, *brief], cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--reward-funcs", "missing.function"), "missing.function cannot be imported"),
        (("--reward-funcs", "unknown"), "There is no reward function 'unknown'"),
        (("--completion-length", "nothing"), "The dataset has no column 'nothing'"),
        (("--completion-length", "0"), "A completion length of 0 is not possible"),
        # Too many for the smallest part of a step that a generation may serve, an eighth.
        (("--global-batch-size", "1024"), "a generation batch needs 128 prompts, and the dataset has 8"),
        (("--fix", "num_generations=3"), "cannot be divided into groups of the 3 completions"),
    ],
)
def test_what_cannot_be_used_is_told(
    words: tuple[str, ...], said: str, small_model_directory: Path, tmp_path: Path
) -> None:
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"row {i} :"} for i in range(8)])
    ended = autotune(
        "probe", small_model_directory, "prompts.jsonl", "--trainer", "grpo", "--device", "cpu", *words, folder=tmp_path
    )
    assert ended.code == 2
    assert said in " ".join(ended.err.split())
