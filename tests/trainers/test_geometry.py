"""The micro-batches of a plan from a dataset's lengths, and those that recompile FlexAttention."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

import pytest
from datasets import Dataset

from autotune.core.files.codec import decode, encode
from autotune.core.plan import Completions, TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry, Layout, Recompiled, Shape, mean_shape
from autotune.core.rows.documents import Documents
from autotune.core.rows.lengths import LengthDistribution
from autotune.trainers import find_trainer
from autotune.trainers.evaluation import whole_geometry
from autotune.trainers.geometry import unpacked
from tests.settings import setting, workload


def geometry(lengths: Mapping[int, int], **choices: str | int) -> tuple[Layout, Shape, Shape, float, int]:
    """Return the geometry of an SFT candidate on rows of these lengths."""
    trainer, here = find_trainer("sft"), setting(of=workload(lengths=lengths))
    candidate = trainer.defaults(here).but(**{"per_device_train_batch_size": 2, "max_length": 1000, **choices})
    found = trainer.geometry(trainer.plan(candidate, here), here.workload.dataset.documents)
    return found.layout, found.worst, found.typical, found.tokens, found.micro_batches


def test_a_padded_micro_batch_is_as_long_as_its_longest_row() -> None:
    # Of two rows out of as many of 100 as of 200 tokens, three times in four one has 200.
    kind, worst, typical, tokens, micro_batches = geometry({100: 1, 200: 1})
    assert (kind, worst, tokens, micro_batches) == (Layout.PADDED, Shape(2, 200, filled=0.75), 300, 4)
    assert (typical.rows, typical.tokens) == (2, 175)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("trainable", [1 / 4000, 0.5])
def test_pairs_that_are_padded_have_padding_however_short_their_answers_are(rows: int, trainable: float) -> None:
    def widths(layout: Layout) -> set[int]:
        pairs = find_trainer("dpo").traced_rows(layout, Shape(rows, 4000), trainable)
        return {prompt + answer for prompt, *answers in pairs for answer in answers}

    assert widths(Layout.EQUAL) == {4000}
    assert widths(Layout.PADDED) == {4000, 3999}


def test_rows_are_cut_and_then_rounded_up() -> None:
    assert geometry({100: 1, 2000: 1}, pad_to_multiple_of=64)[1] == Shape(2, 1024, filled=0.538)


@pytest.mark.parametrize(("lengths", "rows"), [({100: 1, 200: 1}, 1), ({100: 9}, 2)])
def test_rows_of_one_length_need_no_mask(lengths: Mapping[int, int], rows: int) -> None:
    assert geometry(lengths, per_device_train_batch_size=rows)[0] is Layout.EQUAL


@pytest.mark.parametrize(
    ("lengths", "rows", "multiple"),
    [
        # Cut at 1000, a row that is shorter, and one that rounding up makes as long as the longest.
        ({1200: 9, 900: 1}, 2, "none"),
        ({100: 9}, 2, 64),
        ({128: 9, 127: 1}, 1, 64),
    ],
)
def test_padding_anywhere_brings_the_mask(lengths: Mapping[int, int], rows: int, multiple: str | int) -> None:
    assert geometry(lengths, per_device_train_batch_size=rows, pad_to_multiple_of=multiple)[0] is Layout.PADDED


def test_padding_free_rows_lie_end_to_end_and_the_longest_are_the_worst() -> None:
    kind, worst, typical, tokens, _ = geometry({100: 2, 400: 1}, padding_free="on")
    assert (kind, worst) == (Layout.FLAT, Shape(1, 500))
    assert (typical.tokens, tokens) == pytest.approx((400, 400))


def test_equal_rows_end_to_end_are_timed_in_the_length_that_they_have() -> None:
    _, worst, typical, _, _ = geometry({1024: 9}, padding_free="on", pad_to_multiple_of=64)
    assert worst == typical == Shape(1, 2048)


def test_packed_rows_are_as_full_as_documents_fill_them() -> None:
    # 600 and 400 fill a row of 1000; of the three rows, the last holds 600 alone.
    kind, worst, _, tokens, _ = geometry({600: 3, 400: 2}, packing="bfd")
    assert (kind, worst) == (Layout.FLAT, Shape(1, 2000))
    assert tokens == pytest.approx(2 * 2600 / 3)


@pytest.mark.parametrize(
    ("lengths", "packing", "tokens"),
    [
        ({700: 2000}, "bfd", 700),
        ({300: 100, 450: 100}, "bfd", 900),
        ({300: 100, 400: 100, 1200: 1}, "bfd", 1000),
        ({100: 3}, "bfd", 300),
        # A piece of 700 tokens, and two of 1,000.
        ({2700: 100}, "bfd_split", 1000),
        ({700: 100}, "bfd_split", 700),
    ],
)
def test_packed_rows_are_at_most_as_full_as_documents_fill_one(
    lengths: dict[int, int], packing: str, tokens: int
) -> None:
    assert geometry(lengths, packing=packing)[1] == Shape(1, 2 * tokens)


def test_rows_that_have_room_for_the_dataset_many_times_over_hold_it_once() -> None:
    assert geometry({100: 3}, packing="bfd", max_length=1 << 50)[1] == Shape(1, 600)


def test_what_is_split_goes_on_in_another_row() -> None:
    # 2500 tokens are two full rows of 1000 and a piece of 500, beside which one of the two documents of 400 fits.
    kind, worst, _, tokens, _ = geometry({2500: 1, 400: 2}, packing="bfd_split")
    assert (kind, worst) == (Layout.FLAT, Shape(1, 2000))
    assert tokens == pytest.approx(2 * 3300 / 4)


def test_the_last_wrapped_row_is_not_full_and_brings_the_mask() -> None:
    found = geometry({2500: 1, 100: 4}, packing="wrapped")
    assert found[:2] == (Layout.PADDED, Shape(2, 1000))
    assert found[3] == pytest.approx(2 * 2900 / 3)
    assert geometry({2000: 3}, packing="wrapped")[0] is Layout.EQUAL


@pytest.mark.parametrize(("choices", "tokens"), [({"padding_free": "on"}, 320), ({"packing": "bfd"}, 1408)])
def test_rows_end_to_end_are_rounded_up_as_a_whole(choices: Mapping[str, str], tokens: int) -> None:
    assert geometry({150: 9}, pad_to_multiple_of=64, **choices)[1] == Shape(1, tokens)


def test_a_dataset_smaller_than_a_micro_batch_repeats_its_rows() -> None:
    assert geometry({100: 1, 50: 1}, padding_free="on", per_device_train_batch_size=4)[1] == Shape(1, 300)


def test_padding_of_the_other_answer_counts_in_the_worst_micro_batch_of_pairs() -> None:
    documents = Documents.of_groups([(1, 11, 100, 60), (1, 11, 100, 80), (1, 11, 50, 50)])

    found = unpacked(documents, rows=2, length=None, multiple=1)

    # Of 2 x 2 x 100 tokens, 180 and 160 are no padding.
    assert found.worst == Shape(2, 100, filled=0.85)


@pytest.mark.parametrize("flat", [False, True])
def test_long_rows_of_long_answers_have_more_tokens_that_the_loss_counts(flat: bool) -> None:
    documents = Documents.of_rows([[1, 200]] * 9 + [[1, 1000]], ordered=False, trained=[20] * 9 + [900])

    found = unpacked(documents, rows=1, length=None, multiple=1, flat=flat)

    assert found.worst.trained == 0.9


@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_the_largest_micro_batch_of_many_ranks_is_far_above_the_mean(ranks: int) -> None:
    source = random.Random(1)
    lengths = [min(16_000, int(source.lognormvariate(6.8, 1.0)) + 10) for _ in range(20_000)]
    documents = Documents.of_rows([[1, length] for length in lengths], ordered=False)
    drawn = fmean(max(source.choices(lengths, k=ranks)) for _ in range(20_000))
    for flat in (False, True):
        found = unpacked(documents, rows=1, length=None, multiple=1, flat=flat).in_steps(1, ranks)
        largest = mean_shape(found.step_sizes).tokens
        assert 0.85 * drawn < largest < 1.02 * drawn
        assert largest > 1.3 * found.typical.tokens


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
    found = find_trainer("sft").compiled_again(plan, layout, documents)
    assert (found.narrower, found.unpadded) == pytest.approx(shares)
    assert find_trainer("sft").compiled_again(replace(plan, model={}), layout, documents) == Recompiled()


def test_a_pair_needs_no_padding_only_if_both_of_its_sequences_are_as_long() -> None:
    documents = Documents.of_groups([(1, 1, 500, 480), (1, 1, 400, 400), (1, 1, 300, 300), (1, 1, 300, 300)])
    plan = TrainingPlan("dpo", args={"per_device_train_batch_size": 2}, model=FLEX)
    found = find_trainer("dpo").compiled_again(plan, PADDED, documents)
    assert (found.narrower, found.unpadded) == pytest.approx((0.8, 0.6))


@pytest.mark.parametrize(("lengths", "shares"), [([400, 300, 300, 500], (0.8, 0)), ([300, 300, 400, 500], (0.6, 0.6))])
def test_blocks_have_the_widths_that_their_order_gives_them(lengths: list[int], shares: tuple[float, float]) -> None:
    documents = Documents.of_rows([(101, length) for length in lengths], ordered=True)
    plan = TrainingPlan("kto", args={"per_device_train_batch_size": 2}, model=FLEX)
    found = find_trainer("kto").compiled_again(plan, PADDED, documents)
    assert (found.narrower, found.unpadded) == pytest.approx(shares)


def blocks(rows: list[tuple[int, int]], trained: list[int] | None = None, **args: int) -> BatchGeometry:
    """Return the geometry of KTO's blocks of two rows, of which prompts and answers are given in tokens."""
    of = [(prompt + 1, prompt + answer) for prompt, answer in rows]
    documents = Documents.of_rows(of, ordered=True, trained=trained)
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, **args}
    plan = TrainingPlan("kto", args={**sizes, "loss_type": "apo_zero_unpaired"})
    return find_trainer("kto").geometry(plan, documents)


