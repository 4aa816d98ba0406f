"""The rules of techniques for rows with images, from TRL's rules (tests/contract/test_trl_images.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune.app.notes import notes_on_images
from autotune.core.candidate import Choice
from autotune.core.rows.documents import Documents
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.setting import GLOBAL_BATCH, Base, Setting
from autotune.techniques.attention import Attention
from autotune.techniques.base import CrashReason, impossible
from autotune.techniques.context_parallel import ContextParallel
from autotune.techniques.max_length import MaxLength
from autotune.trainers import trainers
from tests.settings import GPU, LENGTHS, PICTURED, pictured_workload, plan_with, problem, setting, workload

SFT = trainers()["sft"]
LONGEST = max(LENGTHS)


def pictured(form: str = "messages") -> Setting:
    """Return a setting whose rows have images, in that format."""
    return setting(of=pictured_workload(form), allowed=frozenset({"packing", GLOBAL_BATCH}))


def reason(here: Setting, **choices: Choice) -> str | None:
    """Return why a candidate that cuts no row, and has these choices, is illegal."""
    start = SFT.defaults(here).but(max_length=LONGEST)
    return SFT.illegal(SFT.normal(start.but(**choices), here), here)


def test_a_length_is_legal_that_cuts_no_token_of_an_image_and_leaves_something_of_each_row_to_train_on() -> None:
    here = replace(pictured(), token_coverage=0.0)
    assert reason(here) is reason(here, max_length=PICTURED) is None
    found = reason(here, max_length=PICTURED - 1)
    assert isinstance(found, CrashReason)
    assert "below the 16 tokens that rows with images need" in found
    late = Documents.of_groups([(99, 1, 100), (1, 81, 90)])
    of = replace(here.workload, dataset=replace(here.workload.dataset, several=late))
    assert of.least_length == 81
    assert isinstance(reason(replace(here, workload=of), max_length=80), CrashReason)


def test_rows_with_images_are_not_cut_at_their_beginning() -> None:
    here = replace(pictured(), base=Base("mine.yaml", {}, entries={"args.truncation_mode": "keep_end"}))
    assert reason(here) is None
    found = reason(here, max_length=LONGEST - 1)
    assert isinstance(found, CrashReason)
    assert "TRL refuses truncation_mode=keep_end" in found


def test_a_length_that_cuts_nothing_is_written_as_none_and_a_shorter_one_as_it_is() -> None:
    for choice, written in ((1885, 1885), (2000, None), (4096, None)):
        assert plan_with(pictured(), {"max_length": choice}).args["max_length"] == written
    assert plan_with(setting(), {"max_length": 4096}).args["max_length"] == 2000


def test_tokens_of_rows_with_images_are_not_split_among_processes() -> None:
    start = SFT.defaults(pictured())
    assert "but not its images" in str(ContextParallel().unsuitable(2, pictured()))
    assert isinstance(ContextParallel().conflict(2, start, pictured()), CrashReason)
    assert ContextParallel().unsuitable(1, pictured()) is None


def test_recipes_are_legal_with_images() -> None:
    found = problem(pictured())
    legal = [recipe for recipe in found.recipes if found.illegal(recipe) is None]
    assert len(legal) > len(found.recipes) / 2


def test_the_length_that_covers_the_tokens_is_none_that_cuts_an_image() -> None:
    here = replace(pictured(), token_coverage=0.1)
    assert MaxLength().parse("coverage", here) == 16
    assert MaxLength().parse("coverage", setting(token_coverage=0.01)) == 8


@pytest.mark.parametrize(
    "choices", [{"packing": "bfd"}, {"packing": "bfd_split"}, {"packing": "wrapped"}, {"padding_free": "on"}]
)
def test_rows_with_images_share_no_row(choices: dict[str, str]) -> None:
    assert "TRL refuses it for rows with images" in str(reason(pictured(), **choices))


@pytest.mark.parametrize(
    "choice", ["flash_attention_2", "kernels-community/vllm-flash-attn3", "sdpa", "flex_attention"]
)
def test_flash_attention_is_left_out_where_tokens_of_an_image_see_one_another(choice: str) -> None:
    attention, here = Attention(), pictured()
    of = replace(here.workload, model=replace(here.workload.model, bidirectional_images=True))
    bidirectional = replace(here, workload=of, machine=GPU)
    start = SFT.defaults(here)
    for found in (
        attention.unsuitable(choice, bidirectional),
        attention.conflict(choice, start.but(precision="float32+bf16"), bidirectional),
    ):
        assert ("attend to one another in llama" in str(found)) is ("flash" in choice)
    assert attention.unsuitable(choice, here) is None
    assert (
        attention.unsuitable(choice, replace(bidirectional, workload=replace(of, dataset=workload().dataset))) is None
    )


def test_eager_is_searched_only_where_the_rows_with_the_most_image_data_have_the_largest_images() -> None:
    attention, of = Attention(), pictured_workload()

    def reason_for(
        in_row: dict[int, int], pixels: dict[int, int], several: Documents | None = None, **other: Any
    ) -> str | None:
        assert of.dataset.images is not None
        images = replace(of.dataset.images, in_row=LengthDistribution(in_row), pixels=LengthDistribution(pixels))
        here = setting(of=replace(of, dataset=replace(of.dataset, images=images, several=several)))
        return attention.unsuitable("eager", replace(here, **other))

    assert "scores of each image" in str(reason_for({4: 1, 1: 1}, {900: 4, 4000: 1}))
    assert reason_for({1: 5}, {900: 4, 4000: 1}) is reason_for({4: 1, 1: 1}, {900: 5}) is None
    assert reason_for({4: 1, 1: 1}, {900: 4, 4000: 1}, fixed={"attention": "eager"}) is None
    # Of blocks of rows, the one with the most image data may be without the largest image.
    blocks = Documents.of_rows([(1, 20)] * 5, ordered=True)
    assert "scores of each image" in str(reason_for({1: 5}, {900: 4, 4000: 1}, blocks))
    assert reason_for({1: 5}, {900: 5}, blocks) is None


@pytest.mark.parametrize(("own", "notes"), [("eager", 1), ("sdpa", 0)])
def test_a_result_with_an_attention_of_the_user_s_own_notes_images_that_are_not_run(own: str, notes: int) -> None:
    of = pictured_workload()
    assert of.dataset.images is not None
    images = replace(
        of.dataset.images, in_row=LengthDistribution({4: 1, 1: 1}), pixels=LengthDistribution({9: 4, 99: 1})
    )
    here = setting(of=replace(of, dataset=replace(of.dataset, images=images)))
    baseline = problem(here, {"attention": own}).baseline
    found = list(notes_on_images(baseline["attention"], here.workload))
    assert [f"attention={own} may need more memory" in note for note in found] == [True] * notes


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_prompts_with_images_are_rounded_up_and_completed_by_no_continuous_batching(trainer: str) -> None:
    here = setting(machine=GPU, of=pictured_workload("prompt"))
    found = {item.name: item for item in trainers()[trainer].techniques}
    assert impossible(found["pad_to_multiple_of"], 64, here) is None
    start = trainers()[trainer].defaults(here)
    assert found["pad_to_multiple_of"].conflict(64, start, here) is None
    assert "TRL refuses it for models with an image processor" in str(
        impossible(found["continuous_batching"], "on", here)
    )


def test_lengths_are_rounded_up_for_messages_alone_and_to_a_divisor_of_the_length() -> None:
    assert LONGEST % 16 == 0 != LONGEST % 64
    for multiple, length in ((16, LONGEST), (64, LONGEST), (64, 1920)):
        assert reason(pictured(), pad_to_multiple_of=multiple, max_length=length) is None
    assert "does not round lengths up" in str(reason(pictured("prompt+completion"), pad_to_multiple_of=16))
    found = reason(pictured(), max_length=1888, pad_to_multiple_of=64)
    assert isinstance(found, CrashReason)
    assert "is not a multiple of 64" in found
