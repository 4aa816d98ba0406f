"""Secrets of a base reach only TRL's parser: no plan, text, diff or file contains them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from autotune.app.arguments import ProbeArguments
from autotune.app.report import write_page
from autotune.app.search import fingerprint
from autotune.confidential import PLACEHOLDER
from autotune.core.documents.result import BaseFile
from autotune.core.files.codec import encode
from autotune.emit.bundle import write_bundle
from autotune.errors import InputError
from autotune.inspection.yaml_edit import unified_diff
from autotune.probing import JobServer
from autotune.reporting.probe import probe_report
from autotune.reporting.terminal import show
from autotune.userconfig.base import read_base
from autotune.userconfig.edit import EditTarget, edited_base, edited_text, edits_of, values_after
from autotune.userconfig.sources import mixture_source
from autotune.userconfig.written import read_written as read_file
from tests.app.bases import a_base, started
from tests.reporting.examples import a_result
from tests.settings import CPU

SECRET = "planted0secret"
FILE = f"""\
learning_rate: 1e-4   # do not touch
push_to_hub: true
hub_token: {SECRET}1   # mine
eos_token: </s>
model_init_kwargs:
  dtype: float32
  token: {SECRET}2
env:
  HF_TOKEN: {SECRET}3
  WANDB_PROJECT: mine
gradient_checkpointing: false
max_grad_norm: .inf  # JSON has no infinity
"""


def test_nothing_that_is_made_of_a_base_has_its_secrets(tmp_path: Path) -> None:
    base = a_base(tmp_path, FILE)
    search = started(base)
    plan = search.problem.trainer.plan(search.problem.baseline.but(gradient_checkpointing="on"), search.problem.setting)
    edits = edits_of(base, EditTarget(plan), search.problem.trainer, search.problem.setting)
    text = edited_text(base, edits)
    values = yaml.safe_load(text)
    assert values == values_after(base, edits)
    assert "hub_token" not in values
    assert values["model_init_kwargs"] == {"dtype": "float32"}
    assert values["env"] == {"WANDB_PROJECT": "mine", "OMP_NUM_THREADS": "2"}
    assert (values["eos_token"], values["push_to_hub"], values["gradient_checkpointing"]) == ("</s>", True, True)
    assert "# mine" in text
    diff = unified_diff(base.file.text, text, base.name)
    assert f"-hub_token: {PLACEHOLDER}" in diff.replace("'", "")
    everything = (base, base.file.text, search.start, search.problem.setting, plan, diff, text)
    assert SECRET not in repr(everything)
    assert PLACEHOLDER not in json.dumps(encode([plan, search.start.base]))


def test_a_study_is_the_same_with_another_token(tmp_path: Path) -> None:
    one, other = (
        fingerprint(started(a_base(tmp_path, f"hub_token: {token}\n", name=f"{token}.yaml")).problem, 1, seed=1)
        for token in ("first", "second")
    )
    assert one == other


def test_what_is_wrong_with_a_secret_is_told_without_it(tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        a_base(tmp_path, f"hub_token: [{SECRET}]\nhub_tokn: {SECRET}\n")
    assert SECRET not in str(raised.value)
    assert PLACEHOLDER in str(raised.value)


def test_documents_of_engines_are_read_without_their_secrets(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2}, "comet": {"enabled": True, "api_key": SECRET}}), encoding="utf-8"
    )
    (tmp_path / "a.yaml").write_text(
        f"distributed_type: DEEPSPEED\ndeepspeed_config: {{deepspeed_config_file: {tmp_path / 'ds.json'},"
        f" aws_secret_access_key: {SECRET}}}\nnum_processes: 2\n",
        encoding="utf-8",
    )
    base = a_base(tmp_path, f"accelerate_config: {tmp_path / 'a.yaml'}\n")
    assert base.plan.args["deepspeed"] is not None
    assert SECRET not in repr((base.plan, base.launching))
    assert PLACEHOLDER not in repr((base.plan, base.launching))


def test_rows_at_an_address_with_a_secret_are_refused() -> None:
    entry = {"path": "json", "data_files": f"https://h/r.jsonl?token={SECRET}"}
    with pytest.raises(InputError, match="has a secret") as raised:
        mixture_source([entry], None, streams=False)
    assert SECRET not in str(raised.value)


@pytest.mark.slow
def test_no_file_that_is_handed_over_and_nothing_that_is_shown_has_a_secret(
    job_server: JobServer, tmp_path: Path, small_model_directory: Path, small_dataset_file: Path
) -> None:
    given = tmp_path / "mine.yaml"
    head = (
        f"model_name_or_path: {small_model_directory}\ndatasets: [{{path: json, data_files: {small_dataset_file}}}]\n"
    )
    (tmp_path / "launch.yaml").write_text(
        f"distributed_type: 'NO'\nnum_processes: 1\nmpirun_config: {{aws_secret_access_key: {SECRET}6}}\n",
        encoding="utf-8",
    )
    given.write_text(f"{head}{FILE}use_cpu: true\naccelerate_config: {tmp_path / 'launch.yaml'}\n", encoding="utf-8")
    written, out = read_file(str(given), "sft"), tmp_path / "out"
    base = read_base(written, CPU.hardware, job_server, out / "read")
    search = started(base)
    trainer, setting = search.problem.trainer, search.problem.setting
    plan = trainer.plan(search.problem.baseline.but(gradient_checkpointing="on"), setting)
    file, note = edited_base(base, EditTarget(plan, bundle=out), trainer, setting, job_server, out / "handed-over")
    assert note == ""
    storage = f"postgresql://me:{SECRET}7@host/name?sslpassword={SECRET}8"
    settings = ProbeArguments(base=given, storage=storage).settings
    result = a_result()
    assert result.recommended is not None
    chosen = replace(result.recommended, plan=plan)
    result = replace(result, base=file, recommended=chosen, settings=settings, notes=(file.withheld_text,))
    write_bundle(result, out)
    for form in ("html", "markdown"):
        write_page(probe_report(result), out / f"report.{form}", form)
    console = Console(record=True, width=120, file=io.StringIO())
    show(probe_report(result), console)
    files = [file for file in out.rglob("*") if file.is_file()]
    names = {"result.json", "train.py", "config.yaml", "accelerate.yaml", "report.html", "request.json", "reply.json"}
    assert names <= {file.name for file in files}
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []
    shown = console.export_text()
    assert SECRET not in shown
    for text in (shown, (out / "report.markdown").read_text(encoding="utf-8")):
        assert PLACEHOLDER in text
    assert "set HF_TOKEN in the environment" in " ".join(shown.split())
    config = (out / "config.yaml").read_text(encoding="utf-8")
    assert "set HF_TOKEN in the environment" in " ".join(config.replace("#", "").split())
    assert "hub_token" not in yaml.safe_load(config)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ((), ""),
        (("hub_token",), "hub_token of a.yaml is secret, and so not handed over: set HF_TOKEN in the environment."),
        (
            ("env.HF_TOKEN", "hub_token", "env.WANDB_API_KEY"),
            (
                "env.HF_TOKEN, hub_token, env.WANDB_API_KEY of a.yaml are secret, and so not handed over: "
                "set HF_TOKEN, WANDB_API_KEY in the environment."
            ),
        ),
        (("a.password",), "a.password of a.yaml is secret, and so not handed over: write a.password there yourself."),
    ],
)
def test_how_a_training_gets_its_secrets_is_said(keys: tuple[str, ...], said: str) -> None:
    assert BaseFile("a.yaml", withheld=keys).withheld_text == said
