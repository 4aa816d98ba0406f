"""Offers predict the result of a run that follows them, and are made only if the gain is worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.app.offers import dropping_offer, packing_offer
from autotune.core.candidate import Candidate, Choice
from autotune.core.documents.estimate import Estimate, MemoryEstimate, Origin
from autotune.core.setting import Setting
from autotune.core.workload import Rollouts, Workload
from autotune.planning.extrapolation.forecast import TRACED_ERROR
from autotune.techniques.packing import CUTTING
from autotune.trainers.problem import TrainerProblem
from autotune.units import GIB, MIB, parse_size
from tests.settings import problem, setting, workload
from tests.small import write_rows, write_small_model

ONE_WAY: dict[str, Choice] = {
    "max_completion_length": 16, "attention": "sdpa", "gradient_checkpointing": "off", "liger": "off",
    "hub_kernels": "off", "precision": "float32", "optimizer": "adamw_torch", "pad_to_multiple_of": "none",
    "vllm": "off", "allocator": "default", "steps_per_generation": "step", "per_device_train_batch_size": 8,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.nightly
def test_dropping_the_longest_prompts_saves_what_the_offer_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = str(write_small_model(tmp_path / "model", weights=False))
    prompts = [*(" ".join(["memory"] * (5 + place % 11)) for place in range(199)), " ".join(["memory"] * 900)]
    rows = str(write_rows(tmp_path / "rows.jsonl", ({"prompt": prompt} for prompt in prompts)))
    needs, offers = [], []
    for share in (None, 0.99):
        found = autotune.plan(model, rows, trainer="grpo", gpu="24GiB", fix=ONE_WAY, prompt_coverage=share)
        assert found.fastest is not None
        assert found.fastest.memory is not None
        needs.append(found.fastest.memory.device_bytes)
        offers += [note for note in found.notes if note.startswith("Dropping")]
    # Those who drop them are offered nothing.
    (offer,) = offers
    said, _, saved = offer.removesuffix(".").partition(" is predicted to save ")
    assert said == "Dropping 1 prompt over 29 tokens (--prompt-coverage 0.99)"
    # Both are extrapolated, from traces of different sizes.
    assert parse_size(saved.replace(" ", "")) == pytest.approx(needs[0] - needs[1], rel=TRACED_ERROR)


def offered(lengths: dict[int, int], *, trainer: str = "grpo", coverage: float = 1.0, vllm_bytes: int = 0) -> str:
    """Return the offers if a token of the longest prompt needs 1 MiB in addition to a constant."""

    def estimate(candidate: Candidate, here: Setting) -> Estimate:
        peak_bytes = vllm_bytes + MIB * here.workload.longest
        return Estimate(candidate, Origin.TRACED, MemoryEstimate(peak_bytes, None, 0, {}, 0, None, 0.0))

    of = replace(workload(trainer=trainer, lengths=lengths), rollouts=Rollouts(prompt_coverage=coverage))
    found: TrainerProblem = problem(setting(of=of), trainer=trainer)
    return " ".join(dropping_offer(found, estimate, found.baseline))


def test_it_is_offered_to_drop_up_to_one_prompt_in_a_hundred() -> None:
    said = "Dropping 3 prompts over 2,048 tokens (--prompt-coverage 0.99) is predicted to save 6.00 GiB."
    assert offered({20: 290, 2048: 7, 8192: 3}) == said
    # Four of 300 are more, and equally long prompts are dropped together.
    assert offered({20: 290, 2048: 6, 8192: 4}) == ""
    assert offered({20: 90, 8192: 1}) == ""


def test_nothing_is_offered_that_saves_little() -> None:
    assert offered({20: 290, 2048: 7, 8192: 3}, vllm_bytes=200 * GIB) == ""
    assert offered({20: 290, 2048: 7, 2049: 3}) == ""


@pytest.mark.parametrize(("trainer", "coverage"), [("sft", 1.0), ("grpo", 0.999)])
def test_nothing_is_offered_to_trainers_that_cut_and_to_those_who_drop(trainer: str, coverage: float) -> None:
    assert offered({20: 290, 2048: 7, 8192: 3}, trainer=trainer, coverage=coverage) == ""


def test_nothing_is_offered_that_leaves_too_few_prompts_for_a_generation() -> None:
    # RLOO completes each prompt twice, so that a generation of 200 completions needs 100 prompts.
    of = workload(trainer="rloo", lengths={20: 99, 8192: 1})
    found = problem(setting(of=of, global_batch_size=200), trainer="rloo")

    def estimate(candidate: Candidate, here: Setting) -> Estimate:
        peak_bytes = MIB * here.workload.longest
        return Estimate(candidate, Origin.TRACED, MemoryEstimate(peak_bytes, None, 0, {}, 0, None, 0.0))

    whole = found.baseline.but(per_device_train_batch_size=200)
    assert found.illegal(whole) is None
    assert dropping_offer(found, estimate, whole) == ()


SHORT = workload(lengths={20: 1000, 100: 20})


def packing_offered(
    speedup: float, options: Mapping[str, Any] | None = None, of_rows: Workload = SHORT, batch: int = 8
) -> tuple[str, list[Candidate]]:
    """Return the offer to pack and its traced candidates, if packed rows are this many times as fast."""
    of_search = replace(setting(of=of_rows, global_batch_size=batch), **(options or {}))
    found, asked = problem(of_search), list[Candidate]()

    def of(candidate: Candidate, rate: float) -> Estimate:
        memory = MemoryEstimate(GIB, None, 0, {}, 0, 1.0, 0.0)
        return Estimate(candidate, Origin.TRACED, memory, rate, spare_bytes=GIB)

    def run(candidates: Sequence[Candidate]) -> list[Estimate]:
        asked.extend(candidates)
        return [of(candidate, 1000.0 * speedup) for candidate in candidates]

    return " ".join(packing_offer(found, run, of(found.baseline, 1000.0))), asked


def test_an_offer_to_pack_stands_on_traces_of_the_packed_rows_themselves() -> None:
    said, asked = packing_offered(1.5)
    assert said.endswith("they are predicted to be 1.5 times as fast.")
    assert asked
    assert {candidate["packing"] for candidate in asked} == {CUTTING}


def test_a_global_batch_that_is_offered_is_one_that_the_packed_rows_are_legal_with() -> None:
    # Rows of 120 and 240 tokens hold 2.67 and 5.32 documents: 3 are more than a tenth away from 2.67, and 5 are not.
    said, asked = packing_offered(1.5, of_rows=workload(lengths={30: 500, 60: 500}), batch=2)
    assert said.startswith("Packed rows of 1,024 tokens hold 22 documents: with --global-batch-size 22 they are ")
    assert {candidate["max_length"] for candidate in asked} == {240, 1024}


@pytest.mark.parametrize(
    "options",
    [
        {"excluded": frozenset({"packing"})},
        {"fixed": {"packing": "none"}},
        {"fixed": {"padding_free": "on"}},
    ],
    ids=["excluded", "fixed", "padding-free"],
)
def test_packing_that_the_user_ruled_out_is_neither_offered_nor_traced(options: Mapping[str, Any]) -> None:
    assert packing_offered(1.5, options) == ("", [])


def test_what_may_be_no_faster_by_the_error_of_predicted_times_is_not_offered() -> None:
    assert packing_offered(1.24)[0] == ""
