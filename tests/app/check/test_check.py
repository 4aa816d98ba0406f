"""A check reads the configuration that will run, caches its verdict, and runs only TRL's code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import LoraConfig
from trl import DPOConfig, SFTConfig

import autotune
from autotune.app.check import check as of_check
from autotune.app.check import fitting
from autotune.app.planned import planned_machine
from autotune.core.configuration import ReadCommand
from autotune.core.documents.verdict import Outcome, Severity, Source, Verdict, WillNotFit
from autotune.core.files.codec import decode, encode
from autotune.errors import InputError, JobLostError
from autotune.inspection.software import installed_packages
from tests.app.check.conftest import Checked, Write
from tests.small import write_small_model

GPU = "H100-80GB"


def told(verdict: Verdict) -> str:
    return "\n".join(f"{item.severity} {item.file} {item.line} {item.message}" for item in verdict.findings)


def test_words_of_a_command_come_before_its_file(write: Write, checked: Checked) -> None:
    file = write("dpo", "max_length: 64\nper_device_train_batch_size: 4\n")
    words = ("trl", "dpo", "--config", str(file), "--per_device_train_batch_size", "2", "--max_length", "32")
    verdict = checked(command=(*words, "--num_processes", "2"), gpu=GPU)
    assert verdict.plan is not None
    assert (verdict.plan.args["per_device_train_batch_size"], verdict.plan.args["max_length"]) == (2, 32)
    assert (verdict.processes, verdict.outcome) == (2, Outcome.FITS)


def test_what_trl_warns_of_is_told_once_though_its_parser_and_its_trainer_both_say_it(
    write: Write, checked: Checked
) -> None:
    file = write("dpo", "pad_token: <eos>\n")
    found = checked(config=str(file), trainer="dpo", gpu=GPU).findings
    assert sum("`pad_token` is deprecated" in item.message for item in found) == 1


def test_a_key_by_which_autotune_writes_a_choice_is_not_told_as_deprecated(write: Write, checked: Checked) -> None:
    file = write(
        "sft",
        "gradient_checkpointing: true\ngradient_checkpointing_kwargs: {every_n_layers: 2}\nuse_liger_kernel: true\n",
    )
    assert "deprecated" not in told(checked(config=str(file), trainer="sft", gpu=GPU))


def test_the_trainer_follows_from_keys_that_only_one_has(write: Write, checked: Checked) -> None:
    file = write("sft", "packing: true\nmax_length: 64\nnum_generations: 4\n")
    assert "grpo, rloo, and not of" not in told(checked(config=str(file), trainer="grpo", fits=False))
    verdict = checked(config=str(write("sft", "packing: true\n")), fits=False)
    assert (verdict.trainer, verdict.outcome) == ("sft", Outcome.READ)
    ambiguous = checked(config=str(write("sft", "")), fits=False)
    assert ambiguous.outcome is Outcome.CANNOT_RUN
    assert "Name it with --trainer" in told(ambiguous)


def test_a_script_s_own_arguments_are_told_as_unknown_and_not_as_wrong(
    write: Write, checked: Checked, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("from trl import KTOConfig, KTOTrainer, TrlParser\n", encoding="utf-8")
    file = write("kto", "my_own_key: 3\n")
    verdict = checked(command=("python", str(script), "--config", str(file)), fits=False)
    assert verdict.outcome is Outcome.READ
    assert f"note {file} 8 my_own_key is not a key of TRL" in told(verdict)


def test_an_attention_that_does_not_run_here_is_not_said_to_mix_documents(write: Write, checked: Checked) -> None:
    # As in a configuration that trl-jobs publishes; the Hub's kernel cannot be loaded without the Hub.
    kernel = "kernels-community/flash-attn"
    found = checked(config=str(write("sft", f"attn_implementation: {kernel}\npacking: true\n")), gpu=GPU).findings
    (packing,) = [item for item in found if "documents in one row" in item.message.lower()]
    assert packing.severity is Severity.NOTE
    assert packing.message.startswith(
        f"This machine cannot check whether documents in one row attend to each other with {kernel}"
    )


def test_the_environment_of_the_file_reaches_the_child_alone(write: Write, checked: Checked) -> None:
    variables = "PYTORCH_ALLOC_CONF: ''\n  PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True"
    file = write("sft", f"env:\n  {variables}\n  MY_OWN: x\n")
    verdict = checked(config=str(file), trainer="sft", gpu=GPU)
    assert "MY_OWN" not in os.environ
    assert verdict.plan is not None
    assert verdict.plan.expandable_segments


@pytest.mark.nightly
def test_what_does_not_fit_gets_the_smallest_change_that_does(write: Write, checked: Checked, larger: Path) -> None:
    file = write("sft", "per_device_train_batch_size: 48  # rows\ngradient_checkpointing: false\n")
    asked: dict[str, Any] = {"config": str(file), "trainer": "sft", "gpu": GPU, "model": str(larger)}
    whole = checked(**asked)
    assert whole.need is not None
    budget_bytes = whole.need.least_bytes - 1
    verdict = checked(**asked, memory_budget=budget_bytes)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.DOES_NOT_FIT, 1)
    assert verdict.remedy is not None
    changed = yaml.safe_load(file.read_text(encoding="utf-8")) | dict(verdict.remedy.keys)
    assert changed["per_device_train_batch_size"] * changed.get("gradient_accumulation_steps", 1) == 48
    assert verdict.remedy.diff.startswith(f"--- {file}")
    file.write_text(yaml.safe_dump(changed), encoding="utf-8")
    assert checked(**asked, memory_budget=budget_bytes).outcome is Outcome.FITS


def test_a_need_within_its_error_of_the_budget_is_too_close_to_call(write: Write, checked: Checked) -> None:
    file = write("dpo", "")
    need = checked(config=str(file), trainer="dpo", gpu=GPU).need
    assert need is not None
    asked = {"config": str(file), "trainer": "dpo", "gpu": GPU, "memory_budget": need.bytes + 1}
    verdict = checked(**asked)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.TOO_CLOSE, 3)
    assert [checked(**asked, when_unsure=word).exit_code for word in ("pass", "fail")] == [0, 1]


def test_a_verdict_is_kept_until_a_file_of_it_changes(write: Write, checked: Checked) -> None:
    file = write("reward", "")
    asked = {"config": str(file), "trainer": "reward", "gpu": GPU}
    first, second = checked(**asked), checked(**asked)
    assert (first.from_cache, second.from_cache) == (False, True)
    assert second.headline == first.headline
    with file.open("a", encoding="utf-8") as text:
        text.write("# another line\n")
    assert not checked(**asked).from_cache


def test_a_kept_verdict_imports_neither_torch_nor_trl(write: Write, checked: Checked) -> None:
    file = write("reward", "")
    checked(config=str(file), trainer="reward", gpu=GPU)
    program = (
        "import sys\nfrom autotune.api.check import check\n"
        f"found = check({str(file)!r}, trainer='reward', gpu={GPU!r})\n"
        "print(found.from_cache, [name for name in ('torch', 'trl', 'transformers') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "[]"]


def test_a_verdict_is_a_document(write: Write, checked: Checked) -> None:
    verdict = checked(config=str(write("kto", "")), trainer="kto", gpu=GPU)
    document = json.loads(json.dumps(encode(verdict)))
    assert decode(Verdict, document) == verdict
    assert document["schema"] == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\n", "line 2"),
        ("- 1\n", "mapping"),
        ("!!python/object/apply:os.system [touch ran]: 1\n", "python"),
        ("a: &a [x, x]\nb: &b [*a, *a, *a, *a, *a]\n" + "".join(
            f"{chr(99 + i)}: &{chr(99 + i)} [{', '.join(['*' + chr(98 + i)] * 9)}]\n" for i in range(9)
        ), "more than 10,000"),
        ("a: 1\n" * 300_000, "at most 131,072"),
        ("\x1b[31mred: 1\nmax_length: 2\n", "."),
    ],
    ids=["syntax", "list", "tag", "anchors", "large", "escapes"],
)  # fmt: skip
def test_a_hostile_file_ends_with_words(text: str, said: str, checked: Checked, tmp_path: Path) -> None:
    file = tmp_path / "hostile.yaml"
    file.write_text(text, encoding="utf-8")
    verdict = checked(config=str(file), trainer="sft", fits=False)
    assert verdict.exit_code == 2
    assert "\x1b" not in verdict.headline
    assert any(re.search(said, item.message) for item in verdict.findings), told(verdict)


def test_a_value_that_json_has_not_is_told_and_not_fatal_to_the_check(write: Write, checked: Checked) -> None:
    file = write("sft", "max_length: 2026-01-01\nlearning_rate: .inf\nrun_name: 2026-01-01\n")
    verdict = checked(config=str(file), trainer="sft", gpu=GPU)
    assert verdict.exit_code == 2
    assert 'max_length is "2026-01-01", and takes a whole number' in told(verdict)


def test_a_reward_model_that_is_not_read_leaves_the_answer_open(write: Write, checked: Checked) -> None:
    file = write("grpo", "reward_model_name_or_path: somewhere/else\n")
    verdict = checked(config=str(file), trainer="grpo", gpu=GPU)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.UNKNOWN, 3)
    assert "reward model" in verdict.reason
    assert f"`autotune dry-run --gpu {verdict.device} -- trl grpo --config {file}` runs" in told(verdict)
    # Of an L4 there is no null GPU.
    assert "dry-run" not in told(checked(config=str(file), trainer="grpo", gpu="L4"))


def test_a_checkpoint_of_quantised_weights_leaves_the_answer_open(
    write: Write, checked: Checked, tmp_path: Path
) -> None:
    directory = write_small_model(tmp_path / "quantised", weights=False)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (directory / "config.json").write_text(json.dumps(config))
    verdict = checked(config=str(write("sft", "max_length: 64\n")), trainer="sft", gpu=GPU, model=directory)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.UNKNOWN, 3)
    assert "quantised in its checkpoint (bitsandbytes)" in verdict.reason


@pytest.mark.parametrize("trusted", [True, False])
def test_a_model_that_needs_its_own_code_leaves_the_answer_open(
    trusted: bool, write: Write, checked: Checked, tmp_path: Path
) -> None:
    directory = write_small_model(tmp_path / "mine", weights=False)
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.My"}}
    (directory / "config.json").write_text(json.dumps(config))
    file = str(write("sft", f"trust_remote_code: {trusted}\n"))
    verdict = checked(config=file, trainer="sft", gpu=GPU, model=directory)
    assert verdict.outcome is (Outcome.UNKNOWN if trusted else Outcome.CANNOT_RUN)
    assert "contains custom code" in (verdict.reason if trusted else told(verdict))


@pytest.mark.parametrize(("gpu", "outcome"), [(GPU, Outcome.UNKNOWN), (None, Outcome.CANNOT_RUN)])
def test_a_package_that_only_this_machine_may_lack_leaves_the_answer_open(
    gpu: str | None, outcome: Outcome, write: Write, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = ReadCommand(refused="PackageNotFoundError: The 'deepspeed' distribution was not found.")
    monkeypatch.setattr(of_check, "read_command", lambda *_: absent)
    monkeypatch.setattr(of_check, "planned_machine", lambda *_: planned_machine(GPU))
    verdict = checked(config=str(write("sft", "")), trainer="sft", gpu=gpu)
    assert verdict.outcome is outcome
    assert "The 'deepspeed' distribution was not found" in verdict.reason + told(verdict)


def test_a_dry_run_is_offered_for_a_command_without_its_secrets(write: Write, checked: Checked) -> None:
    file = write("grpo", "reward_model_name_or_path: somewhere/else\n")
    command = ("trl", "grpo", "--config", str(file), "--hub_token", "hf_" + "a" * 34)
    verdict = checked(command=command, gpu=GPU)
    assert verdict.outcome is Outcome.UNKNOWN
    assert f"-- trl grpo --config {file} --hub_token '***'` runs" in told(verdict)


def test_rows_that_are_streamed_are_read_whole(write: Write, checked: Checked) -> None:
    asked = {"config": str(write("sft", "streaming: true\n")), "trainer": "sft", "gpu": GPU}
    without = checked(**asked)
    assert (without.outcome, without.findings[-1].line) == (Outcome.CANNOT_RUN, 8)
    assert "needs max_steps" in told(without)
    write("sft", "streaming: true\nmax_steps: 4\nper_device_train_batch_size: 64\ndataloader_drop_last: true\n")
    verdict = checked(**asked)
    assert verdict.outcome is Outcome.FITS
    assert "9 The rows are streamed. The worst micro-batch is that of all rows" in told(verdict)


def test_without_a_device_the_keys_are_judged_nevertheless(write: Write, checked: Checked) -> None:
    verdict = checked(config=str(write("sft", "packng: true\n")), trainer="sft")
    assert "Did you mean packing?" in told(verdict)


def test_a_configuration_object_is_checked_as_a_file_is(write: Write, checked: Checked) -> None:
    text = yaml.safe_load(
        write("dpo", "max_length: 32\nuse_peft: true\nlora_r: 4\nlora_dropout: 0\n").read_text(encoding="utf-8")
    )
    written = write(
        "dpo", "max_length: 32\nuse_peft: true\nlora_r: 4\nlora_alpha: 8\nlora_target_modules: [q_proj, v_proj]\n"
    )
    of_file = checked(config=str(written), trainer="dpo", gpu=GPU)
    config = DPOConfig(max_length=32, use_cpu=True, bf16=True, report_to="none")
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    data = text["datasets"][0]["data_files"]
    verdict = autotune.check(config, model=text["model_name_or_path"], dataset=data, peft_config=lora, gpu=GPU)
    assert of_file.need is not None
    assert verdict.need is not None
    assert verdict.need.bytes == of_file.need.bytes


def test_a_job_that_is_killed_leaves_the_answer_open_and_what_was_found_before(
    write: Write, checked: Checked, model: Path, rows: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise JobLostError("The job build was killed.", hint="Its log ends with: nothing")

    monkeypatch.setattr(fitting, "build", killed)
    of_file = checked(config=str(write("dpo", "")), trainer="dpo", gpu=GPU)
    config = SFTConfig(use_cpu=True, bf16=True, report_to="none")
    of_object = checked(config=config, model=str(model), dataset=str(rows("sft")), gpu=GPU)
    for verdict in (of_file, of_object):
        assert (verdict.outcome, verdict.reason) == (Outcome.UNKNOWN, "The job build was killed.")
        assert "Its log ends with: nothing" in told(verdict)
    assert "Nothing sets the number of processes" in told(of_file)


@pytest.mark.parametrize(
    ("args", "name"),
    [
        pytest.param({"per_device_train_batch_size": 0}, "per_device_train_batch_size", marks=pytest.mark.nightly),
        pytest.param({"max_length": 0}, "max_length", marks=pytest.mark.nightly),
        ({"per_device_eval_batch_size": 0, "eval_strategy": "epoch"}, "per_device_eval_batch_size"),
    ],
    ids=str,
)
def test_a_number_of_a_configuration_object_that_no_step_takes_is_told(
    args: dict[str, Any], name: str, model: Path, rows: Callable[[str], Path], checked: Checked
) -> None:
    config = SFTConfig(use_cpu=True, bf16=True, report_to="none", **args)
    verdict = checked(config=config, model=str(model), dataset=str(rows("sft")), gpu=GPU)
    assert verdict.outcome is Outcome.CANNOT_RUN
    (found,) = verdict.findings
    assert (found.key, found.message.partition(":")[0]) == (name, f"{name} makes training fail")


def test_the_api_raises_what_will_not_fit(write: Write, checked: Checked) -> None:
    file = write("sft", "")
    checked(config=str(file), trainer="sft", gpu=GPU, memory_budget="64MiB")
    with pytest.raises(WillNotFit, match=r"does not fit: .* of 64\.00 MiB") as raised:
        autotune.check(file, trainer="sft", gpu=GPU, memory_budget="64MiB")
    assert raised.value.exit_code == 1
    assert isinstance(raised.value.verdict, Verdict)


@pytest.mark.parametrize("args", [{}, {"fits": False}, {"gpu": GPU}], ids=str)
def test_libraries_of_an_unsupported_version_are_refused_before_they_read_anything(
    args: dict[str, Any], write: Write, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {**installed_packages(), "trl": "1.15.0"}
    monkeypatch.setattr(of_check, "installed_packages", lambda: packages)
    with pytest.raises(InputError, match=r"trl 1\.15\.0 is installed; autotune needs trl"):
        checked(config=str(write("sft", "")), trainer="sft", **args)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_real_run_decides_on_both_sides_of_the_limit(write: Write, checked: Checked) -> None:
    file = write("sft", "per_device_train_batch_size: 8\nuse_cpu: true\nbf16: false\n")
    asked = {"config": str(file), "trainer": "sft"}
    need = checked(**asked, gpu="cpu").need
    assert need is not None
    fits = checked(**asked, probe=True, memory_budget=2 * need.most_bytes)
    assert (fits.outcome, fits.exit_code) == (Outcome.FITS, 0)
    assert fits.need is not None
    assert fits.need.source is Source.PROBED
    tight = checked(**asked, probe=True, memory_budget=need.bytes // 4)
    assert (tight.outcome, tight.exit_code) == (Outcome.DOES_NOT_FIT, 1)


def test_settings_of_the_allocator_that_are_not_simulated_are_told(write: Write, checked: Checked) -> None:
    file = write("sft", "env:\n  PYTORCH_ALLOC_CONF: 'max_split_size_mb:128, expandable_segments:True'\n")
    verdict = checked(config=str(file), trainer="sft", gpu=GPU)
    assert verdict.plan is not None
    assert verdict.plan.expandable_segments
    (told,) = (item.message for item in verdict.findings if "caching allocator" in item.message)
    assert told == "Assumed: the caching allocator has its default for max_split_size_mb:128, which is not simulated."


def test_of_continuous_batching_the_reason_is_given_why_no_step_is_traced(write: Write, checked: Checked) -> None:
    # With bf16, transformers 5.24 fails.
    file = write("grpo", "use_transformers_continuous_batching: true\nbf16: false\n")
    verdict = checked(config=str(file), trainer="grpo", gpu=GPU)
    assert verdict.outcome is Outcome.UNKNOWN
    assert (
        "continuous batching (use_transformers_continuous_batching) is not planned, since its cache takes most of the "
        "memory that is free"
    ) in verdict.reason
