"""The largest rows of a loader come first, for any kind of rows and samplers; no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl.trainer.utils import RepeatSampler

from autotune.nullgpu.hook.nullgpu_dry_run import rows
from autotune.nullgpu.hook.nullgpu_dry_run.longest import UnorderedError, put_largest_first, replace_indices
from autotune.nullgpu.hook.nullgpu_dry_run.recorder import ProcessRecorder
from autotune.nullgpu.hook.nullgpu_dry_run.rows import UnmeasuredError, measure_rows

LENGTHS = [3, 9, 4, 1, 5, 10, 2, 6, 7, 8]


def ids(lengths: list[int], name: str = "input_ids") -> Dataset:
    return Dataset.from_dict({name: [[1] * length for length in lengths], "label": [0] * len(lengths)})


def widths(loader: Any, batches: int) -> list[list[int]]:
    """Return the lengths of the rows of the first batches."""
    found = [[len(row["input_ids"]) for row in batch] for batch in loader]
    return found[:batches]


@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler(LENGTHS),
        RandomSampler(LENGTHS),
        WeightedRandomSampler([1.0] * len(LENGTHS), len(LENGTHS), replacement=False),
        LengthGroupedSampler(3, lengths=LENGTHS),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_every_batch_has_the_largest_rows_whatever_samples_them(sampler: Any) -> None:
    loader = DataLoader(ids(LENGTHS), batch_size=3, sampler=sampler, collate_fn=list)
    put_largest_first(loader)
    assert widths(loader, 3) == [[10, 9, 8]] * 3


def test_a_shorter_row_comes_beside_those_of_one_length_in_every_second_batch() -> None:
    """Without it nothing is padded, and no mask is made (``trainers.md``: +7 to +21 % of memory)."""
    loader = DataLoader(ids([8, 8, 8, 8, 5, 6]), batch_size=2, shuffle=True, collate_fn=list)
    put_largest_first(loader)
    assert widths(loader, 3) == [[8, 8], [8, 6], [8, 8]]


def test_rows_that_are_all_alike_stay_as_they_are() -> None:
    assert list(replace_indices([2, 0, 1], [7, 7, 7], 2)) == [0, 1, 0]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("split", [False, True])
def test_each_rank_of_accelerate_gets_the_largest_rows(ranks: int, split: bool) -> None:
    size = ranks if split else 2
    found = []
    for rank in range(ranks):
        loader = DataLoader(ids(LENGTHS), batch_size=size, shuffle=True, collate_fn=list)
        shared = prepare_data_loader(
            loader, num_processes=ranks, process_index=rank, split_batches=split, put_on_device=False,
            use_seedable_sampler=True,
        )  # fmt: skip
        put_largest_first(shared)
        found.append(widths(shared, 1)[0])
    largest = sorted(LENGTHS, reverse=True)
    assert found == ([[each] for each in largest[:ranks]] if split else [largest[:2]] * ranks)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_of_a_distributed_sampler_gets_the_largest_of_all_rows(rank: int) -> None:
    sampler: Any = DistributedSampler(ids(LENGTHS), num_replicas=2, rank=rank)
    loader = DataLoader(ids(LENGTHS), batch_size=2, sampler=sampler, collate_fn=list)
    put_largest_first(loader)
    assert widths(loader, 2) == [[10, 9]] * 2


def test_a_sampler_that_repeats_prompts_repeats_the_largest() -> None:
    prompts = Dataset.from_dict({"prompt": ["a" * length for length in LENGTHS], "solution": ["b" * 50] * len(LENGTHS)})
    sampler = RepeatSampler(prompts, mini_repeat_count=2, batch_size=2, repeat_count=2, shuffle=True, seed=0)
    loader = DataLoader(prompts, batch_size=4, sampler=sampler, collate_fn=list)
    found = put_largest_first(loader)
    assert (found.field, found.unit, max(found.rows)) == ("prompt", "bytes of text", 10)
    batches = [[len(row["prompt"]) for row in batch] for batch in loader]
    # Two prompts, each for two completions; then both again, as the sampler repeats them.
    assert batches == [[10, 10, 9, 9]] * len(batches)


def test_a_loader_that_is_iterated_again_stays_in_order() -> None:
    loader = DataLoader(ids(LENGTHS), batch_size=3, shuffle=True, collate_fn=list)
    for _ in range(2):
        put_largest_first(loader)
        assert widths(loader, 1) == [[10, 9, 8]]
    assert len(loader) == 4


def test_a_sampler_that_draws_any_row_without_end_is_not_drawn_from() -> None:
    """As minGPT's, for 10 thousand million draws."""
    sampler = RandomSampler(LENGTHS, replacement=True, num_samples=10**10)
    loader = DataLoader(ids(LENGTHS), batch_size=2, sampler=sampler, collate_fn=list)
    put_largest_first(loader)
    assert len(next(iter(loader))[0]["input_ids"]) == 10


