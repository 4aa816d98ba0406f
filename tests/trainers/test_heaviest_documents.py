"""The micro-batches that may need the most memory, compared with all micro-batches of small datasets."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest

from autotune.core.rows.batch_geometry import Layout, Shape
from autotune.core.rows.documents import Documents
from autotune.trainers.geometry import packed, unpacked

PROMPTS_MOSTLY, ANSWERS_MOSTLY = [[1, 200]] * 3, [[1, 1000], [1, 1000], [1, 800]]


WEIGHTS = [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (1.0, 0.5), (0.5, 1.0)]
"""Of what memory depends on: the tokens of a micro-batch, and those that the loss counts."""


def counted(shape: Shape) -> float:
    return shape.rows * shape.tokens * shape.filled * shape.trained


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("length", [None, 60])
@pytest.mark.parametrize("flat", [False, True])
def test_of_all_micro_batches_none_needs_much_more(rows: int, length: int | None, flat: bool) -> None:
    for seed, (whole, part) in product(range(8), WEIGHTS):
        source = random.Random(seed)
        lengths = [source.randint(10, 100) for _ in range(9)]
        answers = [source.randint(1, tokens) for tokens in lengths]
        documents = Documents.of_rows([[1, tokens] for tokens in lengths], ordered=False, trained=answers)
        shapes = unpacked(documents, rows, length, 1, flat=flat).shapes
        cut = [min(tokens, length or tokens) for tokens in lengths]
        # Of an answer at the end, TRL keeps all where it cuts the beginning.
        left = list(map(min, answers, cut))
        most = max(
            whole * (sum(cut[row] for row in chosen) if flat else rows * max(cut[row] for row in chosen))
            + part * sum(left[row] for row in chosen)
            for chosen in combinations(range(9), rows)
        )
        found = max(whole * shape.rows * shape.tokens + part * counted(shape) for shape in shapes)
        # A fiftieth more of the counted tokens is not worth a trace.
        assert found >= most * (0.97 if whole in (0, part) or not part else 0.93), seed


@pytest.mark.parametrize(
    ("pairs", "multiple", "masked"),
    [
        ([[1, 9, 9], [1, 8, 3], [1, 5, 2]], 1, 8),
        # A pair as wide as the longest is padded.
        ([[1, 9, 9], [1, 9, 3]], 1, None),
        ([[1, 9, 9], [1, 8, 8]], 1, None),
        # The longest is not rounded up.
        ([[1, 8, 8], [1, 3, 3]], 4, 4),
        ([[1, 8, 8], [1, 7, 7]], 4, None),
    ],
)
def test_a_padded_document_stands_beside_a_longer_one_without_padding(
    pairs: list[list[int]], multiple: int, masked: int | None
) -> None:
    documents = Documents.of_rows(pairs, ordered=False)
    found = unpacked(documents, 1, None, multiple)
    assert (found.layout is Layout.EQUAL) is (masked is not None or pairs[1] == [1, 8, 8])
    assert (found.masked and found.masked.tokens) == masked
    # Two documents pad each other.
    assert unpacked(documents, 2, None, multiple).masked is None


def test_the_widest_documents_have_a_share_of_counted_tokens_of_their_own() -> None:
    trained = [20, 20, 20, 900, 500, 400]
    documents = Documents.of_rows([*PROMPTS_MOSTLY, *ANSWERS_MOSTLY], ordered=False, trained=trained)

    def share(rows: int, length: int | None = None) -> float:
        return unpacked(documents, rows, length, 1).worst.trained

    assert share(1) == 0.9
    assert share(2) == 0.7
    # Cut to 700 tokens, all three are as wide, and the two with the most counted tokens count.
    assert share(2, 700) == pytest.approx((700 + 500) / 1400)
    # A micro-batch of more documents than there are repeats them.
    assert share(12) == pytest.approx(1860 / 3400)
    assert unpacked(documents.up_to(200), 1, None, 1).worst.trained == 0.1


@pytest.mark.parametrize(
    ("needs", "trained", "left"),
    [
        # The beginning is cut: the answer is at the end, and stays.
        (1, 1000, 1000),
        (1, 3000, 1024),
        # The end is cut: the prompt stays, and of the answer what is behind it.
        (1001, 8000, 24),
        (101, 8900, 924),
        # A user's turn is behind the first answer.
        (1, 500, 500),
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_a_document_that_is_cut_keeps_the_counted_tokens_that_the_cut_leaves(
    needs: int, trained: int, left: int, flat: bool
) -> None:
    documents = Documents.of_rows([[needs, 9000]] * 9, ordered=False, trained=[trained] * 9)
    said = unpacked(documents, 8, 1024, 1, flat=flat)
    assert said.worst.trained == pytest.approx(left / 1024)
    assert [size.shape.trained for size in said.sizes] == [pytest.approx(left / 1024)]


def test_a_long_prompt_with_a_short_answer_has_a_rival() -> None:
    documents = Documents.of_rows([[1, 1000], *[[1, 800]] * 4], ordered=False, trained=[10, 790, 790, 790, 790])
    alone = unpacked(documents, 1, None, 1)
    assert (alone.worst.tokens, alone.worst.trained) == (1000, 0.01)
    assert [(shape.tokens, shape.trained) for shape in alone.rivals] == [(800, 790 / 800)]
    # Padding makes the others as wide as the prompt; without it, the same holds as for one row.
    several = unpacked(documents, 4, None, 1)
    assert several.worst.tokens == 1000
    assert several.worst.trained == pytest.approx((10 + 3 * 790) / (1000 + 3 * 800))
    assert [shape.tokens for shape in several.rivals] == [800]


def test_where_all_tokens_count_there_is_one_that_matters() -> None:
    documents = Documents.of_rows([*PROMPTS_MOSTLY, *ANSWERS_MOSTLY], ordered=False)
    assert unpacked(documents, 2, None, 1).rivals == ()
    assert unpacked(documents, 2, None, 1, flat=True).rivals == ()


@pytest.mark.parametrize("flat", [False, True])
def test_packed_rows_that_are_not_full_have_the_counted_tokens_of_their_documents(flat: bool) -> None:
    documents = Documents.of_rows([[1, 1000]] * 3, ordered=False, trained=[900] * 3)
    # One row holds all three, and has room for a fourth.
    worst = packed(documents, 1, 4000, 1, "bfd", flat=flat).worst
    assert counted(worst) == pytest.approx(2700)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_of_very_many_documents_that_are_cut_a_shorter_one_is_known(rows: int) -> None:
    # All but the last are cut to 1,000 tokens, which leaves them alike in width, and none of them is padded.
    cut = [[1, 1000 + number] for number in range(3000)]
    assert unpacked(Documents.of_rows([*cut, [1, 900]], ordered=False), rows, 1000, 1).layout == (
        Layout.PADDED if rows > 1 else Layout.EQUAL
    )
    assert unpacked(Documents.of_rows(cut, ordered=False), rows, 1000, 1).layout == Layout.EQUAL
