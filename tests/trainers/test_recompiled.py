"""For which sizes of micro-batches FlexAttention is compiled again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from autotune.core.batch_geometry import Layout, Recompiled
from autotune.core.documents import Documents
from autotune.core.lengths import LengthDistribution
from autotune.core.plan import TrainingPlan
from autotune.trainers import find_trainer
from autotune.trainers.recompiled import compiled_again

FLEX = {"attn_implementation": "flex_attention"}
PADDED, EQUAL, FLAT = Layout.PADDED, Layout.EQUAL, Layout.FLAT


@pytest.mark.parametrize(
    ("lengths", "args", "layout", "shares"),
    [
        # 400 tokens are the widest that are narrower; two rows of 300 need no padding.
        ({500: 1, 400: 1, 300: 2}, {}, PADDED, (0.8, 0.6)),
        ({500: 1, 400: 1, 300: 1}, {}, PADDED, (0.8, 0)),
        ({500: 1, 400: 1}, {"max_length": 400}, PADDED, (0.0, 1.0)),
        ({500: 1, 490: 1, 300: 1}, {"pad_to_multiple_of": 100}, PADDED, (0.6, 0)),
        ({500: 1, 490: 2, 300: 1}, {"pad_to_multiple_of": 100}, PADDED, (0.6, 0)),
        ({500: 1, 400: 1}, {}, EQUAL, (0.8, 0)),
        ({500: 9}, {}, EQUAL, (0, 0)),
        ({500: 1, 400: 1}, {}, FLAT, (1.0, 0)),
    ],
)
def test_it_is_compiled_for_the_widest_narrower_micro_batch_and_for_the_widest_without_padding(
    lengths: Mapping[int, int], args: Mapping[str, object], layout: Layout, shares: tuple[float, float]
) -> None:
    documents = Documents.of_lengths(LengthDistribution(dict(lengths)))
    plan = TrainingPlan("sft", args={"per_device_train_batch_size": 2, **args}, model=FLEX)
    found = compiled_again(find_trainer("sft"), plan, layout, documents)
    assert (found.narrower, found.unpadded) == pytest.approx(shares)
    assert compiled_again(find_trainer("sft"), replace(plan, model={}), layout, documents) == Recompiled()


def test_a_pair_needs_no_padding_only_if_both_of_its_sequences_are_as_long() -> None:
    documents = Documents.of_groups([(1, 1, 500, 480), (1, 1, 400, 400), (1, 1, 300, 300), (1, 1, 300, 300)])
    plan = TrainingPlan("dpo", args={"per_device_train_batch_size": 2}, model=FLEX)
    found = compiled_again(find_trainer("dpo"), plan, PADDED, documents)
    assert (found.narrower, found.unpadded) == pytest.approx((0.8, 0.6))


@pytest.mark.parametrize(("lengths", "shares"), [([400, 300, 300, 500], (0.8, 0)), ([300, 300, 400, 500], (0.6, 0.6))])
def test_blocks_have_the_widths_that_their_order_gives_them(lengths: list[int], shares: tuple[float, float]) -> None:
    documents = Documents.of_rows([(101, length) for length in lengths], ordered=True)
    plan = TrainingPlan("kto", args={"per_device_train_batch_size": 2}, model=FLEX)
    found = compiled_again(find_trainer("kto"), plan, PADDED, documents)
    assert (found.narrower, found.unpadded) == pytest.approx(shares)