def test_rows_that_a_sampler_leaves_out_stay_out() -> None:
    loader = DataLoader(ids(LENGTHS), batch_size=2, sampler=SubsetRandomSampler([0, 1, 2, 3]), collate_fn=list)
    put_largest_first(loader)
    assert widths(loader, 2) == [[9, 4]] * 2


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


class OfOwn(BatchSampler):
    def __iter__(self) -> Any:
        return iter([[0, 1]])


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Endless(), batch_size=2), "iterated, and has no rows by index"),
        (DataLoader(LENGTHS, batch_sampler=OfOwn(SequentialSampler(LENGTHS), 2, False)), "batch sampler, OfOwn"),
        (DataLoader(LENGTHS, batch_size=None), "makes no batches"),
        (DataLoader({"a": 1}, batch_size=1, sampler=["a"]), "yields no numbers of rows"),
        (DataLoader(LENGTHS, batch_size=2), "no field with a length"),
    ],
    ids=["iterable", "batch-sampler", "no-batches", "no-numbers", "no-lengths"],
)
def test_what_cannot_be_ordered_is_named(loader: Any, reason: str) -> None:
    with pytest.raises(UnorderedError, match=reason):
        put_largest_first(loader)


@pytest.mark.parametrize(
    ("dataset", "rows", "field", "unit"),
    [
        (ids([2, 5]), [2, 5], "input_ids", "tokens"),
        (Dataset.from_dict({"prompt_ids": [[1], [1]], "chosen_ids": [[1, 1], [1] * 3], "rejected_ids": [[1] * 4, [1]]}),
         [5, 4], "prompt_ids + chosen_ids or rejected_ids", "tokens"),
        (Dataset.from_dict({"text": ["ab", "äöü"]}), [2, 6], "text", "bytes of text"),
        (Dataset.from_dict({"messages": [[{"role": "u", "content": "abc"}], [{"role": "u", "content": ""}]]}),
         [4, 1], "messages", "bytes of text"),
        (Dataset.from_dict({"prompt": ["a", "ab"], "completion": ["abcd", "a"]}), [5, 3],
         "prompt + completion", "bytes of text"),
        # Of an encoder and a decoder (T5, Whisper); of a decoder alone; classes.
        (Dataset.from_dict({"input_ids": [[1], [1] * 3], "labels": [[1] * 9, [1, 1]]}), [10, 5], "input_ids + labels",
         "tokens"),
        (Dataset.from_dict({"input_features": [[0.5] * 8] * 2, "labels": [[1, 1], [1] * 4]}), [10, 12],
         "input_features + labels", "elements"),
        (Dataset.from_dict({"input_ids": [[1], [1, 1]], "labels": [[1], [1, 1]]}), [1, 2], "input_ids", "tokens"),
        (Dataset.from_dict({"text": ["a", "ab"], "labels": [[0, 1], [1, 0]]}), [2, 2], "labels or text", "elements"),
        ([{"x": torch.ones(4), "labels": torch.tensor(1)}], [4], "labels or x", "elements"),
        ([torch.ones(4), torch.ones(2, 3)], [4, 6], "", "elements"),
        ([{"input_ids": [1, 2, 3], "label": 1}, {"input_ids": [1], "label": 0}], [3, 1], "input_ids", "tokens"),
        ([([1, 2], 1), ([1], 0)], [2, 1], "", "elements"),
        (TensorDataset(torch.ones(2, 7), torch.ones(2)), [7, 7], "", "elements"),
        (Subset(ids([2, 5, 3]), [1, 2]), [5, 3], "input_ids", "tokens"),
        (ConcatDataset([["ab"], ["a"]]), [2, 1], "", "bytes of text"),
        (ids([2, 5, 3]).select([2, 0]), [3, 2], "input_ids", "tokens"),
    ],
)  # fmt: skip
def test_rows_are_measured_by_tokens_else_by_text_else_by_elements(
    dataset: Any, rows: list[int], field: str, unit: str
) -> None:
    found = measure_rows(dataset)
    assert (list(found.rows), found.field, found.unit) == (rows, field, unit)


