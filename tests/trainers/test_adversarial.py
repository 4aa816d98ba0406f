"""On adversarial datasets, no micro-batch that TRL can form needs more memory than the predicted worst one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.core.candidate import Choice
from autotune.core.rows.blocks import block_rows
from autotune.step.run.worst import worst_order
from autotune.trainers import find_trainer
from autotune.virtual import phase
from tests.small import small_tokenizer, write_small_model
from tests.trainers.prepared import Prepared, prepared_rows
from tests.trainers.samples import Rows
from tests.virtual.reference import run_on_cpu

pytestmark = pytest.mark.usefixtures("small_vocabulary_tiles")

Choices = Mapping[str, Choice]
Words = tuple[int, int, int]
"""Words of a prompt, of its answer, and of the rejected answer of a pair."""

WITHOUT_SYSTEM = (
    "{% for message in messages if message.role != 'system' %}<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Misleading:
    """A small dataset: the words of each row, and of a system message that the chat template drops, if any."""

    rows: Sequence[Words]
    dropped: Sequence[int] = ()


DATASETS = {
    "a row a hundred times longer": Misleading([(1, 3, 2)] * 3 + [(1, 400, 2)] + [(1, 3, 2)] * 4),
    "the longest row last": Misleading([(2, n, 9 - n) for n in (3, 5, 8, 2, 6, 4, 7)] + [(2, 40, 3)]),
    "all rows equal but a shorter one": Misleading([(2, 12, 12)] * 5 + [(2, 5, 12)] + [(2, 12, 12)] * 2),
    "all rows equal but a longer one": Misleading([(2, 12, 12)] * 6 + [(2, 12, 30)] + [(2, 12, 12)]),
    "answers of one token": Misleading([(1, 0, 0)] * 8),
    "duplicates": Misleading([(2, 9, 4), (3, 20, 11)] * 4),
    "empty completions": Misleading([(30, 0, 0), (2, 9, 5)] * 2 + [(30, 0, 4), (2, 20, 0), (1, 0, 1), (5, 5, 5)]),
    "long prompts that leave little of long answers": Misleading(
        [(36, 300, 200)] * 2 + [(2, 60, 70)] * 2 + [(30, 8, 300), (1, 3, 2), (20, 25, 6), (2, 37, 1)]
    ),
    "a chat template that drops system messages": Misleading(
        [(2, 9, 7), (3, 20, 4), (1, 2, 30), (4, 6, 6)] * 2, dropped=[50, 0, 0, 2, 90, 0, 0, 1]
    ),
}
BY_DAY = "empty completions"
LAYOUTS: dict[str, Sequence[Choices]] = {
    "sft": (
        {"per_device_train_batch_size": 3},
        {"per_device_train_batch_size": 2, "max_length": 32, "pad_to_multiple_of": 8},
        {"padding_free": "on", "per_device_train_batch_size": 3},
        *(
            {"packing": how, "per_device_train_batch_size": 2, "max_length": 32}
            for how in ("bfd", "bfd_split", "wrapped")
        ),
    ),
    **{
        name: (
            {"per_device_train_batch_size": 3},
            {"per_device_train_batch_size": 2, "max_length": 40},
            {"per_device_train_batch_size": 2, "pad_to_multiple_of": 8},
        )
        for name in ("dpo", "kto", "reward")
    },
}
# By day, one dataset meets all layouts of a trainer, and each of the others one.
CASES = [
    pytest.param(
        trainer,
        dataset,
        choices,
        id=f"{trainer}-{dataset}-{'-'.join(map(str, choices.values()))}",
        marks=() if dataset == BY_DAY or place % len(layouts) == number else pytest.mark.nightly,
    )
    for trainer, layouts in LAYOUTS.items()
    for place, dataset in enumerate(DATASETS)
    for number, choices in enumerate(layouts)
]

# Measuring takes seconds: by day, one dataset of each trainer.
MEASURED = [
    case
    if (case.values[1], case.values[2]) == (BY_DAY, LAYOUTS[str(case.values[0])][1])
    else pytest.param(*case.values, id=case.id, marks=pytest.mark.nightly)
    for case in CASES
]


def rows_for(trainer: str, made: Misleading) -> Rows:
    """Return a dataset in a trainer's format; of two answers, unpaired preferences have the first."""
    found: Rows = []
    for place, (prompt, answer, other) in enumerate(made.rows):
        names = ("chosen", "rejected") if trainer in ("dpo", "reward") else ("completion",)
        texts = zip(names, (answer, other), strict=False)
        row: dict[str, Any] = {"prompt": _words(prompt), **{name: _words(words) for name, words in texts}}
        if made.dropped:
            asked = {"role": "user", "content": row.pop("prompt")}
            row = {name: [{"role": "assistant", "content": text}] for name, text in row.items()}
            row["prompt"] = [{"role": "system", "content": _words(made.dropped[place])}, asked]
        if trainer == "kto":
            row["label"] = place % 3 != 0
        found.append(row)
    return found


def _words(count: int) -> str:
    return " memory" * count


@pytest.fixture(scope="module")
def prepared_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that returns a misleading dataset as a trainer's real job prepares it."""
    model = write_small_model(tmp_path_factory.mktemp("model"))
    dropping = small_tokenizer()
    dropping.chat_template = WITHOUT_SYSTEM
    dropping.save_pretrained(model)

    @cache
    def of(trainer: str, dataset: str) -> Prepared:
        folder = tmp_path_factory.mktemp("rows")
        return prepared_rows(find_trainer(trainer), rows_for(trainer, DATASETS[dataset]), model, folder)

    return of


