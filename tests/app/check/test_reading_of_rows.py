"""Checks and searches from a file read rows as the file specifies, or report what is not known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trl import SFTConfig

from autotune.app.check import fitting
from autotune.core.documents.verdict import Outcome, Verdict
from autotune.errors import InputError
from autotune.userconfig.base import sources_of
from autotune.userconfig.fields import reading_of, user_plan
from autotune.userconfig.objects import configuration_of
from tests.app.bases import a_base
from tests.app.check.conftest import Checked
from tests.small import messages_rows, prompt_completion_rows, write_rows, write_small_model

Check = Callable[..., Verdict]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages }}"
FEW = "output_dir: out\nreport_to: none\nmax_length: null\nper_device_train_batch_size: 2\n"


@pytest.fixture
def template(tmp_path: Path) -> Path:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return file


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has no chat template."""
    return write_small_model(tmp_path_factory.mktemp("models") / "base", weights=False, chat_template=False)


@pytest.fixture
def of(base: Path, tmp_path: Path, checked: Checked) -> Check:
    """Check a training of that model."""

    def run(rows: list[dict[str, Any]], body: str, trainer: str = "sft") -> Verdict:
        data = write_rows(tmp_path / "rows.jsonl", rows)
        names = f"model_name_or_path: {base}\ndatasets: [{{path: json, data_files: {data}}}]\n"
        (tmp_path / "mine.yaml").write_text(names + FEW + body)
        return checked(config=str(tmp_path / "mine.yaml"), trainer=trainer, gpu="H100-80GB")

    return run


def tokens_of(verdict: Verdict) -> int:
    assert (verdict.outcome, verdict.reason) == (Outcome.FITS, "")
    assert verdict.need is not None
    return verdict.need.tokens


def test_a_chat_template_that_comes_to_no_end_is_ended(
    of: Check, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "_READING_SECONDS", 1.0)
    template.write_text(ENDLESS)
    verdict = of(messages_rows(["a b c", "d"]), f"chat_template_path: {template}\n")
    assert verdict.outcome is Outcome.UNKNOWN
    assert "rows.jsonl was ended after" in verdict.reason
    assert any("chat template terminates" in item.message for item in verdict.findings)


def test_rows_are_as_long_as_the_template_of_the_file_makes_them(of: Check, template: Path) -> None:
    rows = messages_rows(["a b", "a b c d"])
    without = of(rows, "")
    assert "has no chat template" in without.reason + str(without.findings)
    short = tokens_of(of(rows, f"chat_template_path: {template}\n"))
    # Neither the rows that were read nor the verdict are kept longer than the template stays as it is.
    template.write_text(template.read_text().replace("{{ message.content }}", "{{ message.content }} and so on"))
    assert tokens_of(of(rows, f"chat_template_path: {template}\n")) > short + 4


def test_the_text_is_that_of_the_column_that_the_file_names(of: Check) -> None:
    rows = [{"text": "a", "content": "a b c d e f g h"}] * 3
    named = tokens_of(of(rows, "dataset_text_field: content\n"))
    assert named > tokens_of(of(rows, "")) + 5
    assert named == tokens_of(of([{"content": row["content"]} for row in rows], "dataset_text_field: content\n"))


@pytest.mark.parametrize("trainer", ["sft", "reward"])
def test_what_the_template_of_another_model_does_to_the_vocabulary_is_not_known(
    of: Check, trainer: str, base: Path, tmp_path: Path
) -> None:
    said = f"chat_template_path={base} is not a template file"
    verdict = of(messages_rows(["a b", "c d"]), f"chat_template_path: {base}\n", trainer)
    assert (verdict.outcome, said in verdict.reason) == (Outcome.UNKNOWN, True)
    with pytest.raises(InputError, match=r"mine.yaml: chat_template_path=elsewhere/model is not a template file"):
        a_base(tmp_path, "chat_template_path: elsewhere/model\n", trainer)


def test_what_the_rows_say_of_the_loss_is_not_taken_for_granted(of: Check) -> None:
    rows = prompt_completion_rows(["a b c", "d e f"])
    verdict = of(rows, "completion_only_loss: true\n")
    assert verdict.outcome is Outcome.FITS
    assert not any("completion_only_loss" in item.message for item in verdict.findings)


def test_rows_that_trl_is_to_take_as_they_are_are_not_taken_for_cut_or_packed_ones(of: Check) -> None:
    rows = [{"input_ids": [1] * tokens} for tokens in (8, 2000)]
    verdict = of(rows, "packing: true\ndataset_kwargs: {skip_prepare_dataset: true}\n")
    assert verdict.outcome is Outcome.UNKNOWN
    assert "skip_prepare_dataset: TRL neither cuts nor packs its rows" in verdict.reason
    assert tokens_of(of(rows, "dataset_kwargs: {skip_prepare_dataset: false}\n")) == 2000


def test_the_rows_of_a_base_are_read_as_it_says(template: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"content": "a"}] * 2)
    model = write_small_model(tmp_path / "model", weights=False)
    base = a_base(tmp_path, f"chat_template_path: {template}\ndataset_text_field: content\n")
    found = sources_of(base, str(model), str(rows)).dataset
    assert found.reading == {"chat_template_path": str(template), "dataset_text_field": "content"}
    assert str(template) in found.places


def test_only_what_is_set_is_handed_on_to_the_reading_of_rows(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SFTConfig(use_cpu=True, bf16=False, report_to="none", dataset_text_field="text", packing=True)
    assert reading_of(configuration_of(config)) == {}
    # A relative path leads from where the command was given.
    monkeypatch.chdir(template.parent)
    config.chat_template_path, config.completion_only_loss = template.name, False
    reading = {"chat_template_path": str(template), "completion_only_loss": False}
    assert reading_of(configuration_of(config)) == reading
    assert not reading.keys() & user_plan(configuration_of(config), {}).plan.args.keys()
