"""The generation batches of a plan: their padding, and the number of completions that a trace generates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from autotune.core.plan import Completions, Launch, TrainingPlan
from autotune.core.rows.batch_geometry import Layout
from autotune.core.rows.documents import Documents
from autotune.core.rows.lengths import LengthDistribution
from autotune.trainers import find_trainer
from autotune.trainers.groups import OLD_PASS
from autotune.trainers.prompts import GENERATION, REFERENCE_PASS, SCORING
from tests.settings import plan_with, setting, workload


@pytest.mark.parametrize(
    ("name", "lengths", "batch", "padded"),
    [
        # A generation batch of 8 completions is one prompt, and of 16 two.
        ("grpo", {200: 4, 4200: 1}, 8, False),
        ("grpo", {200: 4, 4200: 1}, 16, True),
        ("grpo", {4200: 4}, 16, False),
        ("rloo", {200: 4, 4200: 1}, 8, True),
        ("distillation", {200: 4, 4200: 1}, 8, True),
        ("online_dpo", {200: 4, 4200: 1}, 8, True),
    ],
)
def test_prompts_that_are_completed_together_are_padded_where_they_differ(
    name: str, lengths: Mapping[int, int], batch: int, *, padded: bool
) -> None:
    trainer = find_trainer(name)
    here = setting(of=workload(trainer=name, lengths=lengths), global_batch_size=batch)
    plan = plan_with(here, {}, name)
    found = trainer.geometry(plan, here.workload.dataset.documents)
    (generation, *_) = found.phases
    prompts = [prompt for prompt, _ in trainer.traced_rows(found.layout, generation.worst, 1.0)]
    assert (len(prompts), max(prompts)) == (generation.worst.rows, 4200)
    assert (min(prompts) < 4200) is padded


@pytest.mark.parametrize(
    ("rows", "micro_batches", "copies"),
    [(2, 1, 2), (2, 2, 2), (2, 4, 2), (1, 2, 2), (1, 3, 3), (3, 1, 3), (3, 2, 3), (3, 3, 9), (1, 5, 5), (5, 3, 5)],
)
@pytest.mark.parametrize("name", ["grpo", "distillation"])
def test_a_trace_generates_as_many_completions_as_training_does_at_once(
    name: str, rows: int, micro_batches: int, copies: int
) -> None:
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": micro_batches}
    args = {**sizes, "num_generations": copies, "max_completion_length": 8}
    plan = TrainingPlan(name, args, completions=Completions(8, 8))
    trainer = find_trainer(name)
    found = trainer.geometry(plan, Documents.of_lengths(LengthDistribution({100: 8})))
    (generation, *_) = found.phases
    traced = trainer.traced_plan(plan, found.layout, generation.worst)
    assert traced.rows * traced.steps_per_generation == rows * micro_batches
    # TRL refuses generation batches without whole groups.
    assert name == "distillation" or (rows * micro_batches) % traced.count("num_generations") == 0
    # Gradients exist from a step's second micro-batch on.
    assert (traced.micro_batches > 1) is (micro_batches > 1)


def test_a_process_that_generates_a_single_completion_is_traced_with_one() -> None:
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 1}
    args = {**sizes, "num_generations": 2, "max_completion_length": 8}
    plan = TrainingPlan("grpo", args, completions=Completions(8, 8), launch=Launch(2))
    trainer = find_trainer("grpo")
    found = trainer.geometry(plan, Documents.of_lengths(LengthDistribution({100: 4, 50: 4})))
    (generation, *_) = found.phases
    traced = trainer.traced_plan(plan, found.layout, generation.worst)
    assert (found.layout, traced.rows * traced.steps_per_generation) == (Layout.EQUAL, 1)
    assert (traced.count("num_generations"), traced.micro_batches > 1) == (2, True)


@pytest.mark.parametrize(
    ("lengths", "rows", "multiple", "layout"),
    [
        # A generation batch of 8 completions is one prompt, and of 16 two.
        ({100: 4, 50: 4}, 1, 1, Layout.COMPLETED),
        ({100: 4, 50: 4}, 2, 1, Layout.PADDED),
        ({100: 8}, 2, 1, Layout.COMPLETED),
        ({100: 8}, 1, 64, Layout.PADDED),
        ({128: 8}, 1, 64, Layout.COMPLETED),
    ],
)
def test_completions_differ_in_length_even_where_their_prompts_do_not(
    lengths: Mapping[int, int], rows: int, multiple: int, layout: Layout
) -> None:
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 8, "pad_to_multiple_of": multiple}
    args = {**sizes, "num_generations": 8, "max_completion_length": 64}
    plan = TrainingPlan("grpo", args, completions=Completions(8, 8))
    trainer = find_trainer("grpo")
    found = trainer.geometry(plan, Documents.of_lengths(LengthDistribution(dict(lengths))))
    assert found.layout is layout
    made = trainer.traced_rows(found.layout, found.worst, 1.0)
    assert {completion for _, completion in made} == {63, 64}
    assert (len({prompt for prompt, _ in made}) > 1) is (layout is Layout.PADDED)


def test_rows_of_one_prompt_may_be_compiled_without_padding_too() -> None:
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 8}
    model = {"attn_implementation": "flex_attention"}
    plan = TrainingPlan("grpo", {**sizes, "max_completion_length": 8}, model, completions=Completions(8, 8))
    documents, trainer = Documents.of_lengths(LengthDistribution({100: 1, 50: 4})), find_trainer("grpo")
    found = trainer.compiled_again(plan, trainer.geometry(plan, documents).layout, documents)
    assert (found.narrower, found.unpadded) == (0.5, 1.0)


def test_a_row_alone_needs_no_padding_though_the_other_prompts_of_its_generation_are_shorter() -> None:
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, "num_generations": 8, "beta": 0.1}
    plan = TrainingPlan("grpo", {**sizes, "max_completion_length": 8}, completions=Completions(8, 8))
    documents, trainer = Documents.of_lengths(LengthDistribution({100: 1, 90: 2, 50: 4})), find_trainer("grpo")
    padded = trainer.geometry(plan, documents)
    found = trainer.without_padding(plan, documents, padded)
    assert found is not None
    assert (found.layout, found.worst.tokens, found.micro_batches) == (Layout.EQUAL, 108, 16)
    widths = {phase.phase: phase.worst.tokens for phase in found.phases}
    assert widths == {GENERATION: 98, SCORING: 98, OLD_PASS: 108, REFERENCE_PASS: 108}
    # Without two equally long prompts, all generations are padded.
    unequal = Documents.of_lengths(LengthDistribution({100: 1, 90: 1}))
    padded = trainer.geometry(plan, unequal)
    found = trainer.without_padding(plan, unequal, padded)
    assert found is not None
    (generation, *_) = found.phases
    assert (generation.layout, generation.worst.tokens) == (Layout.PADDED, 108)


@pytest.mark.parametrize(
    ("name", "choices", "longest"),
    [("grpo", {}, 300), ("grpo", {"pad_to_multiple_of": 64}, 128), ("online_dpo", {"max_length": 200}, 100)],
)
def test_the_longest_prompts_that_may_meet_without_padding_are_as_many_as_are_completed_together(
    name: str, choices: dict[str, int], longest: int
) -> None:
    documents = Documents.of_rows(
        [find_trainer(name).document((tokens,)) for tokens in (*[100] * 5, *[128] * 2, *[300] * 2, 500)], ordered=False
    )
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "num_generations": 2, **choices}
    most = {"max_completion_length": 64, "max_new_tokens": 64}
    plan = TrainingPlan(name, {**sizes, **most}, completions=Completions(32, 32))
    trainer = find_trainer(name)
    padded = trainer.geometry(plan, documents)
    found = trainer.without_padding(plan, documents, padded)
    assert found is not None
    assert (padded.layout, found.layout) == (Layout.PADDED, Layout.EQUAL)
    assert {phase.worst.tokens for phase in found.phases if phase.phase == GENERATION} == {longest + 64}
    alone = trainer.without_padding(
        replace(plan, args={**plan.args, "per_device_train_batch_size": 32}), documents, padded
    )
    assert alone is None