def possible(population: int, rows: int, *, blocks: bool) -> Iterator[tuple[int, ...]]:
    """Yield every micro-batch that an epoch may have, as indices of rows; the last of an epoch may be smaller."""
    if blocks:
        yield from (tuple(dict.fromkeys(block)) for block in block_rows(population, rows).tolist())
        return
    for size in {min(rows, population), population % rows} - {0}:
        yield from combinations(range(population), size)


@dataclass(frozen=True)
class Formed:
    """The micro-batches of a plan, as indices of rows: all that there can be, one of each sizes, and the worst."""

    found: Prepared
    plan: Any
    built: Any
    every: Sequence[Sequence[int]]
    worst: Sequence[Sequence[int]]

    @cached_property
    def loader(self) -> Any:
        """TRL's data loader."""
        return self.built.get_train_dataloader()

    def collated(self, chosen: Sequence[int]) -> Any:
        """Return a micro-batch as TRL's data loader collates it."""
        return self.loader.collate_fn([self.loader.dataset[int(place)] for place in chosen])

    def tokens(self, batches: Sequence[Sequence[int]]) -> list[int]:
        """Return the tokens, padding included, of micro-batches."""
        return [self.found.adapter.rows_and_tokens(self.built, self.collated(chosen))[1] for chosen in batches]

    def most_trainable(self, batches: Sequence[Sequence[int]], tokens: int) -> int:
        """Return the most trainable tokens of the micro-batches with this number of tokens, padding included."""
        counted = self.found.adapter.sizes(self.built).trainable
        sizes = zip(batches, self.tokens(batches), strict=True)
        return max(int(counted[list(chosen)].sum()) for chosen, held in sizes if held == tokens)


def formed(found: Prepared, choices: Choices, folder: Path) -> Formed:
    """Return the micro-batches of choices."""
    plan = found.plan(choices)
    built, known, rows = found.built(plan, folder), found.adapter, plan.rows
    sizes, collation = known.sizes(built), known.collation(built)
    of_row = [
        (*own, int(trained), int(second_tokens))
        for own, trained, second_tokens in zip(
            sizes.lengths.tolist(),
            sizes.trainable,
            sizes.trainable if sizes.second_tokens is None else sizes.second_tokens,
            strict=True,
        )
    ]
    every = possible(len(of_row), rows, blocks=collation.blocks)
    # Memory depends on sizes alone.
    distinct = {tuple(sorted(of_row[place] for place in chosen)): chosen for chosen in every}
    return Formed(
        found, plan, built, list(distinct.values()), [list(one) for one in worst_order(sizes, rows, collation)]
    )


@pytest.mark.parametrize(("trainer", "dataset", "choices"), CASES)
def test_no_micro_batch_of_all_that_there_can_be_is_larger_than_the_worst(
    trainer: str, dataset: str, choices: Choices, prepared_of: Any, tmp_path: Path
) -> None:
    found = prepared_of(trainer, dataset)
    made = formed(found, choices, tmp_path)
    planned_sizes, largest = found.geometry(made.plan), max(made.tokens(made.every))
    planned = max(shape.rows * shape.tokens for shape in planned_sizes.shapes) * planned_sizes.sequences
    # Where too few rows are left for a micro-batch, a probe and a plan repeat them.
    repeats = planned_sizes.rows % made.plan.rows if found.trainer.ordered else planned_sizes.rows < made.plan.rows
    run = max(made.tokens(made.worst))
    assert largest <= run if repeats else largest == run
    if not (repeats or found.adapter.packs(made.built.args)):
        # On a GPU, TRL's fused head computes logits of trainable tokens only.
        assert made.most_trainable(made.every, largest) == made.most_trainable(made.worst, largest)
    # A plan does not know which packed rows are not full.
    assert run <= planned if found.adapter.packs(made.built.args) else run == planned


@pytest.mark.parametrize(("trainer", "dataset", "choices"), MEASURED)
def test_no_micro_batch_of_all_that_there_can_be_needs_more_memory_than_the_worst(
    trainer: str, dataset: str, choices: Choices, prepared_of: Any, tmp_path: Path
) -> None:
    made = formed(prepared_of(trainer, dataset), choices, tmp_path)

    def run(_device: Any) -> None:
        made.built.current_gradient_accumulation_steps = 1
        # First calls fill caches.
        for name, batches in (("first", made.worst), ("worst", made.worst), ("any", made.every)):
            for place, chosen in enumerate(batches):
                batch = made.collated(chosen)
                with phase(f"{name} {place}"):
                    made.built.training_step(made.built.model, batch, None)
                made.built.model.zero_grad(set_to_none=True)

    seen = {
        name: shown.peak_bytes - shown.start_bytes for name, shown in run_on_cpu(run, phases=("worst", "any")).items()
    }
    worst, others = ([size for name, size in seen.items() if name.startswith(kind)] for kind in ("worst", "any"))
    assert len(others) == len(made.every)
    assert max(others) <= max(worst)


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize(
    ("trainer", "mask"), [("sft", "labels"), ("dpo", "completion_mask"), ("kto", "completion_mask")]
)
def test_the_tokens_that_the_loss_counts_are_those_that_truncation_leaves(
    trainer: str, mask: str, dataset: str, prepared_of: Any, tmp_path: Path
) -> None:
    found = prepared_of(trainer, dataset)
    built = found.built(found.plan({"per_device_train_batch_size": 2, "max_length": 40}), tmp_path)
    loader = built.get_train_dataloader()
    counted = []
    for row in loader.dataset:
        values = loader.collate_fn([row])[mask].numpy()
        counted.append(int(((values != -100) & (values != 0)).sum()))
    assert found.adapter.sizes(built).trainable.tolist() == np.array(counted).tolist()
