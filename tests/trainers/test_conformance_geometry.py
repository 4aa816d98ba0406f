"""Conformance of every trainer: its micro-batches of a plan are those of TRL's own data loader."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest import mock

import pytest

from autotune.core.candidate import Choice
from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry, Layout
from autotune.step.run.batches import plan_batches
from autotune.step.run.training import step_size
from autotune.techniques.max_length import KEEP_END, TRUNCATION
from autotune.trainers import trainers
from autotune.trainers.base import Trainer
from autotune.trainers.length_limit import length_limit
from tests.trainers.prepared import WHOLE_STEPS, Prepare, Prepared, prepared_rows, refused_by_trl, richest
from tests.trainers.samples import TEXTS, sample_rows, token_rows

Choices = Mapping[str, Choice]
Seen = Callable[[Prepared, TrainingPlan], "Real"]

EPOCHS = 3
MICRO_BATCHES = 400
"""Micro-batches, at least, that a mean is taken over."""
STANDARD_ERRORS = 4
SHARE = 0.02
"""By which a typical micro-batch may be off beside that: it is that of rows drawn from a dataset without an end."""

ONE_ROW: Choices = {"per_device_train_batch_size": 1}
_PADDED: tuple[Choices, ...] = (
    {},
    {"max_length": 32},
    ONE_ROW,
    {"per_device_train_batch_size": 3, "max_length": 41},
    {"per_device_train_batch_size": 4, "max_length": 40, "pad_to_multiple_of": 16},
    {"per_device_train_batch_size": 1, "pad_to_multiple_of": 8},
)
_PADDING_FREE: tuple[Choices, ...] = (
    {"padding_free": "on", "per_device_train_batch_size": 2},
    {"padding_free": "on", "per_device_train_batch_size": 4, "max_length": 33},
    {"padding_free": "on", "per_device_train_batch_size": 3, "max_length": 48, "pad_to_multiple_of": 16},
)
_PACKED: tuple[Choices, ...] = tuple(
    {"packing": strategy, **sizes}
    for strategy in ("bfd", "bfd_split", "wrapped")
    for sizes in (
        {"per_device_train_batch_size": 1, "max_length": 96},
        {"per_device_train_batch_size": 2, "max_length": 29},
        {"per_device_train_batch_size": 3, "max_length": 44, "pad_to_multiple_of": 16},
        # More than all rows hold.
        {"per_device_train_batch_size": 2, "max_length": 4000},
    )
)
_GENERATED: tuple[Choices, ...] = (
    {"num_generations": 4, "per_device_train_batch_size": 2, "steps_per_generation": "step/2"},
    {"num_generations": 3, "per_device_train_batch_size": 3, "max_completion_length": 41, "pad_to_multiple_of": 16},
    {"num_generations": 2, "per_device_train_batch_size": 1, "steps_per_generation": "step/12", "beta": "0.1"},
    {"num_generations": 4, "per_device_train_batch_size": 4, "num_iterations": 2},
    {"max_new_tokens": 24, "per_device_train_batch_size": 3},
    {"max_new_tokens": 24, "per_device_train_batch_size": 3, "max_length": 50},
)


def has(trainer: Trainer, choices: Choices) -> bool:
    """Whether a trainer has the techniques that are chosen of."""
    return choices.keys() <= {item.name for item in trainer.techniques}


CASES = [
    pytest.param(trainer, choices, id="-".join([trainer.name, *(f"{name}={value}" for name, value in choices.items())]))
    for trainer in trainers().values()
    for choices in (*_PADDED, *_PADDING_FREE, *_PACKED, *_GENERATED)
    if has(trainer, choices) and not refused_by_trl(trainer, choices)
]


@dataclass(frozen=True)
class Real:
    """What TRL's data loader made of a plan.

    Attributes:
        rows: that it iterates over in an epoch.
        batches: of each epoch, each the rows and the tokens, padding included, of its tensor.
        tokens: of all rows, padding excluded.
        built: TRL's trainer.
    """

    rows: int
    batches: list[list[tuple[int, int]]]
    tokens: int
    built: Any

    def full(self, rows: int) -> list[tuple[int, int]]:
        """Return the micro-batches of as many rows as planned: the last of an epoch may have fewer."""
        partial = self.rows % rows != 0
        return [batch for epoch in self.batches for batch in (epoch[:-1] if partial else epoch)]


def real(found: Prepared, plan: TrainingPlan, folder: Path) -> Real:
    """Return TRL's micro-batches of a plan in several epochs."""
    built = found.built(plan, folder)
    loader = built.get_train_dataloader()
    # Moving a batch to the CPU, where it is, takes a third of the time, and reading rows again a quarter.
    loader.device = None
    epochs = max(EPOCHS, -(-MICRO_BATCHES // len(loader)))
    with read_once(loader.dataset):
        batches = [[found.adapter.rows_and_tokens(built, batch) for batch in loader] for _ in range(epochs)]
    yielded = rows_yielded(found, plan, built)
    tokens = int(found.adapter.sizes(built).tokens.sum())
    return Real(len(built.train_dataset) * yielded, batches, tokens * yielded, built)


@contextmanager
def read_once(dataset: Any) -> Iterator[None]:
    """Let a loader take copies of rows that are read beforehand."""
    rows = list(dataset)
    with mock.patch.object(type(dataset), "__getitems__", lambda _, places: [dict(rows[place]) for place in places]):
        yield


def rows_yielded(found: Prepared, plan: TrainingPlan, built: Any) -> int:
    """Return how many rows of micro-batches each row of the dataset makes in an epoch."""
    drawing = found.adapter.drawing(built)
    return drawing.uses * plan.rows // drawing.rows


@pytest.fixture(scope="module")
def seen_of(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A function that returns TRL's micro-batches of a plan, built once for all tests."""
    known: dict[str, Real] = {}

    def of(found: Prepared, plan: TrainingPlan) -> Real:
        key = repr((found.asked.dataset, plan))
        if key not in known:
            known[key] = real(found, plan, tmp_path_factory.mktemp("built"))
        return known[key]

    return of


def listed(found: Prepared, choices: Choices) -> tuple[TrainingPlan, BatchGeometry]:
    """Return the plan of choices and its geometry."""
    plan = found.plan(choices)
    return plan, found.geometry(plan)


@pytest.mark.parametrize(("trainer", "choices"), CASES)
def test_micro_batches_are_those_of_trl_s_data_loader(
    trainer: Trainer, choices: Choices, prepared: Prepare, seen_of: Seen
) -> None:
    found = prepared(trainer, richest(trainer))
    plan, said = listed(found, choices)
    rows, per_row = plan.rows, said.worst.rows * said.worst.tokens * said.sequences
    seen = seen_of(found, plan)

    # Up to a thousand documents: TRL packs so many at a time, which leaves a row that is not full behind each.
    assert said.rows == seen.rows
    assert {len(epoch) for epoch in seen.batches} == {math.ceil(seen.rows / rows)}

    largest = max(tokens for epoch in seen.batches for _, tokens in epoch)
    assert largest <= per_row
    assert max(count for epoch in seen.batches for count, _ in epoch) <= said.worst.rows * said.sequences

    # All of an epoch is in one micro-batch where that has more rows than there are.
    drawn = [tokens for _, tokens in seen.full(rows)]
    if drawn:
        mean, doubt = fmean(drawn), stdev(drawn) / math.sqrt(len(drawn))
        typical = said.typical.rows * said.typical.tokens * said.sequences
        # How full packed rows are is known in the mean only, and so not what rounding each up adds.
        rounding = (plan.pad_multiple) / 2 if said.layout is Layout.FLAT else 0
        assert typical == pytest.approx(mean, rel=SHARE, abs=STANDARD_ERRORS * doubt + rounding)
        assert typical <= per_row

        # Launches take longest in small micro-batches, and attention in large ones.
        def seconds(tokens: float) -> float:
            return max(mean, tokens + tokens**2 / mean)

        times = [seconds(tokens) for tokens in drawn]
        planned = sum(each.share * seconds(each.shape.rows * each.shape.tokens * said.sequences) for each in said.sizes)
        doubt = stdev(times) / math.sqrt(len(times))
        # Twice the share, since the time grows with the square.
        assert planned == pytest.approx(fmean(times), rel=2 * SHARE, abs=STANDARD_ERRORS * doubt + 3 * rounding)


@pytest.mark.parametrize(("trainer", "choices"), CASES)
def test_no_document_and_no_token_is_lost_or_counted_twice(
    trainer: Trainer, choices: Choices, prepared: Prepare, seen_of: Seen
) -> None:
    found = prepared(trainer, richest(trainer))
    plan, said = listed(found, choices)
    rows, documents = plan.rows, found.reply.dataset.documents
    seen = seen_of(found, plan)

    limit = length_limit(trainer, found.setting, found.candidate(choices))
    kept = documents.tokens * (limit.coverage if limit is not None else 1.0)
    generated = found.adapter.sizes(seen.built).generated
    if generated is not None:
        # Each of a prompt's completions passes through the model with the prompt.
        kept = (kept * generated.shape[1] + generated.sum()) * rows_yielded(found, plan, seen.built)
    assert seen.tokens == pytest.approx(kept, rel=1e-9)
    assert said.tokens * seen.rows / rows == pytest.approx(seen.tokens, rel=1e-9)

    # Rows that are packed hold documents, or parts of documents; others are one each.
    in_dataset = documents.rows if found.adapter.packs(seen.built.args) else seen.rows
    assert said.micro_batches == plan.micro_batches
    assert said.documents == pytest.approx(in_dataset / seen.rows * rows * said.micro_batches, rel=1e-9)


@pytest.mark.parametrize(("trainer", "choices"), CASES)
def test_a_probe_s_worst_micro_batch_is_the_plan_s(
    trainer: Trainer, choices: Choices, prepared: Prepare, seen_of: Seen
) -> None:
    found = prepared(trainer, richest(trainer))
    plan, said = listed(found, choices)
    known, built = found.adapter, seen_of(found, plan).built
    packed_from = len(found.adapter.cut(found.rows, plan)) if known.packs(built.args) else None
    sizes = known.sizes(built)
    step = step_size(plan, known.drawing(built))
    probed = plan_batches(sizes, step, known.collation(built), WHOLE_STEPS, 0, packed_from)

    assert probed.population == said.rows
    assert probed.mean_documents * said.micro_batches == pytest.approx(said.documents, rel=1e-9)
    assert probed.mean_tokens == pytest.approx(said.tokens, rel=1e-9)
    worst = int(max(probed.collated[list(probed.worst)]))
    planned = said.worst.rows * said.worst.tokens * said.sequences
    assert worst == max(probed.collated)
    # Documents seldom fill every packed row, and a plan does not know which rows they leave unfilled.
    assert worst == planned if packed_from is None else worst <= planned


def test_rows_that_are_sorted_by_length_are_packed_as_planned(small_model_directory: Path, tmp_path: Path) -> None:
    known = trainers()["sft"]
    # In the file's order, no row of 10 tokens would have two documents of the first part.
    rows = [{"input_ids": [5] * tokens} for tokens in (6, 4) for _ in range(1500)]
    found = prepared_rows(known, rows, small_model_directory, tmp_path)
    plan, said = listed(found, {"packing": "bfd", "max_length": 10})
    assert len(found.built(plan, tmp_path / "built").train_dataset) == pytest.approx(said.rows, rel=0.05)


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_rows_that_trl_cuts_at_their_beginning_are_all_kept(
    trainer: str, small_model_directory: Path, tmp_path: Path
) -> None:
    known = trainers()[trainer]
    rows, mode = sample_rows(trainer, richest(known)), {TRUNCATION: KEEP_END}
    found = prepared_rows(known, rows, small_model_directory, tmp_path, reading=mode)
    plan, said = listed(found, {"max_length": 8})
    seen = real(found, replace(plan, args={**plan.args, **mode}), tmp_path / "built")
    assert said.rows == seen.rows == len(rows)
    assert said.tokens * seen.rows / plan.rows == pytest.approx(seen.tokens, rel=1e-9)
    # TRL cuts counted tokens last.
    documents, trained = found.reply.dataset.documents, found.adapter.sizes(seen.built).trainable
    kept = min(documents.coverage(8), trained.sum() / found.adapter.trainable(found.rows).sum())
    assert documents.least_coverage(8) == pytest.approx(kept, rel=1e-9)
    # All rows are as wide: those with the most counted tokens make the worst micro-batch.
    most = sum(sorted(found.adapter.sizes(seen.built).trainable)[-plan.rows :])
    held = said.worst.rows * said.worst.tokens * said.sequences
    assert said.worst.trained * said.worst.filled * held == pytest.approx(most, rel=0.05)


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_a_packed_row_may_hold_nothing_but_a_part_of_an_answer(
    strategy: str, small_model_directory: Path, tmp_path: Path
) -> None:
    given = [row["input_ids"] for row in token_rows(TEXTS)]
    rows = [{"input_ids": ids, "labels": [-100] * (len(ids) // 2) + ids[len(ids) // 2 :]} for ids in given]
    found = prepared_rows(trainers()["sft"], rows, small_model_directory, tmp_path)
    plan, said = listed(found, {"packing": strategy, "max_length": 8, "per_device_train_batch_size": 1})
    packed = found.built(plan, tmp_path / "built").train_dataset["labels"][:]
    most = max(sum(label != -100 for label in labels) for labels in packed)
    assert said.worst.tokens * said.worst.filled * said.worst.trained == pytest.approx(most, rel=0.01)


def test_rows_cut_at_their_beginning_are_dropped_where_trl_finds_nothing_left_for_the_loss(
    small_model_directory: Path, tmp_path: Path
) -> None:
    # The loss counts none, only the first or only the last token of a row.
    counted = ((), (0,), (-1,))
    rows: list[dict[str, object]] = []
    for place, ids in enumerate(row["input_ids"] for row in token_rows(TEXTS)):
        labels = [-100] * len(ids)
        for index in counted[place % len(counted)]:
            labels[index] = ids[index]
        rows.append({"input_ids": ids, "labels": labels})
    mode = {TRUNCATION: KEEP_END}
    found = prepared_rows(trainers()["sft"], rows, small_model_directory, tmp_path, reading=mode)
    plan, said = listed(found, {"max_length": 20})
    seen = real(found, replace(plan, args={**plan.args, **mode}), tmp_path / "built")
    assert len(rows) / 3 < said.rows == seen.rows < 2 / 3 * len(rows)
    assert said.tokens * seen.rows / plan.rows == pytest.approx(seen.tokens, rel=1e-9)
    (remark,) = found.reply.dataset.remarks
    assert "have no token that the loss counts" in remark


@pytest.mark.parametrize(
    ("choices", "drops"),
    [
        ({"per_device_train_batch_size": 3}, True),
        ({"per_device_train_batch_size": 3, "max_length": 16}, True),
        ({"padding_free": "on", "per_device_train_batch_size": 3, "max_length": 16}, True),
        ({"padding_free": "on", "per_device_train_batch_size": 3}, False),
        ({"packing": "bfd", "per_device_train_batch_size": 2, "max_length": 96}, False),
        ({"packing": "wrapped", "per_device_train_batch_size": 2, "max_length": 29}, False),
    ],
    ids=str,
)
def test_rows_of_which_the_loss_counts_nothing_are_kept_where_trl_keeps_them(
    choices: Choices, drops: bool, small_model_directory: Path, tmp_path: Path
) -> None:
    ids = [row["input_ids"] for row in token_rows(TEXTS)]
    # Among them is the longest.
    masked = {max(range(len(ids)), key=lambda place: len(ids[place])), 3, 8}
    rows = [
        {"input_ids": row, "labels": [-100] * len(row) if place in masked else row} for place, row in enumerate(ids)
    ]
    found = prepared_rows(trainers()["sft"], rows, small_model_directory, tmp_path)
    plan, said = listed(found, choices)
    seen = real(found, plan, tmp_path / "built")
    assert said.rows == seen.rows
    assert said.tokens * seen.rows / plan.rows == pytest.approx(seen.tokens, rel=1e-9)
    if not plan.args.get("packing"):
        assert seen.rows == len(rows) - len(masked) * drops
    (remark,) = found.reply.dataset.remarks
    counted = f"{len(masked)} rows of rows.jsonl have no token that the loss counts: TRL drops such rows, unless"
    assert remark.startswith(counted)


@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param(item, id=item.name)
        for item in trainers().values()
        # Completions are added to documents.
        if not (item.generates or refused_by_trl(item, ONE_ROW))
    ],
)
def test_a_micro_batch_of_one_row_is_as_wide_as_its_document(
    trainer: Trainer, prepared: Prepare, seen_of: Seen
) -> None:
    found = prepared(trainer, richest(trainer))
    plan, said = listed(found, {**ONE_ROW, "max_length": found.reply.dataset.documents.longest})
    widths = Counter(tokens // said.sequences for _, tokens in seen_of(found, plan).batches[0])
    assert widths == found.reply.dataset.documents.widths