def test_answers_in_the_dataset_do_not_count_where_completions_are_generated() -> None:
    questions = Dataset.from_dict({"prompt": ["aaa", "a", "aa"], "answer": ["", "bbbb", ""]})
    sampler = RepeatSampler(questions, mini_repeat_count=2, batch_size=1, shuffle=False)
    found = put_largest_first(DataLoader(questions, batch_size=2, sampler=sampler, collate_fn=list))
    assert (list(found.rows), found.field) == ([3, 1, 2], "prompt")


IMAGE = {"bytes": b"\x89PNG" * 4, "path": "image.png"}


def test_images_are_not_read_and_have_no_size() -> None:
    """Neither have those in conversations; their text has."""
    talks = [[{"role": "u", "content": text, "image": IMAGE}] for text in ("abc", "a")]
    data = Dataset.from_dict({"image": [IMAGE, IMAGE], "images": [[IMAGE] * 9, [IMAGE]], "messages": talks})
    found = measure_rows(data)
    assert (list(found.rows), found.field, found.unit) == ([4, 2], "messages", "bytes of text")
    assert found.unmeasured
    for plain in (data.select_columns(["messages"]), list(data)):
        assert measure_rows(plain).unmeasured
    for known in (ids([2, 5]), [torch.ones(2), torch.ones(5)], [{"input_ids": [2, 5]}]):
        assert not measure_rows(known).unmeasured
    with pytest.raises(UnmeasuredError, match="no field with a length"):
        measure_rows(data.select_columns(["image", "images"]))


def test_a_loader_of_images_is_recorded_as_one_whose_largest_batch_is_not_known() -> None:
    talks = [[{"role": "u", "content": text, "image": IMAGE}] for text in ("abc", "a")]
    followed: Any = object.__new__(ProcessRecorder)
    followed._as_shuffled, followed._has_iterated, followed.record = False, True, {"loaders": []}
    for data in (Dataset.from_dict({"messages": talks}), ids([2, 5])):
        followed._on_iteration(DataLoader(data, batch_size=1, collate_fn=list))
    pictured, plain = followed.record["loaders"]
    assert pictured["order"] == "as it is"
    assert pictured["reason"] == "its rows have images or sounds, whose sizes are not read"
    assert plain["order"] == "largest first"


def test_columns_that_take_too_long_to_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_MAX_SECONDS", -1.0)
    with pytest.raises(UnmeasuredError, match="reading 2 rows takes more than"):
        measure_rows(ids([2, 5]))


def test_structures_with_missing_cells_have_the_size_of_what_they_have() -> None:
    talks = [None, [{"role": "u", "content": ["ab", "c"]}, {"role": None, "content": None}], []]
    assert list(measure_rows(Dataset.from_dict({"messages": talks})).rows) == [0, 4, 0]


def test_rows_without_a_length_are_refused() -> None:
    with pytest.raises(UnmeasuredError):
        measure_rows([1, 2, 3])
