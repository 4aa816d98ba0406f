"""The notes on a run name the peculiarities of a trainer, as the documentation does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.app.arguments import CheckArguments
from autotune.app.check.task import Task
from autotune.app.notes import (
    few_documents_text,
    notes_on,
    notes_on_assumptions,
    notes_on_device,
    notes_on_gpus,
    notes_on_loading,
    notes_on_software,
    notes_on_workload,
)
from autotune.core.documents.verdict import Need, Outcome, Source
from autotune.core.gpu import AchievedRates
from autotune.core.machine import NULL_DRIVER, DeviceKind, Hardware
from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus
from autotune.core.workload import Rollouts
from autotune.inspection.command_line import Command
from autotune.inspection.cuda import BY_ADDRESS
from autotune.inspection.gpus import find_gpu
from autotune.inspection.software import NEWEST_TESTED
from autotune.trainers import trainers
from autotune.trainers.base import Trainer
from autotune.trainers.prompts import PLACEHOLDER_REWARD
from autotune.userconfig.written import WrittenConfig
from tests.settings import GPU, contaminates, machine_with, pictured_workload, problem, setting, workload

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers.md"


@pytest.mark.parametrize("trainer", trainers().values(), ids=lambda item: item.name)
def test_what_a_trainer_does_unlike_others_is_a_note_and_in_the_documentation(trainer: Trainer) -> None:
    here = setting(of=workload(trainer=trainer.name))
    told = tuple(notes_on(problem(here, trainer=trainer.name)))
    written = " ".join(PAGE.read_text(encoding="utf-8").split())
    for sentence in (*trainer.peculiarities, *trainer.text_peculiarities):
        assert sentence in told
        assert sentence in written


@pytest.mark.parametrize("trainer", trainers().values(), ids=lambda item: item.name)
def test_a_reward_that_nobody_named_is_the_first_note(trainer: Trainer) -> None:
    unnamed = workload(trainer=trainer.name)
    named = replace(unnamed, rollouts=Rollouts(rewards=("my_rewards.length",)))
    first, second = (next(notes_on(problem(setting(of=of), trainer=trainer.name)), "") for of in (unnamed, named))
    assert (first == PLACEHOLDER_REWARD) is trainer.scores
    assert second != PLACEHOLDER_REWARD


def test_releases_after_the_newest_tested_ones_are_a_note_in_plans_searches_and_checks() -> None:
    packages = {**NEWEST_TESTED, "torch": "3.0.1", "peft": "1.0"}
    (note,) = notes_on_software(packages)
    tested = f"torch {NEWEST_TESTED['torch']}, peft {NEWEST_TESTED['peft']}"
    assert note.startswith(f"Installed is torch 3.0.1 and peft 1.0, and autotune was tested up to {tested}: ")
    assert note in notes_on_workload(workload(), packages)
    assert note in notes_on(problem(setting(machine=replace(GPU, packages=packages))))
    assert list(notes_on_software(NEWEST_TESTED)) == []
    task = Task(CheckArguments("a.yaml"), WrittenConfig(Command("sft", ()), None, "sft"), None, 1, 0.0)
    task = replace(task, target=replace(GPU, packages=packages))
    findings = task.verdict(Outcome.FITS, (), need=Need(Source.TRACED, 1, 1, 1, 1, 1)).findings
    assert [each.message for each in findings] == [note]


@pytest.mark.parametrize("trainer", ["dpo", "kto"])
def test_a_precomputed_reference_which_trl_refuses_for_images_is_no_note_on_them(trainer: str) -> None:
    told = [
        " ".join(notes_on(problem(setting(of=replace(of, trainer=trainer)), trainer=trainer)))
        for of in (workload(), pictured_workload("prompt+chosen+rejected"))
    ]
    assert ["reference=precomputed" in notes for notes in told] == [True, False]


def test_speeds_of_a_training_that_is_evaluated_are_without_that() -> None:
    sentence = "Speeds and times of an epoch leave evaluations out."
    assert sentence in notes_on(problem(setting(of=replace(workload(), evaluation=workload().dataset))))
    assert sentence not in notes_on(problem(setting()))


def test_a_null_gpu_is_named_because_its_times_mean_nothing() -> None:
    here = setting()
    null = machine_with(here.machine, driver=NULL_DRIVER)
    sentence = "Measured on a null GPU, whose kernels do nothing: times and speeds mean nothing."
    assert sentence in notes_on(problem(replace(here, machine=null), trainer="sft"))
    assert sentence not in notes_on(problem(here, trainer="sft"))


@pytest.mark.parametrize(
    ("hardware", "note"),
    [
        (GPU.hardware, None),
        (replace(GPU.hardware, processes=4), "4 processes train together, one on each GPU. autotune has run several"),
        (replace(GPU.hardware, variables=BY_ADDRESS), f"The GPUs of this machine differ. Train with {BY_ADDRESS}"),
    ],
)
def test_several_gpus_and_different_ones_are_notes_before_the_search_and_after(
    hardware: Hardware, note: str | None
) -> None:
    machine = replace(GPU, hardware=hardware)
    found = list(notes_on_device(machine))
    assert [each[: len(note or "")] for each in found] == ([note] if note else [])
    assert set(found) <= {*notes_on(problem(setting(machine=machine)))}


def test_an_allocator_that_the_shell_sets_is_named_because_probes_run_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    (note,) = (note for note in notes_on(problem(setting(machine=GPU))) if "ALLOC_CONF" in note)
    assert note.startswith("Probes ran without PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True of this environment.")
    assert not any("ALLOC_CONF" in note for note in notes_on(problem(setting())))


def test_fewer_rows_than_a_global_batch_are_a_note_unless_several_completions_are_generated_of_each() -> None:
    rows = workload().dataset.documents.rows
    assert few_documents_text(workload(), rows) == ""
    text = f"The dataset has {rows} documents, fewer than a global batch of {rows + 1}"
    assert few_documents_text(workload(), rows + 1) == text
    note = f"{text}: rows were repeated to measure whole steps."
    assert note in notes_on(problem(setting(global_batch_size=rows + 1)))
    assert few_documents_text(workload(trainer="grpo"), rows + 1) == ""
    assert few_documents_text(workload(trainer="online_dpo"), rows + 1).startswith(f"The dataset has {rows} prompts")


def test_packing_that_is_not_tried_is_that_which_keeps_documents_apart() -> None:
    of = workload(checks=(contaminates("sdpa"), contaminates("eager")))
    found = problem(setting(of=of, allowed=frozenset({"packing"})))
    assert found.choices["packing"] == ("none", "wrapped")
    (note,) = (note for note in notes_on(found) if "were not tried" in note)
    assert note.startswith("Packing that keeps documents apart and padding-free were not tried: ")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_loading_is_named_where_the_device_waits_for_it(kind: DeviceKind) -> None:
    hardware = replace(setting().machine.hardware, kind=kind)
    shown = Measurement(ProbeStatus.OK, step_seconds=2.0, loading_seconds=0.1)
    assert list(notes_on_loading(shown, hardware)) == []
    (sentence,) = notes_on_loading(replace(shown, loading_seconds=0.8), hardware)
    assert "takes 40.0 % of a step" in sentence
    # On a CPU, further processes would take the cores that train.
    assert ("a larger dataloader_num_workers" in sentence) is (kind == "cuda")


def test_online_dpo_is_told_to_generate_without_a_cache() -> None:
    assert any("without a key-value cache" in sentence for sentence in trainers()["online_dpo"].peculiarities)


def test_a_gpu_without_figures_of_its_own_has_a_note_instead_of_an_error_of_time() -> None:
    known = find_gpu("A100-80GB")
    assert known.speeds is not None
    new = replace(known, name="X200", speeds=replace(known.speeds, achieved=AchievedRates()))
    (sentence,) = notes_on_gpus([new])
    assert sentence == "Not measured on X200: any operator; times follow from medians over other cards."


def test_gpus_with_figures_of_the_same_other_card_share_a_note_of_which_they_are() -> None:
    error, sentence = notes_on_gpus([find_gpu(name) for name in ("RTX3090", "A100-80GB", "RTX5090")])
    assert error.startswith("Times are predicted within ±25 %")
    assert sentence == ("Not measured on RTX3090, RTX5090: the share of peak memory bandwidth; that of an A40 is used.")


def test_what_traces_assume_is_said_once_with_every_function_that_reads_it() -> None:
    read = [f"a float read from a tensor is 1 (in {name} of trainer.py)" for name in ("log", "train")]
    (told,) = notes_on_assumptions([*read, "gradients are finite"])
    read_as = "a float read from a tensor is 1 (in log of trainer.py, train of trainer.py)"
    assert told.endswith(f"They assumed: {read_as}; gradients are finite.")
    assert list(notes_on_assumptions([])) == []
