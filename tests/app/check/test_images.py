"""Checks of configurations whose rows have images: they are traced on the rows themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.verdict import Outcome, Verdict
from tests.app.check.conftest import Checked
from tests.step.test_images_tokenised import of_answers, of_pairs, of_prompts, rows_of
from tests.vision import picture, write_small_vision_model

PICTURES = [[picture(90, 60)] * (number % 3) for number in range(8)]


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_vision_model(tmp_path_factory.mktemp("vision") / "model", "gemma3", weights=False)


def verdict_of(checked: Checked, folder: Path, model: Path, trainer: str, body: str = "", **asked: str) -> Verdict:
    made_of = {"sft": rows_of, "dpo": of_pairs, "kto": of_answers}.get(trainer, of_prompts)
    # GRPO takes no rows without images among those with some.
    made_of([some for some in PICTURES if some or trainer != "grpo"]).to_parquet(folder / "rows.parquet")
    file = folder / "config.yaml"
    where = f"model_name_or_path: {model}\ndatasets:\n  - path: parquet\n    data_files: {folder}/rows.parquet\n"
    file.write_text(f"{where}output_dir: out\nreport_to: none\n{body}", encoding="utf-8")
    return checked(config=str(file), trainer=trainer, gpu="H100-80GB", **asked)


@pytest.mark.parametrize("trainer", ["sft", "dpo", pytest.param("kto", marks=pytest.mark.nightly)])
def test_rows_with_images_fit(checked: Checked, vision_model: Path, tmp_path: Path, trainer: str) -> None:
    # With images, it is TRL's own default.
    skips = "dataset_kwargs: {skip_prepare_dataset: true}\n" if trainer == "sft" else ""
    verdict = verdict_of(checked, tmp_path, vision_model, trainer, f"max_length: null\n{skips}")
    assert (verdict.outcome, verdict.need is not None) == (Outcome.FITS, True), verdict.headline


def test_a_verdict_on_files_of_images_is_not_kept_and_one_on_images_in_rows_is(
    checked: Checked, vision_model: Path, tmp_path: Path
) -> None:
    again = [verdict_of(checked, tmp_path, vision_model, "sft", "max_length: null\n") for _ in range(2)]
    assert [(verdict.from_cache, verdict.outcome) for verdict in again] == [(False, Outcome.FITS), (True, Outcome.FITS)]
    picture(90, 60).save(tmp_path / "a.png")
    rows = rows_of(PICTURES).remove_columns("images")
    named = [[str(tmp_path / "a.png")] * len(images) for images in PICTURES]
    rows.add_column("images", named).to_parquet(tmp_path / "rows.parquet")
    file = str(tmp_path / "config.yaml")
    apart = [checked(config=file, trainer="sft", gpu="H100-80GB") for _ in range(2)]
    assert [(verdict.from_cache, verdict.need) for verdict in apart] == [(False, again[0].need)] * 2


GROUPS = "max_completion_length: 8\nnum_generations: 2\nreward_funcs: [get_soft_overlong_punishment]\n"


def test_generations_with_images_fit(checked: Checked, vision_model: Path, tmp_path: Path) -> None:
    sizes = "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n"
    verdict = verdict_of(checked, tmp_path, vision_model, "grpo", GROUPS + sizes)
    assert (verdict.outcome, verdict.need is not None) == (Outcome.FITS, True), verdict.headline


def test_a_length_that_cuts_tokens_of_an_image_cannot_run(checked: Checked, vision_model: Path, tmp_path: Path) -> None:
    verdict = verdict_of(checked, tmp_path, vision_model, "sft", "max_length: 4\n")
    assert verdict.outcome is Outcome.CANNOT_RUN
    assert "TRL fails on rows that max_length=4 cuts" in verdict.reason
    assert "Mismatch in `image` token count" in verdict.reason


@pytest.mark.parametrize(
    ("trainer", "body", "message"),
    [
        ("sft", "packing: true\n", "Packing is not supported for vision"),
        ("kto", "precompute_ref_log_probs: true\n", "`precompute_ref_log_probs=True` is not supported for vision"),
    ],
)
def test_what_trl_refuses_of_images_is_found(
    checked: Checked, vision_model: Path, tmp_path: Path, trainer: str, body: str, message: str
) -> None:
    verdict = verdict_of(checked, tmp_path, vision_model, trainer, body)
    assert verdict.outcome is Outcome.CANNOT_RUN
    assert any(message in finding.message for finding in verdict.findings)