@pytest.mark.parametrize("trained", [None, [100, 100, 890, 890]])
def test_the_block_with_the_most_counted_tokens_is_traced_beside_the_widest(trained: list[int] | None) -> None:
    found = blocks([(900, 100), (900, 100), (10, 890), (10, 890)], trained)
    assert [shape.tokens for shape in found.shapes] == [1000, 900]
    assert [shape.trained for shape in found.shapes] == pytest.approx([0.1, 890 / 900])
    # Cut to 950 tokens, half of the first answers is left.
    cut = blocks([(900, 100), (900, 100), (10, 890), (10, 890)], trained, max_length=950)
    assert cut.worst.trained == pytest.approx(50 / 950)


@pytest.mark.parametrize("trainer", ["dpo", "kto", "reward"])
def test_a_geometry_of_rows_that_are_cut_survives_the_way_through_json(trainer: str) -> None:
    sequences = [(tokens + 1, tokens + 9) for tokens in (20, 400, 900, 1300)]
    documents = Documents.of_rows(sequences, ordered=True, trained=[10, 300, 600, 900])
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_length": 512}
    found = find_trainer(trainer).geometry(TrainingPlan(trainer, sizes), documents)
    assert decode(BatchGeometry, json.loads(json.dumps(encode(found)))) == found


