"""A user's script is checked as far as its source shows the training, and is never run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.core.documents.verdict import Outcome, Severity, Verdict
from tests.app.check.conftest import Checked, Write
from tests.small import write_rows

GPU = "H100-80GB"
IMPORTS = "from trl import ModelConfig, SFTConfig, SFTTrainer, ScriptArguments, TrlParser\n"
Read = Callable[..., Verdict]
TYPO = ("--max_lenght", "512", "--output_dir", "out")
EVALUATED = "eval_strategy: epoch\ntest_split_size: 0.2\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


@pytest.fixture
def read(checked: Checked, script: Path) -> Read:
    """Return the verdict on a script of a text, without a fit."""

    def of(text: str, *words: str, **more: Any) -> Verdict:
        script.write_text(text, encoding="utf-8")
        return checked(command=("python", str(script), *words), fits=False, **more)

    return of


def messages(verdict: Verdict) -> str:
    return "\n".join(f"{item.severity} {item.message}" for item in verdict.findings)


def test_a_dry_run_is_offered_for_a_script_that_reads_its_own_arguments(checked: Checked, script: Path) -> None:
    script.write_text("from trl import SFTConfig, SFTTrainer\n", encoding="utf-8")
    asked = {"command": ("python", str(script), "--lr", "1"), "gpu": GPU}
    verdict = checked(**asked)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.UNKNOWN, 3)
    assert "parses its arguments itself" in verdict.reason
    assert "parse its arguments with TrlParser and --config FILE" in messages(verdict)
    assert f"`autotune dry-run --gpu H100-SXM -- python {script} --lr 1` runs" in messages(verdict)
    assert [checked(**asked, when_unsure=word).exit_code for word in ("pass", "fail")] == [0, 1]


def test_a_script_with_a_trainer_that_autotune_does_not_know_may_run(checked: Checked, script: Path) -> None:
    script.write_text("from trl.experimental.cpo import CPOConfig, CPOTrainer\n", encoding="utf-8")
    words = ("python", str(script), "--max_steps", "1")
    verdict = checked(command=words, fits=False)
    assert verdict.outcome is Outcome.UNKNOWN
    assert verdict.reason == f"{script} trains with CPOTrainer, which autotune does not support."
    assert f"`autotune dry-run --gpu NAME -- python {script} --max_steps 1` runs" in messages(verdict)
    named = checked(command=words, trainer="dpo", fits=False)
    assert named.outcome is Outcome.CANNOT_RUN
    assert "The command trains with CPOTrainer, but --trainer is dpo. Leave out --trainer." in messages(named)


def test_a_script_that_names_no_trainer_may_run(read: Read) -> None:
    verdict = read("from mine import train\nfrom trl import TrlParser\n", "--max_steps", "1")
    assert (verdict.outcome, verdict.reason) == (Outcome.UNKNOWN, "The command names no trainer.")
    assert "note Name it with --trainer." in messages(verdict)


def test_a_typo_is_an_error_where_the_parser_has_classes_of_trl_alone(read: Read) -> None:
    verdict = read(f"{IMPORTS}TrlParser((ScriptArguments, SFTConfig, ModelConfig))\n", *TYPO)
    assert verdict.outcome is Outcome.CANNOT_RUN
    assert "max_lenght is not a key of sft" in messages(verdict)
    assert "Did you mean max_length?" in messages(verdict)


def test_a_key_that_may_be_the_script_s_own_is_held_against_those_of_trl(read: Read) -> None:
    verdict = read(f"{IMPORTS}TrlParser((MyArguments, SFTConfig))\n", *TYPO)
    assert verdict.outcome is Outcome.READ
    assert "has such an argument. Did you mean max_length?" in messages(verdict)


def test_trl_s_parser_takes_no_file_by_its_place(read: Read) -> None:
    verdict = read(IMPORTS, "recipes/config.yaml")
    assert verdict.outcome is Outcome.CANNOT_RUN
    assert "TrlParser only accepts a file by --config. Write --config recipes/config.yaml." in messages(verdict)


@pytest.mark.parametrize(
    "source",
    [
        "from trl import SFTConfig, SFTTrainer\nfrom transformers import HfArgumentParser\n",
        f"import sys\n{IMPORTS}TrlParser((SFTConfig,)).parse_json_file(sys.argv[1])\n",
    ],
)
def test_a_file_that_a_script_gets_by_itself_cannot_be_known(source: str, read: Read) -> None:
    verdict = read(source, "config.json")
    assert verdict.outcome is Outcome.UNKNOWN
    assert "parses its arguments itself" in verdict.reason


@pytest.mark.parametrize(
    ("source", "trainer"),
    [
        ("from trl import SFTConfig, TrlParser\nTrlParser((SFTConfig,))\n", None),
        ("from mine import train\nfrom trl import TrlParser\n", "sft"),
    ],
)
def test_a_script_without_the_trainer_s_class_may_not_train_with_it(
    source: str, trainer: str | None, read: Read
) -> None:
    (found,) = read(source, "--output_dir", "out", trainer=trainer).findings
    assert found.severity is Severity.NOTE
    assert "does not use SFTTrainer: it may train with another class, or not at all" in found.message


@pytest.mark.parametrize(
    ("keys", "rows", "reason"),
    [
        ("", {}, "The configuration names no model."),
        ("model_name_or_path: MODEL\n", {}, "The configuration names no dataset."),
        (
            "model_name_or_path: MODEL\nreward_funcs: [think_format_reward]\n",
            {"problem": "1 + 1"},
            "lacks columns that GRPO needs",
        ),
        (
            "model_name_or_path: MODEL\nreward_funcs: [accuracy, tag_count]\n",
            {"prompt": "1 + 1"},
            "There is no reward function 'accuracy'",
        ),
    ],
    ids=["model", "dataset", "column", "reward"],
)
def test_a_script_may_find_its_model_rows_and_rewards_by_itself(
    keys: str, rows: dict[str, str], reason: str, checked: Checked, script: Path, model: Path, tmp_path: Path
) -> None:
    script.write_text("from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser\n", encoding="utf-8")
    data = str(write_rows(tmp_path / "rows.jsonl", [rows])) if rows else None
    config = tmp_path / "c.yaml"
    config.write_text(f"{keys.replace('MODEL', str(model))}output_dir: out\nreport_to: none\n", encoding="utf-8")
    words = ("--config", str(config))
    verdict = checked(command=("python", str(script), *words), gpu=GPU, dataset=data)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.UNKNOWN, 3), messages(verdict)
    assert reason in verdict.reason
    assert f"{script} may train differently, so the answer is not known." in verdict.reason
    # TRL's own script would end at it.
    own = checked(command=("python", "-m", "trl.scripts.grpo", *words), gpu=GPU, dataset=data)
    assert own.outcome is Outcome.CANNOT_RUN
    assert reason in messages(own)


@pytest.mark.parametrize(
    ("source", "keys", "reason"),
    [
        (f"{IMPORTS}from peft import LoraConfig\n", "", "uses LoraConfig"),
        (f"{IMPORTS}import transformers\ntransformers.BitsAndBytesConfig()\n", "", "uses BitsAndBytesConfig"),
        (
            IMPORTS.replace("ModelConfig, ", ""),
            "use_peft: true\n",
            "not use ModelConfig, so the effect of use_peft",
        ),
        (f"{IMPORTS}class Own(SFTTrainer):\n    def compute_loss(self): ...\n", "", "uses compute_loss, so a step may"),
        (f"{IMPORTS}from mine import FasterSFTTrainer\n", "", "uses FasterSFTTrainer, so a step may"),
        (f"{IMPORTS}SFTTrainer(data_collator=None)\n", "", "uses data_collator"),
        (f"{IMPORTS}SFTTrainer(compute_metrics=len)\n", EVALUATED, "uses compute_metrics"),
    ],
)
def test_a_model_an_adapter_or_a_step_that_a_script_makes_itself_cannot_be_known(
    source: str, keys: str, reason: str, checked: Checked, script: Path, write: Write
) -> None:
    script.write_text(source, encoding="utf-8")
    command = ("python", str(script), "--config", str(write("sft", keys)))
    verdict = checked(command=command, gpu=GPU)
    assert (verdict.outcome, reason in verdict.reason) == (Outcome.UNKNOWN, True), verdict.reason
    assert checked(command=command, fits=False).outcome is Outcome.READ


@pytest.mark.parametrize("keys", ["", pytest.param("use_peft: true\n", marks=pytest.mark.nightly), EVALUATED])
def test_a_script_with_trl_s_own_model_adapter_and_step_is_checked(
    keys: str, checked: Checked, script: Path, write: Write
) -> None:
    script.write_text(IMPORTS, encoding="utf-8")
    command = ("python", str(script), "--config", str(write("sft", keys)))
    assert checked(command=command, gpu=GPU).outcome is Outcome.FITS


def test_a_module_that_is_not_here_may_run(checked: Checked) -> None:
    verdict = checked(command=("torchrun", "-m", "nowhere.train", "--config", "c.yaml"), fits=False)
    assert verdict.outcome is Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        ("python -m trl.scripts.sft", 1),
        ("torchrun --nproc_per_node 2 -m trl.scripts.sft", 2),
        ("accelerate launch --num_processes 2 --multi_gpu -m trl.scripts.sft", 2),
    ],
)
def test_a_module_of_trl_s_scripts_is_checked_with_its_launcher(words: str, processes: int, checked: Checked) -> None:
    verdict = checked(command=(*words.split(), "--output_dir", "out"), fits=False)
    assert (verdict.outcome, verdict.trainer, verdict.processes) == (Outcome.READ, "sft", processes), messages(verdict)


def test_the_text_of_a_shell_is_checked_without_its_secrets(checked: Checked) -> None:
    text = "trl sft --output_dir out --hub_token abcdefgh --max_lenght 512"
    verdict = checked(command=("bash", "-c", text), fits=False)
    assert "Did you mean max_length?" in messages(verdict)
    assert "abcdefgh" not in str(verdict)
