"""Tables of row lengths take a few bytes per row, in memory and between processes."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from autotune.core.documents.length_report import length_report
from autotune.core.files.codec import DecodeError, decode, encode
from autotune.core.rows.documents import Documents
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.rows.table import Table
from autotune.core.workload import DatasetProfile, Workload
from autotune.trainers import find_trainer
from tests.reporting.examples import a_workload

ROWS = 1_000_000
# A pair is a count and three lengths, of two bytes at most; tuples of Python's numbers took over 200.
BYTES_PER_ROW = 30


def pairs(trainer: str, rows: int) -> Documents:
    """Return random rows of a trainer, nearly all of which differ."""
    drawn = np.random.default_rng(0).integers(1, 3000, size=(rows, len(find_trainer(trainer).parts)))
    needs, *sequences = find_trainer(trainer).document(tuple(drawn.T))
    return Documents.of_rows(np.stack([needs, *sequences], axis=1), ordered=find_trainer(trainer).ordered)


def test_a_million_different_rows_are_received_and_reported_in_a_few_bytes_each() -> None:
    workload, documents = a_workload(), pairs("dpo", ROWS)
    lengths = LengthDistribution(documents.widths)
    reply = replace(workload, dataset=replace(workload.dataset, lengths=lengths, several=documents))
    text = json.dumps(encode(reply))
    assert len(text) < 8 * ROWS
    tracemalloc.start()
    try:
        received = decode(Workload, json.loads(text))
        report = length_report(replace(workload, dataset=received.dataset))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.rows == ROWS == sum(held.rows for held in report.histogram)
    assert peak_bytes < BYTES_PER_ROW * ROWS


@pytest.mark.parametrize("trainer", ["dpo", "kto", "reward"])
def test_documents_survive_the_way_through_json(trainer: str) -> None:
    documents = pairs(trainer, 100_000)
    profile = replace(a_workload().dataset, several=documents)
    back = decode(DatasetProfile, json.loads(json.dumps(encode(profile)))).documents
    assert np.array_equal(back.groups.rows(), documents.groups.rows())
    assert np.array_equal(back.in_order(2000), documents.in_order(2000))


def test_documents_are_counted_and_keep_their_order() -> None:
    rows = [(1, 9), (5, 300), (1, 9), (1, 70_000)]
    documents = Documents.of_rows(rows, ordered=True)
    assert documents.groups.rows().tolist() == [[2, 1, 9], [1, 1, 70_000], [1, 5, 300]]
    assert documents.in_order(None).tolist() == list(map(list, rows))
    assert documents.in_order(4).tolist() == [[1, 9], [1, 9], [1, 70_000]]
    without = Documents.of_rows(rows, ordered=False)
    assert without.order is None
    assert without.in_order(None).tolist() == [[1, 9], [1, 9], [1, 70_000], [5, 300]]


def test_a_text_that_is_no_table_is_refused() -> None:
    for text in ("", "u1", "u1:!", "u1:aaaa", "nothing:eJw="):
        with pytest.raises(DecodeError):
            decode(Documents, {"groups": text})
    with pytest.raises(DecodeError, match=r"Expected `str`, got `array`"):
        decode(Documents, {"groups": [[1, 2, 3]]})


def test_numbers_of_any_size_are_kept() -> None:
    columns = [[0, 1], [255, 256], [2**31, 2**40]]
    (part,) = Table.of_text(Table(columns).text).parts()
    assert part.T.tolist() == columns
