"""Checks of configurations whose rows have images are traced on these rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset, Image, List
from transformers.trainer_pt_utils import LengthGroupedSampler

from autotune.core.documents.verdict import Outcome, Severity, Verdict
from tests.app.check.conftest import Checked
from tests.step.test_images_tokenised import of_answers, of_pairs, of_prompts, rows_of
from tests.vision import picture, write_small_vision_model

PICTURES = [[picture(90, 60)] * (number % 3) for number in range(8)]


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_vision_model(tmp_path_factory.mktemp("vision") / "model", "gemma3", weights=False)


def verdict_of(
    checked: Checked, folder: Path, model: Path, trainer: str, body: str = "", rows: Dataset | None = None, **asked: str
) -> Verdict:
    made_of = {"sft": rows_of, "dpo": of_pairs, "kto": of_answers}.get(trainer, of_prompts)
    # GRPO takes no rows without images among those with some.
    rows = rows or made_of([some for some in PICTURES if some or trainer != "grpo"])
    rows.to_parquet(folder / "rows.parquet")
    file = folder / "config.yaml"
    where = f"model_name_or_path: {model}\ndatasets:\n  - path: parquet\n    data_files: {folder}/rows.parquet\n"
    file.write_text(f"{where}output_dir: out\nreport_to: none\n{body}", encoding="utf-8")
    return checked(config=str(file), trainer=trainer, gpu="H100-80GB", **asked)


@pytest.mark.parametrize("trainer", ["dpo", pytest.param("kto", marks=pytest.mark.nightly)])
def test_rows_with_images_fit(checked: Checked, vision_model: Path, tmp_path: Path, trainer: str) -> None:
    verdict = verdict_of(checked, tmp_path, vision_model, trainer, "max_length: null\n")
    assert (verdict.outcome, verdict.need is not None) == (Outcome.FITS, True), verdict.headline


@pytest.mark.parametrize(("attention", "notes"), [("eager", 1), pytest.param("sdpa", 0, marks=pytest.mark.nightly)])
def test_eager_attention_is_noted_where_images_of_several_sizes_share_a_row(
    checked: Checked, vision_model: Path, tmp_path: Path, attention: str, notes: int
) -> None:
    rows = rows_of([[picture(90, 60), picture(30, 20)], [picture(90, 60)]] * 2)
    # With images, it is TRL's own default.
    skips = "dataset_kwargs: {skip_prepare_dataset: true}\n"
    body = f"max_length: null\n{skips}attn_implementation: {attention}\n"
    verdict = verdict_of(checked, tmp_path, vision_model, "sft", body, rows)
    assert verdict.outcome is Outcome.FITS, verdict.headline
    found = [item.severity for item in verdict.findings if "scores of each image" in item.message]
    assert found == [Severity.NOTE] * notes


def test_rows_with_images_have_no_tokens_to_be_grouped_by(checked: Checked, vision_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Can only automatically infer lengths"):
        LengthGroupedSampler(2, rows_of(PICTURES))
    body = "max_length: null\ntrain_sampling_strategy: group_by_length\n"
    verdict = verdict_of(checked, tmp_path, vision_model, "sft", body)
    assert (verdict.outcome, verdict.reason) == (Outcome.CANNOT_RUN, "1 thing is wrong")
    assert "train_sampling_strategy" in {item.key for item in verdict.findings if item.severity is Severity.ERROR}


NAMED = ", transformer_layer_cls_to_wrap: Gemma3DecoderLayer"


@pytest.mark.parametrize(
    ("named", "outcome"),
    [("", Outcome.CANNOT_RUN), pytest.param(NAMED, Outcome.FITS, marks=pytest.mark.nightly)],
    ids=["not named", "named"],
)
def test_layers_that_fsdp_does_not_find_have_to_be_named(
    checked: Checked, vision_model: Path, tmp_path: Path, named: str, outcome: Outcome
) -> None:
    # The class of Gemma 3 counts a layer of the tower in that its configuration leaves out.
    wrap = "auto_wrap_policy: TRANSFORMER_BASED_WRAP"
    body = f"max_length: null\nnum_processes: 2\nfsdp: true\nfsdp_config: {{version: 2, {wrap}{named}}}\n"
    verdict = verdict_of(checked, tmp_path, vision_model, "sft", body)
    told = [item.message for item in verdict.findings if "transformer_layer_cls_to_wrap names" in item.message]
    assert (verdict.outcome, len(told)) == (outcome, int(not named)), verdict.headline


@pytest.mark.nightly
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


@pytest.mark.parametrize(
    ("further", "outcome"),
    [
        pytest.param("", Outcome.CANNOT_RUN, marks=pytest.mark.nightly),
        ("remove_unused_columns: false\n", Outcome.FITS),
    ],
    ids=["removed", "kept"],
)
def test_text_with_images_fits_where_no_column_is_removed(
    checked: Checked, vision_model: Path, tmp_path: Path, further: str, outcome: Outcome
) -> None:
    text = "what is this <start_of_image> a model"
    rows = Dataset.from_dict({"caption": [text] * 3, "images": [[picture(90, 60)]] * 3})
    body = "max_length: null\ndataset_text_field: caption\n"
    whole = rows.cast_column("images", List(Image()))
    verdict = verdict_of(checked, tmp_path, vision_model, "sft", f"{body}{further}", whole)
    assert verdict.outcome is outcome, verdict.headline


GROUPS = "max_completion_length: 8\nnum_generations: 2\nreward_funcs: [get_soft_overlong_punishment]\n"


def test_generations_with_images_fit(checked: Checked, vision_model: Path, tmp_path: Path) -> None:
    sizes = "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n"
    verdict = verdict_of(checked, tmp_path, vision_model, "grpo", GROUPS + sizes)
    assert (verdict.outcome, verdict.need is not None) == (Outcome.FITS, True), verdict.headline


@pytest.mark.nightly
def test_a_length_that_cuts_an_image_of_a_row_that_is_not_the_heaviest_cannot_run(
    checked: Checked, vision_model: Path, tmp_path: Path
) -> None:
    def of_role(role: str, words: int) -> dict[str, str]:
        return {"role": role, "content": "is " * words}

    early = [of_role("system", 1), of_role("user", 1), of_role("assistant", 90)]
    late = [of_role("system", 50), of_role("user", 1), of_role("assistant", 1)]
    pictures = [{"messages": messages, "images": [picture(90, 60)]} for messages in [early] * 8 + [late]]
    rows = Dataset.from_list(pictures).cast_column("images", List(Image()))
    verdict = verdict_of(checked, tmp_path, vision_model, "sft", "max_length: 40\n", rows)
    assert verdict.outcome is Outcome.CANNOT_RUN
    (found,) = [finding.message for finding in verdict.findings if finding.severity is Severity.ERROR]
    assert found.startswith("TRL fails on 1 row: max_length=40 cuts tokens of images, which need ")
    needed = int(found.rstrip(".").rpartition(" ")[2])
    assert 50 < needed < 70
    verdict = verdict_of(checked, tmp_path, vision_model, "sft", f"max_length: {needed}\n", rows)
    assert (verdict.outcome, verdict.need is not None) == (Outcome.FITS, True), verdict.headline


@pytest.mark.parametrize(
    ("trainer", "body", "message"),
    [
        ("sft", "packing: true\n", "Packing is not supported for vision"),
        pytest.param(
            "kto",
            "precompute_ref_log_probs: true\n",
            "`precompute_ref_log_probs=True` is not supported for vision",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_what_trl_refuses_of_images_is_found(
    checked: Checked, vision_model: Path, tmp_path: Path, trainer: str, body: str, message: str
) -> None:
    verdict = verdict_of(checked, tmp_path, vision_model, trainer, body)
    assert verdict.outcome is Outcome.CANNOT_RUN
    assert any(message in finding.message for finding in verdict.findings)