def test_of_blocks_of_one_width_the_one_with_the_most_counted_tokens_is_traced() -> None:
    found = blocks([(900, 100), (900, 100), (10, 990), (10, 990)])
    assert (found.worst.tokens, found.worst.trained, found.rivals) == (1000, pytest.approx(0.99), ())


def test_evaluation_has_a_generation_for_each_micro_batch() -> None:
    documents = Documents.of_lengths(LengthDistribution({100: 8, 300: 2}))
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "num_iterations": 2}
    plan = TrainingPlan(
        "grpo", {**sizes, "num_generations": 8, "max_completion_length": 32}, completions=Completions(16, 16)
    )
    trainer = find_trainer("grpo")
    found = [
        trainer.evaluation_geometry(replace(plan, args={**plan.args, **steps}), documents, 8)
        for steps in ({}, {"steps_per_generation": 4})
    ]
    assert found[0] == found[1]
    # A micro-batch has the completions of one prompt.
    assert (found[0].layout, found[0].rows) == (Layout.COMPLETED, 80)
    assert found[0].typical.tokens == pytest.approx(156)


@pytest.mark.parametrize("documents_of_row", [1, 2])
@pytest.mark.parametrize("size", [0.2, 0.07, 5])
def test_an_evaluation_has_no_more_rows_than_trl_splits_off(size: float, documents_of_row: int) -> None:
    parts = Dataset.from_dict({"row": range(48 // documents_of_row)}).train_test_split(test_size=size)
    read = workload(lengths={64: 48})
    dataset = replace(read.dataset, documents_of_row=documents_of_row)
    source = replace(read.dataset_source, test_size=size)
    read = replace(read, dataset_source=source, dataset=dataset, evaluation=dataset)
    tested, trained = (documents_of_row * len(parts[name]) for name in ("test", "train"))
    assert (read.documents_split_off, read.documents_trained) == (tested, trained)

    plan = TrainingPlan(
        "sft", {"eval_strategy": "steps", "per_device_eval_batch_size": 32, "per_device_train_batch_size": 8}
    )
    evaluated = whole_geometry(find_trainer("sft"), plan, read).evaluation
    assert evaluated is not None
    assert evaluated.worst.rows == tested
