"""The longest prompts are dropped once, before anything else looks at them, and the bundle has the others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset, load_from_disk

from autotune.app.notes import notes_on_prompts
from autotune.core.protocol import PrepareReply, PrepareRequest
from autotune.core.setting import Setting
from autotune.core.workload import DatasetSource, DroppedRows, ModelSource, Rollouts, Workload
from autotune.emit.rows import write_rows
from autotune.errors import InputError
from autotune.space import Wishes
from autotune.step.job import JobContext
from autotune.step.jobs.prepare import prepare
from autotune.trainers import find_trainer
from autotune.trainers.problem import TrainerProblem
from tests.settings import CPU, problem, separates
from tests.small import small_tokenizer
from tests.small import write_rows as write_file

WORDS = [3, 40, 4, 5, 60, 6, 7, 8, 9, 40]
"""Words of each prompt: one in ten is the longest, and two share the next length."""


def rows_of(words: list[int]) -> list[dict[str, Any]]:
    return [
        {"prompt": " ".join(["memory"] * count), "solution": place, "source": {"name": f"book {place}"}}
        for place, count in enumerate(words)
    ]


def tokens_of(words: int) -> int:
    """Return the tokens of a prompt, by the tokenizer alone."""
    return len(small_tokenizer()(" ".join(["memory"] * words))["input_ids"])


def prepared(
    folder: Path, model: Path, share: float, trainer: str = "grpo", evaluated: list[int] | None = None
) -> tuple[PrepareReply, Workload]:
    """Prepare the rows in this process."""
    files = [
        write_file(folder / f"{name}.jsonl", rows_of(words))
        for name, words in (("a", WORDS), ("b", evaluated or [1, 2]))
    ]
    sources = [DatasetSource(file.name, "json", str(file)) for file in files]
    beside = sources[1] if evaluated else None
    source, rollouts = ModelSource(str(model)), Rollouts(prompt_coverage=share)
    request = PrepareRequest(
        source, sources[0], trainer, str(folder / "tokenized"), beside, str(folder / "evaluation"), rollouts
    )
    reply = prepare(request, JobContext(folder, time.monotonic()))
    checks = {"sdpa": separates("sdpa")}
    return reply, Workload(
        trainer, source, sources[0], reply.model, reply.dataset, checks, beside, reply.evaluation, rollouts
    )


def problem_on(workload: Workload) -> TrainerProblem:
    return problem(Setting(workload, CPU, 8, 1.0), Wishes({}), workload.trainer)


@pytest.mark.parametrize(
    ("share", "kept", "dropped"),
    [
        (1.0, range(10), []),
        (0.95, range(10), []),
        (0.9, [0, 1, 2, 3, 5, 6, 7, 8, 9], [5]),
        # Two prompts are equally long: both are kept where one is needed, and dropped where none is.
        (0.8, [0, 1, 2, 3, 5, 6, 7, 8, 9], [5]),
        (0.7, [0, 2, 3, 5, 6, 7, 8], [5, 2, 10]),
    ],
)
def test_the_longest_prompts_are_dropped_and_told_by_row(
    share: float, kept: list[int], dropped: list[int], small_model_directory: Path, tmp_path: Path
) -> None:
    reply, _ = prepared(tmp_path, small_model_directory, share)
    rows = load_from_disk(reply.dataset.tokenized_directory)
    assert rows["solution"] == list(kept)
    assert reply.dataset.lengths.rows == len(rows)
    longest = max(WORDS[place] for place in kept)
    expected = DroppedRows(
        len(dropped), tokens_of(longest), tuple((number, tokens_of(WORDS[number - 1])) for number in dropped)
    )
    assert reply.dataset.dropped == (expected if dropped else None)


@pytest.mark.parametrize("trainer", ["grpo", "rloo", "online_dpo"])
def test_the_worst_micro_batch_is_that_of_the_prompts_that_are_kept(
    trainer: str, small_model_directory: Path, tmp_path: Path
) -> None:
    known = find_trainer(trainer)
    widths, fingerprints = [], set()
    for share in (1.0, 0.7):
        (tmp_path / str(share)).mkdir()
        _, workload = prepared(tmp_path / str(share), small_model_directory, share, trainer)
        of = problem_on(workload)
        plan = known.plan(of.baseline, of.setting)
        (generation,) = (
            item for item in known.geometry(plan, workload.dataset.documents).apart if item.phase == "generation"
        )
        widths.append(generation.worst.tokens - generation.worst.generated)
        fingerprints.add(workload.dataset.fingerprint)
    assert widths == [tokens_of(60), tokens_of(9)]
    assert len(fingerprints) == 2


@pytest.mark.parametrize("evaluated", [None, [4, 50, *([5] * 8)]], ids=["trained", "evaluated"])
def test_the_bundle_has_the_rows_that_are_kept_as_the_user_wrote_them(
    evaluated: list[int] | None, small_model_directory: Path, tmp_path: Path
) -> None:
    reply, workload = prepared(tmp_path, small_model_directory, 0.9, evaluated=evaluated)
    of = problem_on(workload)
    plan = of.trainer.plan(of.baseline, of.setting)
    rows = write_rows(workload, plan, tmp_path / "bundle")
    assert not rows.cut
    kept = [row for row in rows_of(WORDS) if row["solution"] != 4]
    assert load_dataset(**rows.entry(rows.split)).to_list() == kept
    if evaluated is None:
        assert rows.place == str(tmp_path / "bundle" / "rows.parquet")
        return
    assert rows.evaluated is not None
    assert load_dataset(**rows.entry(rows.evaluated)).to_list() == [
        row for row in rows_of(evaluated) if row["solution"] != 1
    ]
    assert [note.partition(":")[0] for note in notes_on_prompts(workload)] == [
        f"--prompt-coverage 0.9 drops 1 of the 10 prompts of {name}, over {tokens_of(words)} tokens"
        for name, words in (("a.jsonl", 40), ("b.jsonl", 5))
    ]
    assert reply.dataset.dropped is not None


def test_a_note_says_that_nothing_was_dropped(small_model_directory: Path, tmp_path: Path) -> None:
    _, workload = prepared(tmp_path, small_model_directory, 0.99)
    (note,) = notes_on_prompts(workload)
    assert note.startswith("--prompt-coverage 0.99 drops none of the 10 prompts of a.jsonl")


def test_two_prompts_at_least_are_left(small_model_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--prompt-coverage 0.01 keeps 1 of the 10 prompts of a\.jsonl"):
        prepared(tmp_path, small_model_directory, 0.01)
