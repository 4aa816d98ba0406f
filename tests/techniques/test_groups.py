"""The rules of groups of processes: split rows, replicas, and refusals with the rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.app.arguments import SearchArguments
from autotune.app.catalogue import catalogue
from autotune.app.options import checked_options
from autotune.app.problem import global_batch_of
from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Base, Setting
from autotune.errors import InputError
from autotune.techniques import find
from autotune.techniques.base import impossible, refused_or_ignored
from autotune.trainers import find_trainer, trainers
from tests.emit.test_launch import HERE, LONG, SIXTEEN
from tests.settings import CPU, EIGHT, machine_with, problem, setting

SFT = find_trainer("sft")
SPLIT: dict[str, Choice] = {"sharding": "fsdp2", "context_parallel": 4, "pad_to_multiple_of": 64}
LONG_ON_EIGHT = setting(machine=EIGHT, global_batch_size=16, of=LONG)
ASKED = replace(LONG_ON_EIGHT, ranks_per_row=4)


def candidate(here: Setting, **choices: Choice) -> Candidate:
    start = SFT.defaults(here)
    return SFT.normal(start.but(max_length=9000, **choices), here)


def why(here: Setting, **choices: Choice) -> str:
    """Return why a candidate is illegal, empty if it is legal."""
    return SFT.illegal(candidate(here, **choices), here) or ""


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({}, ""),
        ({"sharding": "zero3"}, "context_parallel=4 needs sharding=fsdp2"),
        ({"sharding": "ddp"}, "context_parallel=4 needs sharding=fsdp2"),
        ({"attention": "eager"}, "context_parallel=4 needs attention=sdpa"),
        ({"packing": "wrapped"}, "drops the mask that keeps packed documents apart"),
        ({"padding_free": "on", "per_device_train_batch_size": 2}, "drops the mask that keeps documents apart"),
        ({"pad_to_multiple_of": "none"}, "rows whose length is not a multiple of 8"),
        ({"pad_to_multiple_of": 12}, "rows whose length is not a multiple of 8"),
        ({"pad_to_multiple_of": 8}, ""),
        ({"context_parallel": 8, "pad_to_multiple_of": 16}, ""),
    ],
)
def test_rows_are_split_where_nothing_else_is_trained_by_it(other: dict[str, Choice], reason: str) -> None:
    choices: dict[str, Choice] = {"per_device_train_batch_size": 1, **SPLIT, **other}
    said = why(ASKED, **choices)
    assert reason in said
    assert bool(said) is bool(reason)
    # By default, a search uses whole rows there.
    searched = candidate(LONG_ON_EIGHT, **choices)["context_parallel"]
    assert searched == (1 if reason else choices["context_parallel"])


@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "reward"])
def test_activations_are_not_offloaded_where_the_weight_of_a_fused_head_is_shared_out(name: str) -> None:
    trainer = find_trainer(name)
    here = replace(HERE, workload=replace(HERE.workload, trainer=name))
    start = trainer.defaults(here)
    start = start.but(activation_offloading="on", per_device_train_batch_size=2)

    technique = find("activation_offloading", trainer.techniques)
    refused = technique.conflict("on", start.but(sharding="zero3"), here)
    # A reward model has a head of its own, of a single score.
    assert refused is None if name == "reward" else "TRL's fused head fails" in str(refused)
    for sharding in ("ddp", "zero1", "zero2", "fsdp2"):
        assert technique.conflict("on", start.but(sharding=sharding), here) is None


GROUPED = replace(LONG, model=replace(LONG.model, grouped_heads=True))


@pytest.mark.parametrize(
    ("precision", "capability", "grouped", "reason"),
    [
        ("float32", (9, 0), True, "has none with precision=float32"),
        ("float32", None, True, "has none with precision=float32"),
        ("float32", (9, 0), False, ""),
        ("float32+bf16", (9, 0), True, ""),
        ("bfloat16", (8, 0), True, ""),
        ("float32+fp16", (7, 5), True, "has none with compute capability 7.5"),
        ("float32+fp16", (7, 5), False, ""),
    ],
)
def test_rows_are_split_where_attention_has_a_kernel_that_can_be(
    precision: str, capability: tuple[int, int] | None, grouped: bool, reason: str
) -> None:
    """``tests/step/test_trace_ranks.py`` holds this against traces."""
    machine = machine_with(EIGHT, compute_capability=capability)
    of = GROUPED if grouped else LONG
    choices = {**SPLIT, "precision": precision}
    split = find("context_parallel", SFT.techniques)
    here = replace(ASKED, machine=machine, workload=of)
    said = split.conflict(4, candidate(here, **choices), here) or ""
    assert reason in said
    assert bool(said) is bool(reason)
    searched = candidate(replace(here, ranks_per_row=1), **choices)["context_parallel"]
    assert searched == (1 if reason else 4)


@pytest.mark.parametrize(
    ("replicas", "shared", "reason"),
    [
        (2, 1, ""), (4, 1, ""), (2, 2, ""),
        (2, 4, "leaves 1 of 8 processes to shard, and accelerate needs a whole number above 1"),
        (4, 4, "leaves 0.5 of 8 processes"),
        (3, 1, "8 processes cannot be divided into 3 equal groups"),
        (8, 1, "each of the 8 groups would be one process"),
    ],
)  # fmt: skip
def test_replicas_have_processes_to_shard_among(replicas: int, shared: int, reason: str) -> None:
    choices = {**SPLIT, "context_parallel": shared, "dp_replicate_size": replicas}
    said = why(LONG_ON_EIGHT, per_device_train_batch_size=1, **choices)
    assert reason in said
    assert bool(said) is bool(reason)


def test_replicas_are_of_fsdp2_alone() -> None:
    assert candidate(LONG_ON_EIGHT, sharding="zero3", dp_replicate_size=2)["dp_replicate_size"] == 1


def test_a_step_s_documents_are_shared_out_among_those_that_have_rows_of_their_own() -> None:
    alone = candidate(LONG_ON_EIGHT, sharding="fsdp2", per_device_train_batch_size=1)
    split = candidate(LONG_ON_EIGHT, **SPLIT, per_device_train_batch_size=1)
    plans = [SFT.plan(item, LONG_ON_EIGHT) for item in (alone, split)]
    assert [plan.args["gradient_accumulation_steps"] for plan in plans] == [2, 8]
    assert [plan.parallelism for plan in plans] == [{}, {"cp_size": 4, "dp_shard_size": 2}]
    few = replace(LONG_ON_EIGHT, global_batch_size=2, ranks_per_row=4)
    assert not why(few, **SPLIT, per_device_train_batch_size=1)
    said = why(few, **{**SPLIT, "context_parallel": 2}, per_device_train_batch_size=1)
    assert said == "a global batch of 2 documents is not a multiple of 4 processes"


def test_a_global_batch_below_the_processes_can_be_asked_for_where_rows_are_split() -> None:
    fixed = checked_options(SearchArguments(trainer="sft", global_batch_size=2, fix={"context_parallel": "4"}))
    assert global_batch_of(fixed, EIGHT) == 2
    assert global_batch_of(replace(fixed, global_batch_size=None), EIGHT) == 8 * 2
    with pytest.raises(InputError, match=r"3 documents cannot be reached with 8 processes, 4 to a row\."):
        global_batch_of(replace(fixed, global_batch_size=3), EIGHT)
    with pytest.raises(InputError, match=r"2 documents cannot be reached with 8 processes\."):
        global_batch_of(checked_options(SearchArguments(trainer="sft", global_batch_size=2)), EIGHT)


def test_what_is_searched_depends_on_the_rows_and_the_processes() -> None:
    short = setting(machine=EIGHT, global_batch_size=64)
    knobs = ("context_parallel", "dp_replicate_size")
    assert [problem(short).space.choices[knob] for knob in knobs] == [(1,), (1,)]
    assert [problem(LONG_ON_EIGHT).space.choices[knob] for knob in knobs] == [(1, 2, 4, 8), (1,)]
    assert [problem(HERE).space.choices[knob] for knob in knobs] == [(1, 2, 4, 8), (1, 2, 4)]
    twelve = machine_with(SIXTEEN, processes=12)
    found = problem(replace(HERE, machine=twelve, global_batch_size=24)).space
    assert found.choices["context_parallel"] == (1, 2, 4)
    assert "12 processes cannot be divided into groups of 8" in {
        item.reason.partition(" (")[0] for item in found.left_out
    }


def test_rows_are_not_split_on_a_cpu_or_by_trainers_that_would_train_otherwise() -> None:
    technique = find("context_parallel", SFT.techniques)
    assert "kernel of attention for CPUs" in str(technique.unavailable(2, CPU))
    assert technique.unavailable(1, CPU) is None
    refusing = {name for name in trainers() if refused_or_ignored(technique, 2, name)}
    assert refusing == trainers().keys() - {"sft"}
    # The trainer's own reason comes first: another machine would not help.
    here = setting(machine=CPU, of=replace(LONG, trainer="dpo"))
    (listed,) = (row for row in catalogue(trainer="dpo", device="cpu") if row.knob == technique.name)
    assert listed.options[1].reason == impossible(technique, 2, here) == refused_or_ignored(technique, 2, "dpo")


def test_rows_to_evaluate_on_are_not_packed_where_rows_are_split() -> None:
    here = replace(ASKED, base=Base("mine.yaml", {}, entries={"args.eval_packing": True}))
    assert "TRL refuses eval_packing" in why(here, per_device_train_batch_size=1, **SPLIT)
