"""The public functions in a script: refused arguments, log messages, and results read back."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import autotune
from autotune.app.arguments import CheckArguments, LengthsArguments
from autotune.core.candidate import Candidate
from autotune.core.documents.result import BaseFile
from autotune.core.documents.verdict import WillNotFit
from autotune.core.events import Noted, ProbeFinished, StageStarted
from autotune.core.measurement import Measurement
from autotune.core.plan import Launch, TrainingPlan
from autotune.core.status import ProbeStatus, RunStatus
from autotune.core.workload import DatasetSource
from autotune.errors import InputError
from tests.reporting.examples import a_result
from tests.small import text_rows, write_rows, write_small_model

NOTHING: Any = None
TEXT: Any = "8"
NO_TEXT: Any = {"text": "a row"}


def test_without_a_listener_the_progress_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autotune")
    listener = LengthsArguments("model", "rows.jsonl").listener
    listener(StageStarted("Searching"))
    listener(Noted("Others use the GPU."))
    measured = Measurement(ProbeStatus.OK, peak_bytes=1 << 30, tokens_per_second=100.0)
    listener(ProbeFinished(3, Candidate({"liger": "on"}), "search", measured, best=True))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]
    assert {record.name for record in caplog.records} == {"autotune"}
    assert caplog.messages[:2] == ["Searching", "note: Others use the GPU."]
    assert caplog.messages[2].startswith("probe 3 ok: 1.00 GiB, ")
    assert caplog.messages[2].endswith("liger=on (best so far)")


@pytest.mark.parametrize(("types", "level"), [(True, logging.WARNING), (True, logging.INFO), (False, logging.WARNING)])
def test_where_a_user_types_the_progress_is_shown_unless_the_log_has_it(
    types: bool,
    level: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if types:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    caplog.set_level(level, "autotune")
    LengthsArguments("model", "rows.jsonl").listener(StageStarted("Searching"))
    assert capsys.readouterr().err == ("Searching\n" if types and level > logging.INFO else "")


def test_a_search_whose_budget_is_refused_leaves_no_directory(tmp_path: Path) -> None:
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    write_small_model(model, weights=False)
    write_rows(rows, text_rows(["a", "b"]))
    with pytest.raises(InputError, match="-5 is not a size"):
        autotune.probe(model, rows, device="cpu", memory_budget=-5, output=tmp_path / "found")
    assert not (tmp_path / "found").exists()


@pytest.mark.parametrize(
    ("given", "missing"), [({}, "MODEL and no DATASET"), ({"model": "M"}, "DATASET"), ({"dataset": "D"}, "MODEL")]
)
def test_a_search_names_what_it_lacks(given: dict[str, Any], missing: str) -> None:
    with pytest.raises(InputError, match=f"^There is no {missing}[.] Give both, or a configuration"):
        autotune.probe(**given)


@pytest.mark.parametrize("name", ["", "result.json"], ids=["directory", "file"])
def test_a_result_can_be_read_back_to_train_by_it(name: str, tmp_path: Path) -> None:
    # A configuration for a GPU cannot be made on a machine without one.
    base, workload = BaseFile("a.yaml", args={"use_cpu": True}), a_result().workload
    workload = replace(workload, model_source=replace(workload.model_source, revision="v2"))
    written = autotune.ProbeResult(replace(a_result(), base=base, workload=workload))
    (tmp_path / "result.json").write_text(written.to_json(), encoding="utf-8")
    found = autotune.ProbeResult.read(tmp_path / name)
    assert (found.status, found.recommended) == (written.status, written.recommended)
    assert found.config.to_dict() == written.config.to_dict()
    found.config.max_steps = 2
    assert found.config.max_steps == 2
    assert found.peft_config == written.peft_config
    assert (found.model_init_kwargs, found.env) == (written.model_init_kwargs, written.env)
    assert found.model_init_kwargs["revision"] == found.config.model_init_kwargs["revision"] == "v2"
    with pytest.raises(InputError, match=r"There is no result: .*nowhere cannot be read"):
        autotune.ProbeResult.read(tmp_path / "nowhere")


@pytest.mark.parametrize(("config", "size"), [(None, None), ("main", None), (None, 1)])
def test_the_rows_of_a_result_are_those_of_the_configuration_that_was_probed(
    config: str | None, size: int | None, tmp_path: Path
) -> None:
    files = [{"split": split, "path": f"{split}.jsonl"} for split in ("train", "test")]
    card = {"configs": [{"config_name": config or "default", "data_files": files}, {"config_name": "other"}]}
    (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n", encoding="utf-8")
    for split in ("train", "test"):
        write_rows(tmp_path / f"{split}.jsonl", text_rows([split] * (2 if size else 1)))
    source, document = DatasetSource("gsm8k", str(tmp_path), config=config, test_size=size), a_result()
    of = replace(
        document.workload,
        dataset_source=source,
        evaluation_source=replace(source, split="test"),
        evaluation=document.workload.dataset,
    )
    assert document.recommended is not None
    plan = TrainingPlan("sft", {"eval_strategy": "epoch"})
    found = autotune.ProbeResult(replace(document, workload=of, recommended=replace(document.recommended, plan=plan)))
    assert found.train_dataset["text"][:] == ["train"]
    assert found.eval_dataset is not None
    assert found.eval_dataset["text"][:] == ["train" if size else "test"]


@pytest.mark.parametrize(("probed", "here"), [(1, None), (2, "2"), (2, None), (1, "2")])
def test_a_training_of_other_processes_than_were_probed_is_warned_of(
    probed: int, here: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if here is not None:
        monkeypatch.setenv("WORLD_SIZE", here)
    document = replace(a_result(), base=BaseFile("a.yaml", args={"use_cpu": True}))
    assert document.recommended is not None
    plan = replace(document.recommended.plan, launch=Launch(probed))
    found = autotune.ProbeResult(replace(document, recommended=replace(document.recommended, plan=plan)))
    monkeypatch.setattr(autotune.ProbeResult, "_objects", lambda _: SimpleNamespace(config=str))
    assert found.config
    said = f"is for {probed} process" in caplog.text and "the global batch size will differ" in caplog.text
    assert said == (str(probed) != (here or "1"))


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_configuration_that_no_longer_run_has_confirmed_is_warned_of(
    confirmed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = autotune.ProbeResult(a_result(confirmed=confirmed))
    monkeypatch.setattr(autotune.ProbeResult, "_objects", lambda _: SimpleNamespace(config=str))
    assert found.config
    assert found.confirmed is confirmed
    assert ("no longer run has confirmed this configuration" in caplog.text) is not confirmed


def test_a_script_ends_by_ctrl_c_in_a_search_and_names_the_result_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    document = replace(a_result(), status=RunStatus.INTERRUPTED, output_directory="/out/my run")
    monkeypatch.setattr("autotune.api.probe.search", lambda _: document)
    with pytest.raises(KeyboardInterrupt, match=r"autotune\.ProbeResult\.read\('/out/my run'\)") as raised:
        autotune.probe("m", "d")
    assert raised.value.document == document  # type: ignore[attr-defined]  # of the subclass


def test_a_command_to_check_may_be_one_text() -> None:
    text = "accelerate launch train.py --run_name 'my run' --config config.yaml"
    words = ("accelerate", "launch", "train.py", "--run_name", "my run", "--config", "config.yaml")
    assert CheckArguments(text).command == words
    assert CheckArguments("bash -c 'trl sft --config a.yaml'").command == ("bash", "-c", "trl sft --config a.yaml")
    with pytest.raises(InputError, match="cannot be split into words: No closing quotation"):
        CheckArguments("trl sft --run_name 'my run")


def test_a_file_to_check_may_have_spaces_in_its_name(tmp_path: Path) -> None:
    file = tmp_path / "my trl sft.yaml"
    file.write_text("packing: true\n", encoding="utf-8")
    assert CheckArguments(str(file)).file == str(file)
    assert CheckArguments("my runs.yaml").file == "my runs.yaml"


def test_the_error_of_a_check_has_each_sentence_once() -> None:
    with pytest.raises(WillNotFit) as raised:
        autotune.check("nowhere.yaml", gpu="H100-80GB")
    assert str(raised.value) == "cannot run: nowhere.yaml does not exist. Name the YAML file."


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: autotune.report(NOTHING), "directory cannot be None. It is a text, a path or an autotune.Plan."),
        (lambda: autotune.ProbeResult.read(NOTHING), "directory cannot be None. It is a text or a path."),
        (
            lambda: autotune.estimate(NOTHING, NOTHING, shape=(1, 8), gpu="T4"),
            "model cannot be None. It is a text or a path.",
        ),
        (lambda: autotune.estimate("m", NOTHING, shape=TEXT, gpu="T4"), "An item of shape cannot be '8'."),
        (
            lambda: autotune.check({"packing": True}),
            "dict is not a supported configuration. Give a YAML file,",
        ),
        (
            lambda: autotune.probe("m", "d", trainer="grpo", reward_funcs=[NO_TEXT]),
            "An item of reward_funcs cannot be an object of the class dict. It is a text. Name a function by the path",
        ),
        (lambda: autotune.PreflightCallback(dataset=NO_TEXT), "dataset cannot be an object of the class dict."),
        (
            lambda: autotune.plan("m", seq_len=8, gpu=24),
            "A GPU with 24 bytes is not possible. Write for instance 24GiB.",
        ),
    ],
)
def test_what_python_alone_can_give_is_refused_in_words(call: Any, message: str) -> None:
    with pytest.raises(InputError) as raised:
        call()
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alow": "lora"}, "probe() got an unexpected keyword argument 'alow'. Did you mean 'allow'?"),
        ({"gpu": "T4"}, "probe() got an unexpected keyword argument 'gpu'"),
    ],
)
def test_an_argument_that_a_function_lacks_is_named_with_the_nearest_that_it_has(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError) as raised:
        autotune.probe("m", "d", **arguments)
    assert str(raised.value) == message
