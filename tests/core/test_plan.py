"""A training plan reads the allocator's settings as PyTorch does."""

from __future__ import annotations

import pytest

from autotune.core.plan import Launch, TrainingPlan, unsimulated_settings


@pytest.mark.parametrize(
    ("settings", "grow"),
    [
        ("expandable_segments:True", True),
        ("max_split_size_mb:128, expandable_segments:True", True),
        (" expandable_segments : True ", True),
        ("roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:True", True),
        ("expandable_segments:True,expandable_segments:False", False),
        ("expandable_segments:False", False),
        ("", False),
    ],
)
def test_segments_grow_where_the_last_of_the_settings_says_so_whatever_the_spaces(settings: str, grow: bool) -> None:
    plan = TrainingPlan("sft", env={"PYTORCH_ALLOC_CONF": settings})
    assert plan.expandable_segments is grow


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("expandable_segments:True,backend:native,pinned_use_background_threads:True", ()),
        (
            "max_split_size_mb:128, garbage_collection_threshold:0.8",
            ("max_split_size_mb:128", "garbage_collection_threshold:0.8"),
        ),
        (
            "roundup_power2_divisions:[256:1,>:4], backend:cudaMallocAsync",
            ("roundup_power2_divisions:[256:1,>:4]", "backend:cudaMallocAsync"),
        ),
    ],
)
def test_settings_that_change_device_memory_and_are_not_simulated_are_named(
    settings: str, named: tuple[str, ...]
) -> None:
    assert unsimulated_settings(settings) == named


@pytest.mark.parametrize(
    ("processes", "rows", "micro_batches"),
    [(1, 3, 1), (2, 8, 1)],
)
def test_a_step_has_at_most_an_epoch_which_accelerate_fills_up_for_several_processes(
    processes: int, rows: int, micro_batches: int
) -> None:
    args = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
    plan = TrainingPlan("sft", args, launch=Launch(processes))
    found = plan.within_epoch(3)
    assert (found.rows, found.micro_batches) == (rows, micro_batches)
    assert plan.within_epoch(1000) is plan
