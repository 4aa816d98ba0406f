"""An optimizer step has the requested documents, whatever rows they are packed into."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from datasets import Dataset
from trl import pack_dataset

from autotune.core.candidate import Candidate
from autotune.core.rows.documents import Documents
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.setting import GLOBAL_BATCH, Setting
from autotune.techniques import find
from autotune.techniques.packing import documents_per_row, packed_documents
from autotune.techniques.per_device_train_batch_size import documents_per_step, rows_per_step
from autotune.trainers import find_trainer
from tests.settings import setting, workload

SFT = find_trainer("sft")
# 1,000 documents of 100 tokens: a packed row of 400 tokens holds four of them.
EQUAL = {100: 1000}


def here(documents: int, *allowed: str, lengths: dict[int, int] | None = None) -> Setting:
    known = setting(of=workload(lengths=lengths or EQUAL))
    return replace(known, global_batch_size=documents, allowed=frozenset(allowed))


def packed(where: Setting, *, length: int, rows: int, packing: str = "bfd") -> Candidate:
    start = SFT.defaults(where)
    return start.but(packing=packing, max_length=length, per_device_train_batch_size=rows)


@pytest.mark.parametrize(("documents", "rows", "expected"), [(16, 1, 4), (16, 2, 4), (16, 4, 4), (64, 4, 16)])
def test_packed_rows_are_as_many_as_hold_the_documents(documents: int, rows: int, expected: int) -> None:
    where = here(documents)
    candidate = packed(where, length=400, rows=rows)
    assert rows_per_step(candidate, where) == expected
    assert documents_per_step(candidate, where) == pytest.approx(documents)
    assert SFT.illegal(candidate, where) is None
    plan = SFT.plan(candidate, where)
    assert plan.args["per_device_train_batch_size"] == rows
    assert plan.args["gradient_accumulation_steps"] == expected // rows
    assert SFT.geometry(plan, where.workload.dataset.documents).documents == pytest.approx(documents)


@pytest.mark.parametrize(("documents", "legal"), [(9, False), (10, False), (11, True), (15, True), (17, True)])
def test_a_tenth_more_or_fewer_documents_is_near_enough(documents: int, legal: bool) -> None:
    where = here(documents)
    reason = SFT.illegal(packed(where, length=400, rows=1), where)
    assert (reason is None) is legal
    if reason is not None:
        assert "packed rows of 400 tokens hold" in reason
        assert f"--allow {GLOBAL_BATCH}" in reason


def test_another_global_batch_can_be_allowed_by_name() -> None:
    where = here(8)
    refused = packed(where, length=4000, rows=1)
    assert "1 packed row of 4,000 tokens holds 40.0 documents" in str(SFT.illegal(refused, where))
    assert SFT.illegal(refused, here(8, GLOBAL_BATCH)) is None


def test_rows_of_one_document_divide_the_global_batch() -> None:
    where = here(12)
    plain = packed(where, length=1000, rows=8, packing="none")
    assert SFT.illegal(plain, where) == "8 rows do not divide the 12 documents of a global batch"
    assert SFT.illegal(plain.but(per_device_train_batch_size=6), where) is None


@pytest.mark.parametrize("documents", [8, 32, 100])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_there_are_row_lengths_that_hold_the_global_batch(documents: int, rows: int) -> None:
    source = random.Random(documents)
    lengths = Counter(min(900, round(source.lognormvariate(4.5, 0.8)) + 1) for _ in range(3000))
    where = here(documents, lengths=dict(lengths))
    length = find("max_length", SFT.techniques).parse(f"batch/{rows}", where)
    assert int(length) % 8 == 0
    held = documents_per_row(where.workload.dataset.documents, "bfd", int(length)) * rows
    assert held == pytest.approx(documents, rel=0.05)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize(("count", "tolerance"), [(300, 0.0), (1000, 0.0), (2500, 0.02)])
@pytest.mark.parametrize("length", [64, 200, 1500])
def test_rows_are_packed_as_trl_packs_them(strategy: str, count: int, tolerance: float, length: int) -> None:
    source = random.Random(count)
    lengths = [min(700, round(source.lognormvariate(4, 0.9)) + 1) for _ in range(count)]
    ids = [[1] * tokens for tokens in lengths]
    real = len(pack_dataset(Dataset.from_dict({"input_ids": ids}), length, strategy))
    documents = Documents.of_lengths(LengthDistribution(dict(Counter(lengths))))
    # TRL packs 1,000 documents at a time, in the order of the dataset; which ones meet is chance.
    assert packed_documents(documents, strategy, length).rows == pytest.approx(
        real, rel=tolerance, abs=2 if tolerance else 0
    )


@pytest.mark.parametrize(("strategy", "tolerance"), [("bfd", 0.05), ("bfd_split", 0.05), ("wrapped", 0.1)])
@pytest.mark.parametrize("length", [200, 1500])
def test_the_tokens_that_the_loss_counts_are_packed_as_trl_packs_them(
    strategy: str, tolerance: float, length: int
) -> None:
    source = random.Random(5)
    lengths = [min(700, round(source.lognormvariate(4, 0.9)) + 1) for _ in range(1000)]
    # Short documents are prompts mostly, and long ones answers.
    answers = [tokens - 20 if tokens > 150 else tokens // 5 for tokens in lengths]
    masks = [
        [place % tokens < answer for place in range(tokens)] for tokens, answer in zip(lengths, answers, strict=True)
    ]
    real = pack_dataset(Dataset.from_dict({"input_ids": masks, "completion_mask": masks}), length, strategy)
    most = sorted(map(sum, real["completion_mask"]), reverse=True)
    rows = [[1, tokens] for tokens in lengths]
    found = packed_documents(Documents.of_rows(rows, ordered=False, trained=answers), strategy, length)
    assert len(found.loss_tokens) == len(most)
    assert sum(found.loss_tokens[:4]) == pytest.approx(sum(most[:4]), rel=tolerance)
