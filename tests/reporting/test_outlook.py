"""Sentences on candidates that were not probed, possible changes and the next step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.documents.unsearched import ExcludedChoice, Unlockable
from autotune.core.plan import Launch
from autotune.core.rows.images import ImageProfile
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.status import Ending, ProbeStatus, RunStatus
from autotune.inspection.cuda import BY_ADDRESS
from autotune.reporting.outlook import (
    interrupted_text,
    left_out_lines,
    next_command,
    trial_counts_text,
    veto_lines,
    way_out_lines,
)
from autotune.reporting.probe import probe_report
from autotune.units import GIB
from tests.reporting.examples import (
    TRIALS,
    a_result,
    failed,
    in_directory,
    interrupted,
    nothing_fits,
    only_the_default_fits,
    with_lengths,
)


def test_trials_are_counted_by_how_they_ended() -> None:
    assert trial_counts_text(a_result()) == "9 candidates in 5 min 12 s: 5 ok, 1 out of memory, 1 crashed, 2 vetoed."
    assert trial_counts_text(a_result(trials=TRIALS[:1])) == "1 candidate in 5 min 12 s: 1 ok."
    assert trial_counts_text(a_result(trials=())) == "No candidates in 5 min 12 s."


def test_the_time_of_a_resumed_run_is_not_taken_for_that_of_all_its_trials() -> None:
    resumed = a_result(trials=TRIALS[:1], settings={"resume": True})
    assert trial_counts_text(resumed) == "1 candidate in the study: 1 ok; this run took 5 min 12 s."


def test_vetoes_are_counted_by_reason_most_frequent_first() -> None:
    reasons = ["b", "a", "b", "c", "d", "e"]
    trials = tuple(failed(i, ProbeStatus.VETOED, reason) for i, reason in enumerate(reasons))
    said = veto_lines(a_result(trials=trials))
    assert said[:2] == ("2 vetoed: b", "1 vetoed: a")
    assert said[-1] == "1 vetoed for other reasons; all are in result.json"


def test_vetoes_for_what_was_predicted_are_one_reason_with_the_range_of_needs() -> None:
    trials = tuple(
        replace(failed(number, ProbeStatus.VETOED, f"predicted to need {size}"), predicted_bytes=size * GIB)
        for number, size in enumerate((40, 30, 95))
    )
    other = failed(3, ProbeStatus.VETOED, "a")
    assert veto_lines(a_result(trials=trials[:1])) == ("1 vetoed: predicted to need 40.00 GiB",)
    assert veto_lines(a_result(trials=(*trials, other))) == (
        "3 vetoed: predicted to need 30.00 GiB to 95.00 GiB",
        "1 vetoed: a",
    )


def test_choices_of_a_knob_left_out_for_one_reason_are_named_together() -> None:
    left_out = (
        ExcludedChoice("liger", "on", "no GPU"),
        ExcludedChoice("optimizer", "lion", "x"),
        ExcludedChoice("optimizer", "sgd", "x"),
    )
    assert left_out_lines(left_out) == ("liger on: no GPU", "optimizer lion, sgd: x")


def test_ways_out_name_shorter_lengths_with_what_they_keep() -> None:
    said = way_out_lines(nothing_fits())
    assert said[0].startswith("--allow quantization")
    assert said[1] == "--max-length 512 would keep 87.0 % of the tokens"
    assert said[-1] == "a larger --memory-budget"


def test_ways_out_are_the_lengths_below_the_shortest_that_was_to_fit_and_that_which_does() -> None:
    said = way_out_lines(only_the_default_fits())
    assert [line.split()[1] for line in said if line.startswith("--max-length")] == ["4096", "2048", "1024"]
    assert "--max-length 1024 would keep 24.3 % of the tokens" in said
    assert said[-1] == "a device with more memory"


@pytest.mark.parametrize("trainer", ["grpo", "rloo", "distillation", "online_dpo"])
def test_no_length_is_offered_where_none_limits_rows(trainer: str) -> None:
    said = way_out_lines(with_lengths(replace(nothing_fits(), trainer=trainer)))
    assert said[1:] == ("a larger --memory-budget",)


def test_no_length_is_offered_that_cuts_a_token_of_an_image() -> None:
    result = nothing_fits()
    plain = [line for line in way_out_lines(result) if line.startswith("--max-length")]
    one, lengths = LengthDistribution({1: 700}), sorted(int(line.split()[1]) for line in plain)
    for least, expected in ((lengths[-1] + 1, []), (lengths[-1], plain[:1])):
        ends = LengthDistribution({least: 700})
        dataset = replace(result.workload.dataset, images=ImageProfile(one, one, one, ends))
        said = way_out_lines(with_lengths(replace(result, workload=replace(result.workload, dataset=dataset))))
        assert [line for line in said if line.startswith("--max-length")] == expected


def test_there_is_no_way_out_where_every_candidate_failed_of_something_else_than_memory() -> None:
    crashed = failed(0, ProbeStatus.CRASHED, "in scoring: Your reward function my_rewards.judge failed: KeyError")
    result = replace(nothing_fits(), trials=(crashed,))
    for status, shown in ((RunStatus.FAILED, False), (RunStatus.NOTHING_FITS, True)):
        sections = probe_report(replace(result, status=status)).sections
        assert any(section.title == "What might change this (not measured)" for section in sections) == shown


def test_what_failed_its_longer_run_or_is_illegal_is_not_the_best_of_an_interrupted_run() -> None:
    said = "Interrupted before any candidate that may be recommended ran to the end."
    for trials in (interrupted().trials, only_the_default_fits().trials):
        assert interrupted_text(replace(interrupted(), trials=trials)) == said


def test_a_run_interrupted_before_any_recommendation_lists_no_choices() -> None:
    stopped = replace(
        interrupted(),
        left_out=(ExcludedChoice("liger", "on", "no GPU"),),
        unlockable=(Unlockable("lora", ("r16",), ""),),
    )
    titles = {section.title for section in probe_report(stopped).sections}
    assert not titles & {"Not searched", "Not measured, since it changes training"}


def test_an_interrupted_run_without_a_finished_probe_says_so() -> None:
    stopped = replace(interrupted(), trials=())
    assert interrupted_text(stopped) == "Interrupted before any candidate ran to the end."
    in_time = replace(stopped, status=RunStatus.UNDECIDED, ended=Ending.TIME)
    why = "ended the search before any probe decided whether a candidate fits."
    assert interrupted_text(in_time) == f"The time limit {why} Continue with --resume and a longer --timeout."
    by_trials = interrupted_text(replace(in_time, ended=Ending.TRIALS))
    assert by_trials == f"The limit of probes {why} Continue with --resume and more --trials."
    assert interrupted_text(replace(in_time, ended=Ending.EXHAUSTED)) == f"The search {why.replace(' the search', '')}"
    barred = interrupted_text(replace(in_time, trials=only_the_default_fits().trials))
    assert "decided whether a candidate that may be recommended fits. TRL's default fits with 13.00 GiB, but" in barred
    assert barred.endswith("Continue with --resume and a longer --timeout.")


def test_the_next_command_is_relative_to_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert next_command(in_directory(a_result(), tmp_path / "my run")) == "trl sft --config 'my run/config.yaml'"


@pytest.mark.parametrize(
    ("visible", "shown"),
    [(None, "CUDA_VISIBLE_DEVICES=0 "), ("2,3", "CUDA_VISIBLE_DEVICES=2 "), ("3", ""), ("GPU-4f5a", "")],
)
def test_the_next_command_shows_one_process_one_gpu_and_keeps_the_one_that_is_chosen(
    visible: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    result = in_directory(a_result(), Path("/elsewhere"))
    assert result.recommended is not None
    assert next_command(result) == f"{shown}trl sft --config /elsewhere/config.yaml"
    plan = replace(result.recommended.plan, launch=Launch(2))
    group = replace(result, recommended=replace(result.recommended, plan=plan))
    cpu = replace(result, hardware=replace(result.hardware, kind="cpu"))
    for other in (group, cpu):
        assert next_command(other) == "trl sft --config /elsewhere/config.yaml"


def test_the_next_command_counts_different_gpus_as_the_probes_did(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    result = in_directory(a_result(), Path("/elsewhere"))
    mixed = replace(result, hardware=replace(result.hardware, variables=BY_ADDRESS))
    found = "CUDA_VISIBLE_DEVICES=0 CUDA_DEVICE_ORDER=PCI_BUS_ID trl sft --config /elsewhere/config.yaml"
    assert next_command(mixed) == found


def test_the_next_command_lets_threads_wait_as_in_the_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    result = in_directory(a_result(), Path("/elsewhere"))
    cpu = replace(result, hardware=replace(result.hardware, kind="cpu", variables="OMP_WAIT_POLICY=PASSIVE"))
    assert next_command(cpu) == "OMP_WAIT_POLICY=PASSIVE trl sft --config /elsewhere/config.yaml"
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert next_command(cpu) == "trl sft --config /elsewhere/config.yaml"


def test_what_trl_has_no_command_for_is_trained_by_the_script() -> None:
    result = in_directory(a_result(), Path("/elsewhere"))
    assert result.recommended is not None
    plan = replace(result.recommended.plan, peft={"peft_type": "IA3"})
    asked = replace(result, recommended=replace(result.recommended, plan=plan))
    assert next_command(asked) == "python /elsewhere/train.py"
    assert next_command(asked, "/its own/{}".format) == "'/its own/python' /elsewhere/train.py"
    several = replace(plan, launch=Launch(2))
    asked = replace(result, recommended=replace(result.recommended, plan=several))
    accelerate = "accelerate launch --config_file /elsewhere/accelerate.yaml"
    assert next_command(asked) == f"{accelerate} /elsewhere/train.py"
    assert next_command(asked, "/venv/bin/{}".format) == f"/venv/bin/{accelerate} /elsewhere/train.py"
    assert next_command(result, "/venv/bin/{}".format).endswith("/venv/bin/trl sft --config /elsewhere/config.yaml")
