"""The catalogue as a whole: rules for every technique, including new ones."""

from __future__ import annotations

import re

import pytest

from autotune.errors import InputError
from autotune.techniques import catalogue, find
from autotune.techniques.base import Effect, Technique
from autotune.trainers import find_trainer, trainers
from tests.settings import GPU, setting

EVERY = pytest.mark.parametrize("technique", catalogue(), ids=lambda item: item.name)


def test_the_issue_s_techniques_are_all_there() -> None:
    assert {item.name for item in find_trainer("sft").techniques} >= {
        "max_length", "packing", "padding_free", "pad_to_multiple_of", "gradient_checkpointing",
        "activation_offloading", "attention", "liger", "hub_kernels", "precision", "optimizer", "lora", "quantization",
        "per_device_train_batch_size", "torch_compile",
    }  # fmt: skip


def test_no_two_techniques_write_the_same_field() -> None:
    written = [(field, item.name) for item in catalogue() for field in item.writes]
    fields = [field for field, _ in written]
    assert len(fields) == len(set(fields)), sorted(written)


@EVERY
def test_a_technique_s_default_is_a_choice_that_it_documents_or_parses(technique: Technique) -> None:
    assert technique.parse(technique.trl_default) == technique.trl_default


@EVERY
def test_every_documented_choice_is_spelled_as_it_is_parsed(technique: Technique) -> None:
    for option in technique.options:
        assert technique.parse(str(option.choice)) == option.choice


@EVERY
def test_a_technique_that_changes_training_says_how(technique: Technique) -> None:
    changing = any(option.effect is Effect.CHANGES_TRAINING for option in technique.options)
    assert bool(technique.changes) == changing


@EVERY
def test_a_technique_writes_only_what_it_owns(technique: Technique) -> None:
    here = setting(machine=GPU)
    baseline = find_trainer("sft").defaults(here)
    for option in technique.options:
        choice = technique.parse(option.choice, here)
        entries = technique.plan(choice, baseline.but(**{technique.name: choice}), here)
        assert entries.keys() <= technique.writes


@EVERY
def test_the_summary_is_one_sentence(technique: Technique) -> None:
    assert re.fullmatch(r"[A-Z].*[a-z0-9)]\.", technique.summary)


@EVERY
def test_a_misspelled_choice_is_told_apart_and_named(technique: Technique) -> None:
    with pytest.raises(InputError, match="'nonsense' is not a choice of") as caught:
        technique.parse("nonsense")
    assert caught.value.hint


def test_a_misspelled_knob_gets_the_nearest_name() -> None:
    with pytest.raises(InputError, match="Did you mean 'packing'"):
        find("packin", catalogue())


def test_normal_forms_settle_in_the_passes_that_are_made() -> None:
    trainer, here = trainers()["sft"], setting(machine=GPU)
    baseline = trainer.defaults(here)
    for packing in ("none", "bfd", "bfd_split", "wrapped"):
        for padding_free in ("off", "on"):
            for max_length in (512, 2000, 4096):
                once = trainer.normal(
                    baseline.but(packing=packing, padding_free=padding_free, max_length=max_length), here
                )
                assert trainer.normal(once, here) == once
