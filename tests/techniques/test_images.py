"""The rules of techniques on rows with images, which follow from TRL's (tests/contract/test_trl_images.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import GLOBAL_BATCH, Setting
from autotune.techniques.attention import Attention
from autotune.techniques.base import CrashReason, impossible
from autotune.trainers import trainers
from tests.settings import GPU, LENGTHS, pictured_workload, setting, workload

SFT = trainers()["sft"]
LONGEST = max(LENGTHS)


def pictured(form: str = "messages") -> Setting:
    """Return a setting whose rows have images, in that format."""
    return setting(of=pictured_workload(form), allowed=frozenset({"packing", GLOBAL_BATCH}))


def reason(here: Setting, **choices: Choice) -> str | None:
    """Return why a candidate that cuts no row, and has these choices, is illegal."""
    start = Candidate({item.name: item.default(here) for item in SFT.techniques}).but(max_length=LONGEST)
    return SFT.illegal(SFT.normal(start.but(**choices), here), here)


def test_a_length_that_cuts_no_row_is_legal_and_a_shorter_one_fails() -> None:
    assert reason(pictured()) is None
    found = reason(pictured(), max_length=LONGEST - 1)
    assert isinstance(found, CrashReason)
    assert "training fails where a token of an image is cut" in found


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
    bidirectional = replace(here, workload=of)
    start = Candidate({item.name: item.default(here) for item in SFT.techniques})
    for found in (
        attention.unsuitable(choice, bidirectional),
        attention.conflict(choice, start.but(precision="float32+bf16"), bidirectional),
    ):
        assert ("attend to one another in llama" in str(found)) is ("flash" in choice)
    assert attention.unsuitable(choice, here) is None
    assert (
        attention.unsuitable(choice, replace(bidirectional, workload=replace(of, dataset=workload().dataset))) is None
    )


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_prompts_with_images_are_rounded_up_and_completed_by_no_continuous_batching(trainer: str) -> None:
    here = setting(machine=GPU, of=pictured_workload("prompt"))
    found = {item.name: item for item in trainers()[trainer].techniques}
    assert impossible(found["pad_to_multiple_of"], 64, here) is None
    start = Candidate({name: item.default(here) for name, item in found.items()})
    assert found["pad_to_multiple_of"].conflict(64, start, here) is None
    assert "TRL refuses it for models with a processor" in str(impossible(found["continuous_batching"], "on", here))


def test_lengths_are_rounded_up_for_messages_alone_and_to_a_divisor_of_the_length() -> None:
    assert LONGEST % 16 == 0 != LONGEST % 64
    assert reason(pictured(), pad_to_multiple_of=16) is None
    assert "does not round lengths up" in str(reason(pictured("prompt+completion"), pad_to_multiple_of=16))
    found = reason(pictured(), pad_to_multiple_of=64)
    assert isinstance(found, CrashReason)
    assert "is no multiple of 64" in found


def test_a_length_beyond_the_longest_row_is_rounded_up_with_it() -> None:
    """The tokenizer cuts and pads in one call, and refuses a length that is no multiple."""
    assert LONGEST % 64
    assert reason(pictured(), pad_to_multiple_of=64, max_length=4096) is None
